"""Optimizers inside of `step=` that `fit` and `verify` were not told about."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import keepwise
from keepwise.ir import Category
from tests.session.models import loss, stack


def training(
    model: nn.Module, x: torch.Tensor, *others: nn.Module, kind: type[torch.optim.Optimizer] = torch.optim.AdamW
):
    """A whole step with its own optimizers: one for the model, one for each other module."""
    optimizers = [kind(m.parameters(), lr=0.05) for m in (model, *others)]

    def step() -> float:
        value = loss(model(x))
        for other in others:
            value = value + other(x[..., : other.weight.shape[1]]).square().mean()
        value.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return value.item()

    return step, optimizers


def state_of(optimizers: list[torch.optim.Optimizer]) -> list[torch.Tensor]:
    return [t.clone() for o in optimizers for s in o.state.values() for t in s.values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("num_before", [0, 2])
def test_training_after_fit_is_as_if_fit_had_not_been_there(num_before: int) -> None:
    def run(budget: str | None) -> tuple[list[float], dict[str, torch.Tensor]]:
        model, x = stack()
        step, optimizers = training(model, x)
        losses = [step() for _ in range(num_before)]
        before = state_of(optimizers)
        if budget is None:
            return losses + [step() for _ in range(3)], model.state_dict()
        plan = keepwise.fit(model, step=step, budget=budget)
        assert plan.stats.num_dropped == 0
        assert all(torch.equal(a, b) for a, b in zip(state_of(optimizers), before, strict=True))
        sizes = [s.nbytes for s in plan.step.storages if s.category is Category.OPTIMIZER]
        assert sum(sizes) >= 2 * sum(p.nbytes for p in model.parameters())
        for _ in range(3):
            with plan:
                losses.append(step())
            assert plan.stats.num_dropped > 0
        return losses, model.state_dict()

    losses, weights = run("0.7x")
    expected_losses, expected = run(None)
    assert losses == expected_losses
    assert all(torch.equal(weights[k], expected[k]) for k in expected)


def test_verify_puts_them_back_too() -> None:
    model, x = stack()
    step, optimizers = training(model, x)
    plan = keepwise.fit(model, step=step, budget="0.7x")
    step()
    before = state_of(optimizers)
    proof = keepwise.verify(model, step=step, plan=plan, steps=2)
    assert proof.identical
    assert before
    assert all(torch.equal(a, b) for a, b in zip(state_of(optimizers), before, strict=True))


def test_several_optimizers_and_a_module_outside_of_the_model() -> None:
    model, x = stack()
    other = nn.Linear(4, 2)
    step, optimizers = training(model, x, other)
    step()
    before, weights = state_of(optimizers), copy.deepcopy(other.state_dict())
    plan = keepwise.fit(model, step=step, budget="0.7x")
    assert all(torch.equal(a, b) for a, b in zip(state_of(optimizers), before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), weights.values(), strict=True))
    assert not any("neither in the model" in note for note in plan.notes)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.9),
    "in sequence": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, total_iters=3), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[3],
    ),
}


def _noted(notes: list[float], model: nn.Module, step: Callable[[], object], fits: bool) -> list[float]:
    """What five steps note, after a `fit` or without one."""
    plan = keepwise.fit(model, step=step, budget="0.7x") if fits else contextlib.nullcontext()
    notes.clear()
    for _ in range(5):
        with plan:
            step()
    return notes


@pytest.mark.parametrize("where", ["closure", "model", "scheduler first"])
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_schedulers_of_rates_are_put_back(kind: str, where: str) -> None:
    def run(fits: bool) -> list[float]:
        model, x = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scheduler = SCHEDULERS[kind](optimizer)
        if where == "model":
            model.__dict__["scheduler"] = scheduler

        def step() -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            value = loss(model(x))
            value.backward()
            found = scheduler if where != "model" else model.__dict__["scheduler"]
            arguments = (value.item(),) if kind == "plateau" else ()
            if where == "scheduler first":
                found.step(*arguments)
            optimizer.step()
            if where != "scheduler first":
                found.step(*arguments)
            optimizer.zero_grad()

        rates: list[float] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the order of the calls, and what they return in it
            step()
            return _noted(rates, model, step, fits)

    assert run(fits=True) == run(fits=False)


@pytest.mark.parametrize("on_model", [False, True])
def test_a_scaler_of_losses_is_put_back(on_model: bool) -> None:
    def run(fits: bool) -> list[float]:
        model, x = stack()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
        if on_model:
            model.__dict__["scaler"] = scaler

        def step() -> None:
            found = scaler if not on_model else model.__dict__["scaler"]
            found.scale(loss(model(x))).backward()
            found.step(optimizer)
            found.update()
            optimizer.zero_grad()
            scales.append(found.get_scale())

        scales: list[float] = []
        return _noted(scales, model, step, fits)

    assert run(fits=True) == run(fits=False)


def test_what_is_trained_out_of_reach_is_said() -> None:
    model, x = stack()
    other = nn.Linear(4, 2)
    step, _ = training(model, x, other)
    running = iter(lambda: step(), None)  # an iterator, into which nobody can look
    plan = keepwise.fit(model, step=running.__next__, budget="0.7x")
    assert any("2 tensors that were found neither in the model nor from the step" in note for note in plan.notes)


def test_a_step_without_backward_is_said() -> None:
    model, x = stack()
    plan = keepwise.fit(model, step=lambda: loss(model(x)), budget="max")
    assert any("no backward" in note for note in plan.notes)
