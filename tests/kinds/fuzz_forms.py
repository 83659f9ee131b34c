"""How the step of a random program is taken: with what around it, in which order, how often, with what in between."""

from __future__ import annotations

import contextlib
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .parts import in_thread
from .program import Loss, Step

torch.get_device_module("cuda")  # remembered from now on; where `fork_rng` first asks for it, modes see that


class _Rounding(TorchDispatchMode):
    """A user's mode that changes results, in forward and in backward, but must not reach a replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rounded = func in (torch.ops.aten.tanh.default, torch.ops.aten.sin.default, torch.ops.aten.silu.default)
        return out * 0.75 if rounded else out


class _SeenOps(TorchDispatchMode):
    """Counts ops. Autograd detaches what it saves and what comes back, with hooks at other moments than without."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "detach" not in str(func):
            self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class _SeenFunctions(TorchFunctionMode):
    """The same for functions."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if "detach" not in name:
            self.seen[name] += 1
        return func(*args, **(kwargs or {}))


def live_bytes() -> int:
    """Bytes of the storages of floating tensors that Python knows of."""
    found = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (torch.Tensor, nn.Parameter) and t.layout is torch.strided and t.dtype.is_floating_point
    }
    return sum(found.values())


def _in(around: Callable[[], Any]) -> Step:
    """A step with something active around the whole of it, backward included."""

    def step(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
        with around():
            loss = loss_fn(model(*args, **kwargs))
            loss.backward()
        return loss

    return step


def _simple(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


def _simple_under(handles: list[Any], model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """A simple step with hooks, which are removed after it."""
    try:
        return _simple(model, args, kwargs, loss_fn)
    finally:
        for handle in handles:
            handle.remove()


def _twice(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


def _penalty(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    (grad,) = torch.autograd.grad(loss, args[0], create_graph=True, allow_unused=True)
    (loss if grad is None else loss + grad.square().sum()).backward()
    return loss


def _two_alive(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    first, second = loss_fn(model(*args, **kwargs)), loss_fn(model(args[0].detach() * 0.5))
    second.backward()
    first.backward()
    return first


def _partly(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out = model(*args, **kwargs)
    with torch.no_grad():
        model(*args, **kwargs)
    params = list(model.parameters())
    grads = torch.autograd.grad(out[-1].sin().mean(), params, retain_graph=True, allow_unused=True)
    loss = loss_fn(out) + 0.1 * torch.stack([g.square().sum() for g in grads if g is not None] or [out[0].sum()]).sum()
    loss.backward()
    return loss


def _accumulated(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for x in (args[0], args[0].detach()[:2], args[0].detach() * 0.5):
        loss = loss_fn(model(x))
        loss.backward()
        total = total + loss.detach()
    return total


def _chained(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """The second call reads what the first one made, by the way of its argument and of what its blocks have kept."""

    def mark(keeps: bool, looks_back: bool) -> None:
        for block in model.blocks:
            block.keeps, block.looks_back = keeps, looks_back

    try:
        mark(True, False)
        first = model(*args, **kwargs)
        mark(False, True)
        second = model(first[0].tanh())
    finally:
        mark(False, False)
        for block in model.blocks:
            block.earlier = []
    loss = loss_fn(first) + loss_fn(second)
    loss.backward()
    return loss


def _in_a_thread(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    in_thread(loss.backward)
    return loss


def _evaluated_between(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    model.eval()
    with torch.inference_mode():
        model(args[0].detach().clone())
    model.train()
    loss.backward()
    return loss


def _peeked(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Whoever draws the graph unpacks what it saved before backward runs; nothing of it stays, and modes do not see how it comes."""
    loss = loss_fn(model(*args, **kwargs))
    before = live_bytes()
    with _SeenFunctions() as functions:
        _unpack_all(loss)
    model.seen, model.grown = [functions.seen], max(0, live_bytes() - before)
    loss.backward()
    return loss


def _unpack_all(loss: torch.Tensor) -> None:
    waiting, seen = [loss.grad_fn], set()
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_saved_"):
                getattr(node, name)
        waiting += [following for following, _ in node.next_functions]


