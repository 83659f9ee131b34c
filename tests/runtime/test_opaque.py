"""What must not run twice does not, and what cannot be replayed is kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator

import keepwise

from .helpers import batch, fit, made, step, twice

CALLS: list[int] = []


class Mapped(HigherOrderOperator):
    """A higher-order operator that shows itself to dispatch modes as a whole, as `cond` and `flex_attention` do."""

    def __init__(self) -> None:
        super().__init__("keepwise_tests_mapped")

    def __call__(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return super().__call__(function, x)


mapped = Mapped()


@mapped.py_impl(DispatchKey.CompositeExplicitAutograd)
def _(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    CALLS.append(x.numel())
    return function(x)


@mapped.py_impl(DispatchKey.Autograd)
def _(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    class Exp(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                y = mapped(function, x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
            (y,) = ctx.saved_tensors
            return grad * y

    return Exp.apply(x)  # type: ignore[no-any-return]


@torch.library.custom_op("keepwise_tests::counted", mutates_args=())
def counted(x: Tensor) -> Tensor:
    CALLS.append(x.numel())
    return x * 2


counted.register_autograd(lambda ctx, grad: grad * 2)

LIBRARY = torch.library.Library("keepwise_tests_older", "DEF")
LIBRARY.define("counted(Tensor x) -> Tensor")


def _older(x: Tensor) -> Tensor:
    CALLS.append(x.numel())
    return x * 3


LIBRARY.impl("counted", _older, "CPU")
torch.library.register_autograd("keepwise_tests_older::counted", lambda ctx, grad: grad * 3, lib=LIBRARY)


class Custom(nn.Module):
    def __init__(self, op: object) -> None:
        super().__init__()
        self.a, self.b, self.op = nn.Linear(4, 4), nn.Linear(4, 4), op

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.sin(self.b(self.op(torch.tanh(self.a(x))))))  # type: ignore[operator]


@pytest.mark.parametrize("op", [counted, torch.ops.keepwise_tests_older.counted])
def test_an_operator_written_in_python_runs_once(op: object) -> None:
    model, x = made(lambda: Custom(op)), batch(3, 4)
    plan = fit(model, x, verify=True)
    CALLS.clear()
    step(model, x)
    assert len(CALLS) == 1
    assert plan.stats.num_dropped
    assert plan.stats.num_replays
    twice(plan, lambda: step(model, x))
    CALLS.clear()
    keepwise.checkpoint(model, x).sum().backward()
    plan.remove()
    keepwise.checkpoint(model, x).sum().backward()
    assert len(CALLS) == 2


class HigherOrder(nn.Module):
    """Branches by a higher-order operator, which has no schema."""

    higher = False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        if self.higher:
            h = h + torch.ops.higher_order.wrap(lambda t: t.detach().sin(), h)
        return torch.tanh(h * 2)


def test_a_higher_order_operator_that_was_not_recorded_is_let_through() -> None:
    model, x = made(HigherOrder), batch(3, 4)
    plan = fit(model, x)
    model.higher = True
    twice(plan, lambda: step(model, x))
    plan.remove()
    plan = fit(model, x, verify=True)
    twice(plan, lambda: step(model, x))


def test_a_recorded_higher_order_operator_is_kept_and_runs_once(tmp_path: Path) -> None:
    model, x = made(lambda: Custom(lambda h: mapped(torch.exp, h))), batch(3, 4)
    plan = fit(model, x, verify=True)
    assert "higher_order.keepwise_tests_mapped" in [op.target for op in plan.step.ops]
    twice(plan, lambda: step(model, x))
    plan.remove()
    plan.save(tmp_path / "plan.json")
    plan = keepwise.Plan.load(tmp_path / "plan.json").apply(model)
    CALLS.clear()
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped
    assert not plan.stats.num_unknown_ops
    assert len(CALLS) == 2
