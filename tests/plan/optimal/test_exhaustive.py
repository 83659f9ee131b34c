"""Tiny random steps against every schedule that the judge accepts."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, given, seed, settings

from keepwise.ir import Step
from keepwise.plan.optimal import bound_over_all_schedules, plan_floor, plan_optimal
from keepwise.simulate import simulate
from tests.plan.optimal.brute import best_schedules, num_choices, reading_nodes
from tests.plan.optimal.exhaustive import Found, least_seconds, schedule_of
from tests.plan.optimal.test_optimum import persistent_optimum
from tests.steps import chain, random_steps

TINY = 1e-9


def _is_tiny(step: Step) -> bool:
    return 1 <= len(reading_nodes(step)) <= 4 and num_choices(step) <= 6


def test_nothing_that_the_judge_accepts_is_faster_than_the_search() -> None:
    count = Counter[str]()

    @seed(5)
    @given(random_steps(max_ops=8, copied=True))
    @settings(max_examples=120, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def compare(step: Step) -> None:
        if not _is_tiny(step):
            return
        for best in best_schedules(step, limit=400):
            found = least_seconds(step, best.peak_bytes)
            assert found is not None
            assert found.added_seconds <= best.added_seconds + TINY
            assert bound_over_all_schedules(step, best.peak_bytes) <= found.added_seconds + 1e-6
            assert least_seconds(step, best.peak_bytes, below=found.added_seconds) is None
            timeline = simulate(step, schedule_of(step, found))
            count["points"] += 1
            count["reached"] += (
                timeline.peak_bytes <= best.peak_bytes and abs(timeline.added_seconds - found.added_seconds) < TINY
            )

    compare()
    # A copy that several windows read, or that an early op of forward reads, costs more than the search says.
    assert count["reached"] >= 0.9 * count["points"] >= 40


def test_the_search_equals_the_dynamic_program_on_chains() -> None:
    sizes, seconds = [3, 1, 4, 1, 5, 2], [3.0, 1.0, 2.0, 5.0, 1.0]
    step = chain(5, sizes=sizes, seconds=seconds)
    floor = plan_floor(step)
    assert least_seconds(step, floor.floor_bytes - 1) is None
    for budget in range(floor.floor_bytes, floor.plain_peak_bytes + 1):
        found = least_seconds(step, budget)
        assert found is not None
        assert found.added_seconds == persistent_optimum(step, sizes, seconds, budget)
        assert simulate(step, schedule_of(step, found)).peak_bytes <= budget


def test_the_planner_is_at_the_optimum_over_all_schedules() -> None:
    count = Counter[str]()
    faster: list[tuple[Step, Found]] = []

    @seed(7)
    @given(random_steps(max_ops=8, copied=True))
    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def compare(step: Step) -> None:
        if not _is_tiny(step):
            return
        floor = plan_floor(step)
        count["floors"] += 1
        below = least_seconds(step, floor.floor_bytes - 1)
        count["lower floors"] += (
            below is not None and simulate(step, schedule_of(step, below)).peak_bytes < floor.floor_bytes
        )
        budgets = {floor.floor_bytes + (floor.plain_peak_bytes - floor.floor_bytes) * i // 3 for i in range(3)}
        for budget in budgets:
            ours = plan_optimal(step, budget).added_seconds
            count["points"] += 1
            found = least_seconds(step, budget, below=ours) if ours > TINY else None
            if found is not None:
                faster.append((step, found))

    compare()
    assert count["points"] >= 100
    assert len(faster) <= 0.06 * count["points"]
    assert count["lower floors"] == 0
    # The planner does not look for copies, in forward, of what can be held or made again. The rest are graphs that are read twice, and
    # the copies that are cheaper in the search than for the judge.
    for step, found in faster:
        twice = any(len(save.reads) > 1 for save in step.saves)
        assert twice or any(r.copies for r in found.path), found
