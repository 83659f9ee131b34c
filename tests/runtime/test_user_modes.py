"""The user's own modes, of both kinds, in any order and anywhere in a step: what they see and what it does is as in the plain step."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import keepwise

from .helpers import Outcome, batch, differences, fit, made, outcome

Modes = tuple[type, ...]
SEEN: list[str] = []
"""What all modes saw, in order. Autograd detaches what it saves, with hooks at other moments than without."""


def _see(what: str) -> None:
    if "detach" not in what:
        SEEN.append(what)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _see(f"function {getattr(func, '__qualname__', func)}")
        return func(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _see(f"op {func} {torch._C._len_torch_function_stack()}")
        return func(*args, **(kwargs or {}))


class Asking(TorchDispatchMode):
    """Calls functions of its own, which modes for functions see where they are on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and "detach" not in str(func):
            _see(f"asked of {func}: {tuple(out.shape)} {torch.zeros(2).add(1).sum().item()}")
        return out


class Halving(TorchFunctionMode):
    """Changes what it sees."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if "clone" in str(func) or "aten.set_" in str(func) else out


@torch.library.custom_op("keepwise_tests::asking", mutates_args=())
def asking(x: Tensor) -> Tensor:
    """A kernel in Python."""
    _see("kernel")
    return x.cos().add(1)


asking.register_autograd(lambda ctx, grad: grad * 0.3)


class Scaled(torch.autograd.Function):
    """Its Python runs where modes for functions are on; saves a parameter and an intermediate."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        y = torch.sin(x)
        ctx.save_for_backward(y, weight)
        return _unseen(y) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        y, weight = ctx.saved_tensors
        with Functions(), Ops():
            grad = _unseen(grad)
            y, weight = ctx.saved_tensors
        return grad * weight * (1 - y * y).sqrt(), (grad * y).sum(0)


def _unseen(x: Tensor) -> Tensor:
    """`set_` is handed to no mode for functions; it comes to dispatch modes while those are on."""
    room = torch.empty(0)
    room.set_(x.detach().clone())  # pyright: ignore[reportArgumentType]
    return room * torch.tensor([1.0, 2.0, 0.5, 1.5])


class Net(nn.Module):
    """Its own modes are pushed inside of forward; `hooks` are its own on saved tensors."""

    def __init__(self, inside: Modes = (), hooks: Callable[[], Any] = contextlib.nullcontext) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.rand(4))
        self.inside, self.hooks = inside, hooks
        self.checkpoint: Callable[..., Tensor] = keepwise.checkpoint

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x)) * _unseen(x)
        with _within(self.inside), self.hooks():
            h = Scaled.apply(torch.sigmoid(h), self.weight) + _unseen(h)
        with _within(self.inside):
            h = h * torch.tanh(h.clone())
            h = self.checkpoint(lambda t: torch.sin(t) * _unseen(t * 2).cos(), asking(h))
        if h.requires_grad:
            h.register_hook(_hook)
        return self.last(torch.relu_(h))


def _hook(grad: Tensor) -> Tensor:
    with Functions(), Ops():
        return grad * _unseen(grad)


@contextlib.contextmanager
def _within(modes: Modes) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode())
        yield


def _step(model: nn.Module, x: Tensor, around: Modes, in_backward: Modes, at_once: bool) -> Outcome:
    model.zero_grad(set_to_none=True)
    with _within(around):
        value = model(x).square().mean()
        if at_once:
            _run_backward(value)
    if not at_once:
        with _within(in_backward):
            _run_backward(value)
    return outcome(model, value)


def _run_backward(value: Tensor) -> None:
    """By the engine alone, where no function of PyTorch's switches modes for functions off."""
    torch.autograd.Variable._execution_engine.run_backward((value,), (torch.ones(()),), False, False, (), True, True)