def _weight_written(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Plain raises where the weight was saved, and does not mind where it was not."""
    loss = loss_fn(model(*args, **kwargs))
    with torch.no_grad():
        model.blocks[0].v[1].add_(0.5)
        args[0].mul_(0.5)
    loss.backward()
    return loss


def _buffer_written(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    with torch.no_grad():
        for block in model.blocks:
            block.mean.add_(0.5)
            block.norm.running_mean.mul_(0.5)
    loss.backward()
    return loss


def _optimizer_inside(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Each parameter moves as soon as its gradient is there."""

    def move(p: Any) -> None:
        if p.grad is None:  # a function of the user's gave none
            return
        with torch.no_grad():
            p.add_(p.grad, alpha=-0.02)
        p.grad = None

    handles = [p.register_post_accumulate_grad_hook(move) for p in model.parameters()]
    return _simple_under(handles, model, args, kwargs, loss_fn)


def _watched(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Modes of the user's see what they see plainly: nothing that is captured or replayed."""
    modes = _SeenOps(), _SeenFunctions(), _SeenOps(), _SeenFunctions()
    with modes[1], modes[0]:
        loss = loss_fn(model(*args, **kwargs))
    with modes[3], modes[2]:
        loss.backward()
    model.seen = [mode.seen for mode in modes]
    return loss


def _backward_in(around: Callable[[], Any]) -> Step:
    """A step whose backward runs under what its forward did not run under."""

    def step(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
        loss = loss_fn(model(*args, **kwargs))
        with around():
            loss.backward()
        return loss

    return step


@contextlib.contextmanager
def other_settings() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch._C._get_mkldnn_enabled()
    try:
        with _default_double():
            torch._C._set_mkldnn_enabled(not before[1])
            torch.use_deterministic_algorithms(not before[0], warn_only=True)
            yield
    finally:
        torch._C._set_mkldnn_enabled(before[1])
        torch.use_deterministic_algorithms(before[0])


def _mode_later(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """A mode that changes results, which was not there when the plan was made: right, or refused."""
    with _Rounding() if model.now else contextlib.nullcontext():
        loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


def _weighed(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """When the last gradient is made, what was made for the others is gone."""
    return _weighed_at([model.inp.weight], model, args, kwargs, loss_fn)


def _weighed_inside(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """When the blocks' last gradient is made, what the first one has read of a replay is gone. In the step of the recording only: others
    may hold more."""
    if model.now:
        return _simple(model, args, kwargs, loss_fn)
    loss = _weighed_at(model.blocks.parameters(), model, args, kwargs, loss_fn)
    model.held = model.held[-1:]
    return loss


def _weighed_at(leaves: Iterable[torch.Tensor], model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    gc.collect()
    before, held = live_bytes(), []
    loss = loss_fn(model(*args, **kwargs))
    handles = [leaf.register_hook(lambda g: held.append(live_bytes() - before)) for leaf in leaves]
    try:
        loss.backward()
    finally:
        for handle in handles:
            handle.remove()
    model.held = held
    return loss


def _one_output_first(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """A pass over one output lets go of what it replayed for all of them when it ends."""
    out = model(*args, **kwargs)
    params, before = list(model.parameters()), live_bytes()
    torch.autograd.grad(out[-1].sin().mean(), params, retain_graph=True, allow_unused=True)
    model.grown = max(0, live_bytes() - before)
    loss = loss_fn(out)
    loss.backward()
    return loss


def abandoning(step: Step | None) -> Step:
    """A step before which a forward runs whose backward never does; of its graph nothing may stay."""

    def both(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
        tokens: list[Any] = []
        for block in model.blocks:
            block.tokens = tokens
        try:
            loss_fn(model(*args, **kwargs))
        finally:
            for block in model.blocks:
                block.tokens = None
        if any(token() is not None for token in tokens):
            gc.collect()
        model.alive = sum(token() is not None for token in tokens)
        return (step or _simple)(model, args, kwargs, loss_fn)

    return both


class Tripped(Exception):
    """The user's own."""


def _raise(error: BaseException) -> Any:
    raise error


def _failing(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """A forward ends in an error, then a backward half way down; then all is well."""
    for kind in (Tripped, KeyboardInterrupt, MemoryError):
        last = model.blocks[model.order[-1]]
        handle = last.register_forward_pre_hook(lambda *_, kind=kind: _raise(kind()))
        try:
            model(*args, **kwargs)
        except kind:
            pass
        finally:
            handle.remove()
        handle = model.inp.weight.register_hook(lambda _, kind=kind: _raise(kind()))
        try:
            loss_fn(model(*args, **kwargs)).backward()
        except kind:
            pass
        finally:
            handle.remove()
        model.zero_grad(set_to_none=True)
        args[0].grad = None
    return _simple(model, args, kwargs, loss_fn)


def _hooks_around() -> Any:
    """The user's own; they copy late, because some ops write what they have saved."""
    return saved_tensors_hooks(lambda t: (t.detach(),), lambda packed: packed[0].clone())


def _module_hooks(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    handles = [block.register_forward_hook(lambda m, a, out: [*out[:-1], out[-1] * 0.9]) for block in model.blocks]
    handles += [block.register_forward_pre_hook(lambda m, a: (a[0].sin(),)) for block in model.blocks]
    handles += [model.inp.register_full_backward_hook(lambda m, gi, go: None)]
    return _simple_under(handles, model, args, kwargs, loss_fn)


def _moved_unseen(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Code that shows no ops moves a buffer after each block; one that runs twice reads it before and after.

    Not where this step made it: if that was saved, plain backward reads what came later, and no plan can know (only an audit does).
    """
    given = {block: block.mean for block in model.blocks}

    def move(block: Any, args: Any, out: Any) -> None:
        if block.mean is given[block]:
            block.mean.numpy()[...] += 0.5

    handles = [block.register_forward_hook(move) for block in model.blocks]
    return _simple_under(handles, model, args, kwargs, loss_fn)


def _regions_twice(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Blocks begin with a checkpointed function that writes its argument, and both backward passes replay it."""
    for block in model.blocks:
        block.begins_in_region = True
    try:
        return _twice(model, args, kwargs, loss_fn)
    finally:
        for block in model.blocks:
            block.begins_in_region = False


def _outputs_written_later(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """From the second step on the loss writes what the model returned. Plain raises where that was saved."""
    loss = (written_outputs(loss_fn) if model.now else loss_fn)(model(*args, **kwargs))
    loss.backward()
    return loss


def written_outputs(loss_fn: Loss) -> Loss:
    """A loss that writes into what the model returned."""

    def loss(out: Any) -> torch.Tensor:
        for t in out:
            if t.is_contiguous() and t.numel() and t.dtype.is_floating_point:
                t.mul_(0.5)
        return loss_fn(out)

    return loss


FORMS: dict[str, Step] = {
    "autocast": _in(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "mode": _in(_Rounding),
    "anomaly": _in(lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
    "hooks": _in(_hooks_around),
    "twice": _twice,
    "penalty": _penalty,
    "two alive": _two_alive,
    "partly": _partly,
    "accumulated": _accumulated,
    "chained": _chained,
    "thread": _in_a_thread,
    "evaluated between": _evaluated_between,
    "peeked": _peeked,
    "weight written": _weight_written,
    "buffer written": _buffer_written,
    "optimizer inside": _optimizer_inside,
    "failing": _failing,
    "module hooks": _module_hooks,
    "watched": _watched,
    "backward in autocast": _backward_in(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "backward in mode": _backward_in(_Rounding),
    "backward in other settings": _backward_in(other_settings),
    "mode later": _mode_later,
    "weighed": _weighed,
    "one output first": _one_output_first,
}
"""Steps of the user's own."""

RARE_FORMS: dict[str, Step] = {
    "moved unseen": _moved_unseen,
    "regions twice": _regions_twice,
    "outputs written later": _outputs_written_later,
    "weighed inside": _weighed_inside,
}
"""Steps that programs take only where a test asks for them: what they do, hardly any random program would do by itself."""

MAY_REFUSE = ("mode", "mode later")
"""Where a mode changes results that were not there when the plan was made, an error is as good."""

AROUND: dict[str, Callable[[], Any]] = {
    "in autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "in hooks": _hooks_around,
    "in double": lambda: _default_double(),
    "in other settings": lambda: other_settings(),
}
"""What is active around `fit` and around forward and loss of usual steps."""


class _default_double:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float32)
