"""The bound over all schedules: below everything that the judge accepts, and near the plan where forward binds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import bound_over_all_schedules, plan_floor, plan_optimal
from keepwise.simulate import simulate
from tests.plan.optimal.brute import best_schedules, reading_nodes
from tests.steps import accumulated, chain, gpt_like, random_steps, unet_like

PLANNERS = ["full", "every:2", "sqrt", "recursive", "selective", "recompute_everything"]


@given(random_steps(max_ops=7, copied=True))
@settings(max_examples=70, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_is_below_the_best_of_tiny_steps(step: Step) -> None:
    if not 1 <= len(reading_nodes(step)) <= 3:
        return
    for best in best_schedules(step, limit=300):
        assert bound_over_all_schedules(step, best.peak_bytes) <= best.added_seconds + 1e-6


@given(random_steps(max_ops=20), st.sampled_from(PLANNERS))
@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
def test_it_is_below_every_named_planner(step: Step, name: str) -> None:
    timeline = simulate(step, get_planner(name).plan(step, None))
    assert bound_over_all_schedules(step, timeline.peak_bytes) <= timeline.added_seconds + 1e-6


@pytest.mark.parametrize("step", [gpt_like(2), gpt_like(2, dropout=True), unet_like(2), chain(8), accumulated(2, 3)])
def test_it_is_below_the_plans_and_falls_with_the_budget(step: Step) -> None:
    floor = plan_floor(step)
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    previous = float("inf")
    for i in range(6):
        budget = low + (high - low) * i // 5
        bound = bound_over_all_schedules(step, budget)
        assert bound <= plan_optimal(step, budget).added_seconds + 1e-6
        assert bound <= previous + 1e-6
        previous = bound
    assert previous == 0


def test_it_is_near_the_plan_where_what_forward_holds_binds() -> None:
    step = gpt_like(3)
    floor = plan_floor(step)
    budget = floor.floor_bytes + int(0.8 * (floor.plain_peak_bytes - floor.floor_bytes))
    bound = bound_over_all_schedules(step, budget)
    assert 0 < bound <= plan_optimal(step, budget).added_seconds <= 1.6 * bound


def test_no_budget_holds_nothing() -> None:
    assert bound_over_all_schedules(gpt_like(2), 0) == float("inf")
    assert bound_over_all_schedules(Step(), 0) == 0
