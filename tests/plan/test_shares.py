"""Each replay is paid for once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.optimal import memory_price, plan_floor, plan_optimal
from keepwise.plan.shares import Remaking, shares_of
from keepwise.simulate import simulate
from tests.steps import chain, gpt_like, random_steps, unet_like

PLANNERS = ["none", "full", "every:2", "sqrt", "recursive", "selective", "recompute_everything"]


@settings(max_examples=100, deadline=None)
@given(random_steps(), st.sampled_from(PLANNERS))
def test_shares_sum_to_the_added_seconds(step: Step, name: str) -> None:
    schedule = get_planner(name).plan(step, None)
    shares = shares_of(step, schedule)
    assert sum(shares.values()) == pytest.approx(simulate(step, schedule).added_seconds)
    assert all(seconds >= 0 for seconds in shares.values())
    assert not set(shares) & set(schedule.held)


@pytest.mark.parametrize("step", [gpt_like(4), gpt_like(3, dropout=True), unet_like(3), chain(12)])
def test_shares_of_optimal_plans_go_to_what_is_dropped(step: Step) -> None:
    floor = plan_floor(step)
    for i in range(5):
        budget = floor.floor_bytes + (floor.plain_peak_bytes - floor.floor_bytes) * i // 5
        schedule = plan_optimal(step, budget).schedule
        shares = shares_of(step, schedule)
        assert sum(shares.values()) == pytest.approx(simulate(step, schedule).added_seconds)
        assert set(shares) <= formally_droppable(step) - set(schedule.held)


def test_a_segment_that_is_replayed_for_windows_inside_it_is_paid_by_what_they_serve() -> None:
    step = chain(16)
    schedule = get_planner("recursive").plan(step, None)
    assert any(w.parent >= 0 for w in schedule.windows)
    shares = shares_of(step, schedule)
    assert sum(shares.values()) == pytest.approx(simulate(step, schedule).added_seconds)
    assert len(shares) > len(schedule.windows) / 2


def test_making_one_alone_again_costs_the_ops_since_what_is_held() -> None:
    step = chain(6, seconds=[1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    made = {step.storages[step.values[op.outputs[0]].storage].id: op for op in step.ops if op.phase == "forward"}
    saved = [s for s in made if step.saved_storages.get(s) and made[s].seconds > 0]
    plain = Remaking(step, get_planner("none").plan(step, None))
    for s in saved:
        assert plain.seconds(s) == made[s].seconds  # its input is held
    dropped = Remaking(step, get_planner("recompute_everything").plan(step, None))
    total = 0.0
    for s in saved:
        total += made[s].seconds
        assert dropped.seconds(s) == total  # from the chain's input on


@pytest.mark.parametrize("step", [gpt_like(4), chain(12)])
def test_the_price_of_memory_falls_with_the_budget_and_supports_the_frontier(step: Step) -> None:
    floor = plan_floor(step)
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    budgets = [low + (high - low) * i // 10 for i in range(11)]
    prices = [memory_price(step, b) for b in budgets]
    assert prices == sorted(prices, reverse=True)
    assert prices[0] > 0
    assert prices[-1] == 0
    # A supporting line of a convex curve lies nowhere above it: no budget gives more time a byte than the price says.
    bounds = [plan_optimal(step, b).bound_seconds for b in budgets]
    for b, price in zip(budgets[:-1], prices[:-1], strict=True):
        line = min(y + price * x for x, y in zip(budgets, bounds, strict=True))
        hull_at = line - price * b
        assert hull_at <= plan_optimal(step, b).added_seconds + 1e-9
