"""Optimizers inside of `step=` that `fit` and `verify` were not told about."""

from __future__ import annotations

import copy

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
