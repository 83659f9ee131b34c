"""What holds for every step and budget: the judge agrees, less budget never helps, no named planner is better."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import OptimalResult, Status, frontier, plan_floor, plan_optimal
from keepwise.plan.optimal.workbench import NAMED, workbench
from keepwise.simulate import simulate
from tests import steps

FAMILIES: dict[str, Callable[[], Step]] = {
    "gpt": lambda: steps.gpt_like(4),
    "gpt, dropout, fresh gradients, optimizer": lambda: steps.gpt_like(3, dropout=True, grads="fresh", optimizer=True),
    "unet": lambda: steps.unet_like(3),
    "chain": lambda: steps.chain(9),
    "in-place stream": lambda: steps.in_place_stream(5),
}


def check(step: Step, result: OptimalResult) -> None:
    timeline = simulate(step, result.schedule)
    assert timeline.peak_bytes == result.peak_bytes
    assert timeline.added_seconds == pytest.approx(result.added_seconds)
    assert result.bound_seconds <= result.added_seconds + 1e-9
    assert result.gap >= 0
    if result.status is Status.INFEASIBLE:
        assert result.budget_bytes < result.floor_bytes == result.peak_bytes
    else:
        assert result.floor_bytes <= result.peak_bytes <= result.budget_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_frontier_is_monotone_and_judged(name: str) -> None:
    step = FAMILIES[name]()
    results = frontier(step, points=12)
    assert len(results) == 12
    for result in results:
        check(step, result)
    for less, more in itertools.pairwise(results):
        assert less.budget_bytes <= more.budget_bytes
        assert less.peak_bytes <= more.peak_bytes
        assert less.added_seconds >= more.added_seconds - 1e-9
        assert less.bound_seconds >= more.bound_seconds - 1e-9
    assert results[-1].added_seconds == 0
    assert results[0].peak_bytes == results[0].floor_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_no_named_planner_is_faster_at_its_own_peak(name: str) -> None:
    step = FAMILIES[name]()
    paths = list(dict.fromkeys(op.path for op in step.ops if op.path and op.phase == "forward"))
    boundaries = ["boundaries:" + ",".join(paths[::k]) for k in (2, 5)] if paths else []
    for planner in (*NAMED, "none", "every:5", *boundaries):
        other = simulate(step, get_planner(planner).plan(step, None))
        result = plan_optimal(step, other.peak_bytes)
        assert result.status is not Status.INFEASIBLE, planner
        assert result.added_seconds <= other.added_seconds + 1e-9, planner


@given(steps.random_steps(max_ops=14))
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_random_steps_at_every_fifth_of_the_range(step: Step) -> None:
    floor = plan_floor(step)
    for i in range(6):
        budget = floor.floor_bytes + (floor.plain_peak_bytes - floor.floor_bytes) * i // 5
        result = plan_optimal(step, budget)
        check(step, result)
        assert result.status is not Status.INFEASIBLE
    assert workbench(step).refused == 0


@given(steps.random_steps(max_ops=12), st.permutations(range(6)))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_steps_in_any_order_of_budgets(step: Step, order: list[int]) -> None:
    """What was found for one budget serves the others: asked again, the answers are monotone."""
    floor = plan_floor(step)
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    for i in order:
        check(step, plan_optimal(step, low + (high - low) * i // 5))
    results = frontier(step, points=6)
    for result in results:
        check(step, result)
        again = plan_optimal(step, result.budget_bytes)
        assert again.added_seconds <= result.added_seconds + 1e-9
    for less, more in itertools.pairwise(results):
        assert less.peak_bytes <= more.peak_bytes
        assert less.added_seconds >= more.added_seconds - 1e-9
        assert less.bound_seconds >= more.bound_seconds - 1e-9


@given(steps.random_steps(max_ops=16), st.sampled_from([*NAMED, "none"]))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_steps_under_named_planners(step: Step, name: str) -> None:
    """At its own peak no named planner is faster."""
    other = simulate(step, get_planner(name).plan(step, None))
    result = plan_optimal(step, other.peak_bytes)
    assert result.status is not Status.INFEASIBLE
    assert result.added_seconds <= other.added_seconds + 1e-9


def test_boundaries_anywhere_in_random_steps_are_hardly_ever_better() -> None:
    """Cuts at arbitrary ops lie outside of the family; see `benchmarks/optimality.py` for more of them."""
    better: list[bool] = []

    @given(steps.random_steps(max_ops=16), st.data())
    @settings(max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def compare(step: Step, data: st.DataObject) -> None:
        paths = sorted({op.path for op in step.ops if op.path and op.phase == "forward"})
        if not paths:
            return
        chosen = data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=3, unique=True))
        other = simulate(step, get_planner("boundaries:" + ",".join(chosen)).plan(step, None))
        result = plan_optimal(step, other.peak_bytes)
        better.append(result.status is Status.INFEASIBLE or result.added_seconds > other.added_seconds + 1e-9)

    compare()
    assert len(better) >= 50
    assert sum(better) <= 0.05 * len(better)


def test_below_the_floor_is_a_result_that_names_what_binds() -> None:
    step = steps.gpt_like(3)
    floor = plan_floor(step)
    result = plan_optimal(step, floor.floor_bytes - 1)
    check(step, result)
    assert result.status is Status.INFEASIBLE
    assert "op" in result.binding
    assert "h.2" in result.binding


def test_the_plain_step_is_left_alone_where_it_fits() -> None:
    step = steps.gpt_like(2)
    plain = simulate(step).peak_bytes
    result = plan_optimal(step, plain)
    assert result.status is Status.OPTIMAL
    assert (result.added_seconds, result.bound_seconds, result.gap) == (0, 0, 0)
    assert not result.schedule.windows


@pytest.mark.parametrize("moment", ["menus", "chain"])
def test_interruption_keeps_the_best_so_far(moment: str) -> None:
    step = steps.gpt_like(3)
    full = get_planner("full").plan(step, None)
    budget = simulate(step, full).peak_bytes

    def interrupt(what: str, gap: float) -> None:
        if what == moment:
            raise KeyboardInterrupt

    result = plan_optimal(step, budget, progress=interrupt)
    check(step, result)
    assert "interrupted" in result.layers
    if moment == "chain":  # the named planners have been tried by then
        assert result.status is not Status.INFEASIBLE
    again = plan_optimal(step, budget)
    assert again.status is Status.OPTIMAL


def test_a_callers_schedule_is_never_beaten_by_the_answer() -> None:
    step = steps.gpt_like(3)
    mine = get_planner("boundaries:h.1,h.2").plan(step, None)
    timeline = simulate(step, mine)
    result = plan_optimal(step, timeline.peak_bytes, candidates=[mine])
    assert result.added_seconds <= timeline.added_seconds
    assert "candidates" in result.layers


def test_no_time_still_gives_a_plan_that_fits() -> None:
    step = steps.gpt_like(3)
    floor = plan_floor(step).floor_bytes
    result = plan_optimal(step, floor, time_limit=0.0)
    check(step, result)
