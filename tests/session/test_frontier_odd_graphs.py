"""Long skips, towers with shared weights, recurrence, experts, encoder and decoder: plans are no worse than stock policies, budgets hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import keepwise
from keepwise import targets
from keepwise.measure import allocator_peak
from keepwise.plan import get_planner
from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from keepwise.session.batch import loss_of
from keepwise.simulate import simulate

NAMED = ("full", "every:2", "sqrt", "recursive", "selective")


class Dense(nn.Module):
    """DenseNet: each layer reads all before it."""

    def __init__(self, layers: int = 5, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width * (i + 1)), nn.ReLU(), nn.Conv2d(width * (i + 1), width, 3, padding=1))
            for i in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return torch.cat(found, 1)


class Siamese(nn.Module):
    """Two towers with the same weights."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.LayerNorm(width)]
        self.tower = nn.Sequential(*layers)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (self.tower(a) - self.tower(b)).square()


def dense() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]:
    return Dense(), (torch.randn(8, 8, 16, 16),), {}, lambda y: y.square().mean()


def siamese() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]:
    return Siamese(), (torch.randn(256, 32), torch.randn(256, 32)), {}, lambda y: y.mean()


def built_in(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], torch.Tensor] | None]:
    target = targets.build(name)
    return target.model, target.args, target.kwargs, target.loss


CASES = {
    "dense": dense,
    "siamese": siamese,
    "unet": lambda: built_in("unet-tiny"),
    "lstm": lambda: built_in("lstm-tiny"),
    "t5": lambda: built_in("t5-tiny"),
    "mixtral": lambda: built_in("mixtral-tiny"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in ("t5", "mixtral", "unet") else n for n in CASES]
)
def test_no_worse_than_stock_and_within_the_budget(name: str) -> None:
    torch.manual_seed(0)
    model, args, kwargs, loss = CASES[name]()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    fit = {"loss": loss, "verify": False}
    plain = keepwise.fit(model, args, kwargs, budget="max", **fit)
    plain.remove()
    step = plain.step
    floor = plan_floor(step)
    for planner in NAMED:
        other = simulate(step, get_planner(planner).plan(step, None))
        ours = plan_optimal(step, other.peak_bytes)
        assert ours.status is not Status.INFEASIBLE, planner
        assert ours.added_seconds <= other.added_seconds + 1e-9, planner

    def run() -> None:
        model.zero_grad(set_to_none=False)
        output = model(*args, **kwargs)
        value = loss_of(output, loss)
        del output  # as `fit` has recorded it
        value.backward()

    budget = math.ceil(floor.floor_bytes + 0.4 * (floor.plain_peak_bytes - floor.floor_bytes))
    plan = keepwise.fit(model, args, kwargs, budget=budget, **fit)
    assert plan.peak_bytes <= budget
    try:
        run()
        measured = allocator_peak(run)
    finally:
        plan.remove()
    room = budget - plan.static_bytes
    assert measured <= 1.01 * room + 32 * 1024, (measured, plan.peak_bytes - plan.static_bytes, room)
