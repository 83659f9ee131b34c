"""Plans for several micro-batches in flight: they hold the budget, have a bound, and drop more than for one."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from keepwise.simulate import simulate
from tests.plan.optimal.brute import all_schedules, reading_nodes
from tests.steps import gpt_like, random_steps


def several(step: Step, n: int) -> Step:
    return msgspec.structs.replace(step, in_flight=n)


@pytest.mark.parametrize("n", [2, 4])
def test_the_budget_holds_and_the_frontier_is_monotone(n: int) -> None:
    step = several(gpt_like(4), n)
    floor = plan_floor(step)
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    budgets = [low + (high - low) * i // 8 for i in range(9)]
    for budget in reversed(budgets):
        plan_optimal(step, budget)
    results = [plan_optimal(step, budget) for budget in budgets]
    for budget, result in zip(budgets, results, strict=True):
        assert result.status is not Status.INFEASIBLE
        assert simulate(step, result.schedule).peak_bytes == result.peak_bytes <= budget
        assert result.bound_seconds <= result.added_seconds + 1e-9
        assert result.gap <= 0.1
    for less, more in itertools.pairwise(results):
        assert less.added_seconds >= more.added_seconds - 1e-9
        assert less.bound_seconds >= more.bound_seconds - 1e-9
    assert results[-1].added_seconds == 0


def test_no_named_planner_is_faster_at_its_own_peak() -> None:
    step = several(gpt_like(5), 3)
    for name in ("full", "every:2", "sqrt", "recursive", "selective"):
        other = simulate(step, get_planner(name).plan(step, None))
        result = plan_optimal(step, other.peak_bytes)
        assert result.status is not Status.INFEASIBLE
        assert result.added_seconds <= other.added_seconds + 1e-9, name


def test_more_in_flight_costs_more_at_the_same_budget_a_micro_batch() -> None:
    step = gpt_like(5)
    plain = simulate(step)
    room = plain.peak_bytes - plain.static_bytes
    added = []
    for n in (1, 2, 4):
        budget = plain.static_bytes + int(0.6 * room) * n
        added.append(plan_optimal(several(step, n), budget).added_seconds)
    assert added == sorted(added, reverse=True)  # one micro-batch bears its temporaries alone, several share them


@given(random_steps(max_ops=6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_the_bound_is_below_every_schedule_of_tiny_steps(step: Step) -> None:
    if not 1 <= len(reading_nodes(step)) <= 3:
        return
    step = several(step, 3)
    best: dict[int, float] = {}
    for schedule in itertools.islice(all_schedules(step, limit=300), 300):
        timeline = simulate(step, schedule)
        best[timeline.peak_bytes] = min(timeline.added_seconds, best.get(timeline.peak_bytes, float("inf")))
    for peak, seconds in sorted(best.items())[:6]:
        result = plan_optimal(step, peak)
        if result.status is not Status.INFEASIBLE and result.added_seconds <= seconds + 1e-9:
            assert result.bound_seconds <= result.added_seconds + 1e-9