def _agree(model: nn.Module, plan: keepwise.Plan, run: Callable[[], Outcome]) -> int:
    """Steps in a row; returns how much was seen."""
    for _ in range(2):
        SEEN.clear()
        torch.manual_seed(3)
        got = run()
        seen = list(SEEN)
        SEEN.clear()
        torch.manual_seed(3)
        with plan.paused():
            want = run()
        assert seen == SEEN
        assert not differences(want, got)
    return len(SEEN)


ORDERS: list[Modes] = [
    (),
    *itertools.permutations((Functions, Ops)),
    (Functions, Asking),
    (Ops, Functions, Asking, Functions),
    (Halving, Asking, Ops),
]


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
@pytest.mark.parametrize("inside", ORDERS[:4], ids=str)
@pytest.mark.parametrize("around", ORDERS, ids=str)
def test_modes_see_what_they_see_plainly(around: Modes, inside: Modes) -> None:
    model, x = made(lambda: Net(inside)), batch(3, 4)
    plan = fit(model, x)
    for at_once in (False, True):
        assert _agree(model, plan, lambda at_once=at_once: _step(model, x, around, ORDERS[3], at_once))
        with plan:
            assert _agree(model, plan, lambda at_once=at_once: _step(model, x, around, ORDERS[3], at_once))
    assert plan.stats.num_dropped


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
@pytest.mark.parametrize("around", ORDERS[1:], ids=str)
def test_a_plan_of_a_step_with_modes(around: Modes) -> None:
    """All of the step is watched, its backward and what is between, and modes are on while it is recorded."""
    model, x = made(Net), batch(3, 4)

    def run() -> Outcome:
        return _step(model, x, around, around[:1], at_once=False)

    plan = fit(model, step=run)
    with plan:
        assert _agree(model, plan, run)


@pytest.mark.parametrize("around", ORDERS[1:], ids=str)
def test_modes_see_the_same_with_a_region(around: Modes) -> None:
    model, x = made(Net), batch(3, 4)
    seen: list[list[str]] = []
    found: list[Outcome] = []
    for checkpoint in (keepwise.checkpoint, lambda function, t: function(t)):
        model.checkpoint = checkpoint
        SEEN.clear()
        torch.manual_seed(3)
        found.append(_step(model, x, around, around, at_once=False))
        seen.append(list(SEEN))
    assert seen[0] == seen[1]
    assert not differences(*found)


@pytest.mark.parametrize("around", ORDERS[1:5], ids=str)
def test_modes_see_the_same_while_a_step_is_recorded(around: Modes) -> None:
    model, x = made(Net), batch(3, 4)
    steps: list[list[str]] = []

    def run() -> None:
        SEEN.clear()
        _step(model, x, around, around, at_once=True)
        steps.append(list(SEEN))

    run()
    model.zero_grad(set_to_none=True)
    fit(model, step=run)
    assert len(steps) > 2
    for seen in steps[1:]:
        assert _comparable(seen) == _comparable(steps[0])


def _comparable(seen: list[str]) -> list[str]:
    """Without the additions of gradients, in place or not."""
    return [what for what in seen if "aten.add" not in what]


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
@pytest.mark.parametrize("around", ORDERS, ids=str)
@pytest.mark.parametrize("is_inside", [False, True])
def test_modes_see_what_the_users_hooks_do(around: Modes, is_inside: bool) -> None:
    """They change what they are given, so that all of it is kept and passes through them."""

    def hooks() -> Any:
        return saved_tensors_hooks(lambda t: _unseen_hook(t), lambda t: t.mul(2.0).clone())

    model, x = made(lambda: Net((), hooks) if is_inside else Net()), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        with contextlib.nullcontext() if is_inside else hooks():
            return _step(model, x, around, around, at_once=False)

    assert _agree(model, plan, run)


def _unseen_hook(t: Tensor) -> Tensor:
    with torch.no_grad():
        room = torch.empty(0)
        room.set_(t.detach().clone())  # pyright: ignore[reportArgumentType]
        return room * 0.3
