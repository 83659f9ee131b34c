"""Modes: what is switched on around, inside and between the steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .parts import Block, Counted, Stack, attributes, calls
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("modes")


class _Dropping(Counted):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.silu(h), 0.4, self.training)


@PROGRAMS.add("gradients are recorded in eval mode")
def training_in_eval_mode() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.drop = nn.BatchNorm1d(12), nn.Dropout(0.5)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return self.drop(torch.relu(self.norm(h)))

    return case(Stack(Normed).eval(), torch.randn(4, 8))


def _evaluate_then_train(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        model.seen = [model(*args).clone()]
    with torch.inference_mode():
        model.seen.append(torch.empty(4, 8).copy_(model(args[0] * 2)))
    model.train()
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add(
    "evaluation under no_grad and inference_mode between the steps",
    step=_evaluate_then_train,
    observe=lambda m: {**calls(m), "seen": [t.clone() for t in m.seen]},
    python_state=True,
    ops=("bernoulli",),
)
def evaluation_between() -> Case:
    return case(Stack(_Dropping), torch.randn(4, 8))


def _generate_then_train(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    ids = args[0]
    with torch.no_grad():
        out = ids[:, :2]
        for _ in range(4):
            last = model(out)[:, -1]
            out = torch.cat([out, torch.multinomial(last.softmax(-1), 1)], 1)
        model.sampled.append(out)
    loss = loss_fn(model(ids))
    loss.backward()
    with torch.inference_mode():
        model.sampled.append(model(out[:, :3]).argmax(-1).clone())
    model.sampled = [t.clone() for t in model.sampled]
    return loss


class _Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(9, 8), nn.Linear(8, 9)
        self.blocks, self.sampled = nn.ModuleList([_Dropping() for _ in range(2)]), []

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x) + x.cumsum(1) * 0.1
        return self.head(x)


@PROGRAMS.add(
    "generation with sampling before and after the backward of the same step",
    step=_generate_then_train,
    observe=attributes("sampled"),
    python_state=True,
    ops=("multinomial",),
)
def generation_in_training() -> Case:
    ids = torch.randint(0, 9, (2, 6))
    return case(_Language().train(), ids, loss=lambda o: F.cross_entropy(o[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


def _generate_inside(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    ids = args[0]
    loss = loss_fn(model(ids))
    with torch.no_grad():  # while the first graph is still alive
        model.sampled = [model(ids[:, :3]).argmax(-1)]
    loss.backward()
    return loss


@PROGRAMS.add("generation between a forward and its backward", step=_generate_inside, observe=attributes("sampled"))
def generation_before_backward() -> Case:
    ids = torch.randint(0, 9, (2, 6))
    return case(_Language().train(), ids, loss=lambda o: F.cross_entropy(o[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))


@PROGRAMS.add("grad mode changes inside forward, also as a decorator")
def grad_mode_inside() -> Case:
    class Switching(Block):
        @torch.no_grad()
        def target(self, h: torch.Tensor) -> torch.Tensor:
            return h.sigmoid()

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            gate = self.target(h)
            with torch.set_grad_enabled(False):
                shift = torch.tanh(h).mean()
                with torch.enable_grad():
                    inner = h.sin()
            with torch.inference_mode():
                count = float((h > 0).float().mean())
            return inner * gate + h * shift * count

    return case(Stack(Switching), torch.randn(4, 8))


@contextlib.contextmanager
def _device_mode() -> Iterator[None]:
    with torch.device("cpu"):
        yield


@PROGRAMS.add("a default device is set around the step: factories run through a function mode", around=_device_mode)
def device_mode() -> Case:
    class Factories(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            grid = torch.arange(h.shape[-1], dtype=h.dtype) / 10
            return torch.sin(h * grid) * torch.full((1,), 0.5) + torch.rand(h.shape) * h

    return case(Stack(Factories), torch.randn(4, 8))


class Swapping(TorchFunctionMode):
    """Replaces one function by another one: the replay has to run what really ran."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.tanh:
            func = torch.sigmoid
        return func(*args, **(kwargs or {}))


@PROGRAMS.add("the user's function mode replaces functions", around=Swapping, ops=("sigmoid",))
def function_mode() -> Case:
    return case(Stack(), torch.randn(4, 8))


class Halving(TorchDispatchMode):
    """The user's own dispatch mode: it counts and it changes results."""

    num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Halving.num_ops += func is not torch.ops.aten.detach.default  # saved results are not detached under hooks
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


def _with_dispatch_mode(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    Halving.num_ops = 0
    with Halving():
        loss = loss_fn(model(*args, **kwargs))
    model.num_ops = Halving.num_ops
    loss.backward()
    return loss


@PROGRAMS.add(
    "the user's dispatch mode changes results in forward; it must not see the replay",
    step=_with_dispatch_mode,
    observe=attributes("num_ops"),
    opaque=True,
)
def dispatch_mode() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _whole_step_in_mode(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    with Halving():
        loss = loss_fn(model(*args, **kwargs))
        loss.backward()
    return loss


@PROGRAMS.add("the same mode around backward as well", step=_whole_step_in_mode, opaque=True)
def dispatch_mode_around_backward() -> Case:
    return case(Stack(), torch.randn(4, 8))


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@PROGRAMS.add(
    "attention is restricted to the math form around the step",
    around=lambda: sdpa_kernel(SDPBackend.MATH),
    ops=("softmax", "bmm"),
)
def sdpa_math_around() -> Case:
    return case(Stack(_Attention, 2), torch.randn(2, 5, 8))


@PROGRAMS.add("each layer chooses another form of attention", ops=("flash_attention", "bmm"))
def sdpa_choice_inside() -> Case:
    kinds = iter([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])

    class Choosing(_Attention):
        def __init__(self) -> None:
            super().__init__()
            self.backend = next(kinds)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(self.backend):
                return super().forward(x)

    return case(Stack(Choosing), torch.randn(2, 5, 8))


@PROGRAMS.add(
    "train() and eval() alternate from step to step", between=lambda model, i: model.train(i % 2 == 0), num_steps=4
)
def train_and_eval_alternate() -> Case:
    class Normed(_Dropping):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(super().forward(x))

    return case(Stack(Normed), torch.randn(4, 8))


@contextlib.contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@PROGRAMS.add(
    "deterministic algorithms are asked for: fresh memory is filled", around=_deterministic, ops=("index_put",)
)
def deterministic_algorithms() -> Case:
    class Scatter(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(h)
            out[:, ::2] = h[:, 1::2].sin()
            out[:, 1::2] = h[:, ::2].cos()
            rows = torch.tensor([0, 0, 1])
            return torch.tanh(out).index_put((rows,), h[:3], accumulate=True)

    return case(Stack(Scatter), torch.randn(4, 8))


def _profiled(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        loss = loss_fn(model(*args, **kwargs))
    model.flops = counter.get_total_flops()
    loss.backward()
    return loss


@PROGRAMS.add(
    "torch's flop counter watches forward",
    step=_profiled,
    observe=attributes("flops"),
    opaque=True,
    shows=lambda records: records[0].observed["flops"] > 0,
)
def flop_counter_around() -> Case:
    return case(Stack(_Attention, 2), torch.randn(2, 4, 8))
