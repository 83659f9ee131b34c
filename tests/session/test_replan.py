"""A recorded step planned again, without its model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

import keepwise
from keepwise import InfeasibleBudget
from keepwise._errors import UsageError
from keepwise.cost import DEVICES, op_seconds
from tests.session.models import loss, run, same, stack


def test_the_plan_of_a_file_is_made_again_for_another_budget(tmp_path: Path) -> None:
    model, x = stack(dropout=0.1)
    plain = run(copy.deepcopy(model), x)
    first = keepwise.fit(model, x, loss=loss, budget="0.8x")
    first.save(tmp_path / "plan.json")
    first.remove()
    plan = keepwise.Plan.load(tmp_path / "plan.json").replan("0.5x")
    assert plan.peak_bytes <= 0.5 * plan.plain_peak_bytes
    assert plan.plain_peak_bytes == first.plain_peak_bytes
    assert plan.proof is None
    plan.save(tmp_path / "again.json")
    keepwise.Plan.load(tmp_path / "again.json").apply(model)
    for _ in range(3):
        assert same(run(model, x), plain)


def test_what_was_never_compared_is_audited_in_the_first_steps() -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.9x")
    first.remove()
    plan = first.replan("min")
    assert plan.document.proven == first.document.proven
    plan.apply(model)
    loss(model(x)).backward()
    assert plan.stats.num_audited > 0
    for _ in range(9):
        loss(model(x)).backward()
    assert plan.stats.num_audited == 0


def test_prices_of_another_machine() -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.8x")
    plan = first.replan("0.5x", device="h100")
    replayed = [plan.step.ops[o] for w in plan.schedule.windows for o in w.ops]
    assert plan.replay_seconds == pytest.approx(sum(op_seconds(plan.step, op, DEVICES["h100"]) for op in replayed))
    assert plan.saved_seconds == plan.overhead_seconds == 0.0
    assert "H100" in plan.notes[-1]
    assert first.replan("50%", device=DEVICES["t4"]).budget_bytes == DEVICES["t4"].memory_bytes // 2
    assert first.replan("auto", device="t4").budget_bytes == DEVICES["t4"].usable_bytes


def test_budgets_that_cannot_be() -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.8x")
    with pytest.raises(InfeasibleBudget) as caught:
        first.replan(first.static_bytes)
    assert caught.value.floor_bytes > first.static_bytes
    floor = first.replan(first.static_bytes, on_infeasible="floor")
    assert floor.status is keepwise.Status.INFEASIBLE
    with pytest.raises(UsageError, match="no number of bytes"):
        first.replan("some")
    with pytest.raises(UsageError, match="on_infeasible"):
        first.replan("0.8x", on_infeasible="maybe")
    with pytest.raises(UsageError, match="not known"):
        first.replan("0.8x", device="abacus")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is here")
@pytest.mark.parametrize("budget", ["auto", "80%"])
def test_shares_of_a_device_that_is_not_here(budget: str) -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.8x")
    document = replace(first.document, step=replace(first.step, device="cuda:0"))
    with pytest.raises(UsageError, match="cuda:0, which is not here"):
        keepwise.Plan(document).replan(budget)


def test_a_step_that_could_not_be_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stack()
    monkeypatch.setenv("KEEPWISE", "0")
    plan = keepwise.fit(model, x, loss=loss, budget="0.8x")
    with pytest.raises(UsageError, match="KEEPWISE=0"):
        plan.replan("0.5x")


def test_named_planners_too() -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.8x")
    assert first.replan("max", planner="full").schedule.planner == "full"
