"""Time and threads: graphs that live together, backward elsewhere, errors in the middle."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Counted, Stack, attributes, in_thread
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("time_threads")


class Dropping(Block):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(h), 0.3, training=True) * h.sin()


def _several_alive(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    losses = [loss_fn(model(x)) for x in args]
    for loss in reversed(losses):
        loss.backward()
    return torch.stack([loss.detach() for loss in losses])


@PROGRAMS.add("three graphs are alive, walked in the opposite order", step=_several_alive)
def several_graphs_alive() -> Case:
    return case(Stack(Dropping), *(torch.randn(4, 8) for _ in range(3)))


def _interleaved(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    waiting: list[torch.Tensor] = []
    total = torch.zeros(())
    for x in args:  # one forward, one backward, with two in flight, as a pipeline does
        waiting.append(loss_fn(model(x)))
        if len(waiting) > 2:
            loss = waiting.pop(0)
            loss.backward()
            total = total + loss.detach()
    for loss in waiting:
        loss.backward()
        total = total + loss.detach()
    return total


@PROGRAMS.add("forwards and backwards of several micro-batches interleave", step=_interleaved, heavy=True)
def interleaved_pipeline() -> Case:
    return case(Stack(Dropping), *(torch.randn(n, 8) for n in (4, 4, 3, 4, 2)))


def _joined(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    a, b = model(args[0]), model(args[1])
    loss = loss_fn(a) + loss_fn(b) + F.cosine_similarity(a, b).mean()
    loss.backward()
    return loss


@PROGRAMS.add("one loss over two passes of the same model, as in contrastive learning", step=_joined)
def two_passes_one_loss() -> Case:
    return case(Stack(Dropping), torch.randn(4, 8), torch.randn(4, 8))


def _chained(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    x, total = args[0], torch.zeros(())
    state = torch.zeros_like(x)
    for k in range(4):  # truncated: the graph reaches over two calls
        state = model(x + state)
        total = total + loss_fn(state)
        if k % 2:
            total.backward()
            state, total = state.detach(), torch.zeros(())
    return state.sum()


@PROGRAMS.add("the output of one call is the input of the next, cut every second time", step=_chained, heavy=True)
def truncated_through_time() -> Case:
    return case(Stack(Dropping, 2), torch.randn(4, 8))


def _late_backward(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    if model.pending is not None:
        model.pending.backward()
    model.pending = loss
    return loss


@PROGRAMS.add(
    "the backward of a step runs in the next one",
    step=_late_backward,
    update=False,
    python_state=True,
    num_steps=4,
    may_drop_nothing=True,
)
def backward_one_step_later() -> Case:
    model: Any = Stack(Dropping)
    model.pending = None
    return case(model, torch.randn(4, 8))


def _backward_elsewhere(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    in_thread(loss.backward)
    return loss


@PROGRAMS.add("forward in this thread, backward in another", step=_backward_elsewhere, may_drop_nothing=True)
def backward_in_another_thread() -> Case:
    return case(Stack(Dropping), torch.randn(4, 8))


def _forward_elsewhere(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = in_thread(lambda: loss_fn(model(*args, **kwargs)))
    loss.backward()
    return loss


@PROGRAMS.add(
    "forward in another thread, backward in this one", step=_forward_elsewhere, opaque=True, may_drop_nothing=True
)
def forward_in_another_thread() -> Case:
    return case(Stack(Dropping), torch.randn(4, 8))


def _backwards_at_once(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    losses = [loss_fn(model(x)) for x in args]
    sides: list[list[torch.Tensor]] = [[] for _ in losses]
    params = list(model.parameters())
    barrier = threading.Barrier(len(losses))

    def walk(k: int) -> None:
        barrier.wait()
        sides[k] = list(torch.autograd.grad(losses[k], params))

    threads = [threading.Thread(target=walk, args=(k,)) for k in range(len(losses))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k, p in enumerate(params):
        p.grad = torch.stack([side[k] for side in sides]).sum(0)
    return torch.stack([loss.detach() for loss in losses])


@PROGRAMS.add(
    "several backwards run at the same time in threads of their own", step=_backwards_at_once, may_drop_nothing=True
)
def backwards_at_once() -> Case:
    class Smooth(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.gelu(h), 0.3, training=True) * h.tanh()

    return case(Stack(Smooth), *(torch.randn(4, 8) for _ in range(3)))


# ---------------------------------------------------------------------------------------------- errors


class BadBatch(ValueError):
    """The user's own error."""


