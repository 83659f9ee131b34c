"""How the step of a random program is taken: with what around it, in which order, how often, with what in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .parts import in_thread
from .program import Loss, Step


class _Rounding(TorchDispatchMode):
    """A user's mode that changes results, in forward and in backward, but must not reach a replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rounded = func in (torch.ops.aten.tanh.default, torch.ops.aten.sin.default, torch.ops.aten.silu.default)
        return out * 0.75 if rounded else out


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


def _chained(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    first = model(*args, **kwargs)
    second = model(first[0].tanh())
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


def _peeked(model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    """Whoever draws the graph unpacks what it saved before backward runs."""
    loss = loss_fn(model(*args, **kwargs))
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
    loss.backward()
    return loss


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
    try:
        return _simple(model, args, kwargs, loss_fn)
    finally:
        for handle in handles:
            handle.remove()


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
    try:
        return _simple(model, args, kwargs, loss_fn)
    finally:
        for handle in handles:
            handle.remove()


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
}
"""Steps of the user's own."""

AROUND: dict[str, Callable[[], Any]] = {
    "in autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "in hooks": _hooks_around,
    "in double": lambda: _default_double(),
}
"""What is active around `fit` and around forward and loss of usual steps."""


class _default_double:
    def __enter__(self) -> None:
        torch.set_default_dtype(torch.float64)

    def __exit__(self, *_: Any) -> None:
        torch.set_default_dtype(torch.float32)