class _Fragile(Counted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.isfinite(x).all():
            raise BadBatch("bad batch")
        return F.dropout(super().forward(x), 0.2, training=True)


def _recovering(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    good, bad = args
    try:
        loss_fn(model(bad)).backward()
    except BadBatch as error:
        model.log.append(str(error))
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model(good))
    loss.backward()
    return loss


@PROGRAMS.add(
    "a bad batch raises in the middle of forward; the loop goes on",
    step=_recovering,
    observe=attributes("log"),
    python_state=True,
    shows=lambda records: records[0].observed["log"][0] == "bad batch",
)
def error_in_forward() -> Case:
    bad = torch.randn(4, 8)
    bad[0, 0] = float("nan")
    model: Any = Stack(_Fragile)
    model.log = []
    return case(model, torch.randn(4, 8), bad)


def _hook_raises(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    model.trip = True
    for kind in (RuntimeError, KeyboardInterrupt, MemoryError):
        model.error = kind
        try:
            loss_fn(model(*args, **kwargs)).backward()
        except kind as error:
            model.log.append(f"{type(error).__name__}: {error}")
        model.zero_grad(set_to_none=True)
    model.trip = False
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add(
    "a gradient hook raises in the middle of backward: an error, a keyboard interrupt, out of memory",
    step=_hook_raises,
    observe=attributes("log"),
    python_state=True,
    shows=lambda records: (
        [t.split(":")[0] for t in records[0].observed["log"]] == ["RuntimeError", "KeyboardInterrupt", "MemoryError"]
    ),
)
def error_in_backward_hook() -> Case:
    class Tripping(Stack):
        trip, error = False, RuntimeError

        def __init__(self) -> None:
            super().__init__(Dropping)
            self.log: list[str] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 1:
                    x.register_hook(self.check)
            return x

        def check(self, grad: torch.Tensor) -> None:
            if self.trip:
                raise self.error("tripped in backward")

    return case(Tripping(), torch.randn(4, 8))


class _Raises(torch.autograd.Function):
    armed = False

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        if _Raises.armed:
            raise BadBatch("in backward")
        return g * x.exp()


def _function_raises(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    _Raises.armed = True
    kept = loss_fn(model(*args))
    try:
        kept.backward(retain_graph=True)
    except BadBatch as error:
        model.log.append(str(error))
    _Raises.armed = False
    model.zero_grad(set_to_none=True)
    kept.backward()  # the same graph, a second time
    return kept


@PROGRAMS.add(
    "a backward fails half way; the same graph is walked again and succeeds",
    step=_function_raises,
    observe=attributes("log"),
    python_state=True,
    shows=lambda records: len(records[0].observed["log"]) == 1,
)
def failed_backward_repeated() -> Case:
    class Failing(Dropping):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return _Raises.apply(super().mix(h))

    model: Any = Stack(Failing)
    model.log = []
    return case(model, torch.randn(4, 8))


def _abandoned(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    for stop in (1, 2):
        model.stop = stop
        try:
            model(*args, **kwargs)
        except KeyboardInterrupt:
            model.log.append("interrupted")
    model.stop = 9
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add(
    "the user interrupts forward by hand, twice",
    step=_abandoned,
    observe=attributes("log"),
    python_state=True,
    may_drop_nothing=True,
)
def interrupted_forward() -> Case:
    class Stopping(Stack):
        stop = 9

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                if k == self.stop:
                    raise KeyboardInterrupt
                x = F.dropout(block(x), 0.2, training=True)
            return x

    model: Any = Stopping(Dropping)
    model.log = []
    return case(model, torch.randn(4, 8))


def _caught_inside(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add(
    "forward catches its own errors and takes another way", observe=attributes("fallbacks"), python_state=True
)
def error_caught_inside_forward() -> Case:
    class Falling(Stack):
        fallbacks = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            for block in self.blocks:
                try:
                    y = block(x)
                    y = y.view(3, -1)  # 4 x 8 cannot be split into 3 rows
                except RuntimeError:
                    self.fallbacks += 1
                    y = block(x).tanh()
                x = y
            return x

    return case(Falling(Dropping), torch.randn(4, 8))


@PROGRAMS.add("another module of the same model is trained with an optimizer in the same step", step=_caught_inside)
def plain_and_planned_parts() -> Case:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Stack(Dropping), Stack(Block)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first = self.a(x)
            return self.b(first) + self.a(first.detach())

    return case(Outer(), torch.randn(4, 8))
