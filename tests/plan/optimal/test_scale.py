"""Long chains: equal blocks are one problem, and where grains are coarse a second set of tables looks closer."""

from __future__ import annotations

import pytest

from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from keepwise.plan.optimal.workbench import workbench
from keepwise.simulate import simulate
from tests.steps import gpt_like


def test_tables_of_the_lower_part_of_the_range_bound_no_less_and_plan_no_worse() -> None:
    step = gpt_like(70, width=4096, vocab=2048)
    floor = plan_floor(step)
    bench = workbench(step)
    budget = floor.floor_bytes + (floor.plain_peak_bytes - floor.floor_bytes) // 40
    (view,) = bench.views
    coarse = plan_optimal(step, budget, tolerance=float("inf"))
    assert "finer grains" not in coarse.layers
    before = bench.bound(budget)
    closer = bench.closer(0, budget, seconds=60.0)
    assert closer is not None
    assert closer.upper.grain < view.upper.grain
    assert view.lower.low < budget <= closer.high < view.high
    assert before <= bench.bound(budget) <= coarse.added_seconds + 1e-9
    # Above its range it says nothing.
    assert bench.bound(closer.high + 1) == view.lower.seconds(closer.high + 1)
    fine = plan_optimal(step, budget, tolerance=0.0)
    assert fine.added_seconds <= coarse.added_seconds + 1e-9
    assert bench.bound(budget) <= fine.added_seconds + 1e-9
    assert simulate(step, fine.schedule).peak_bytes <= budget


def test_no_closer_look_without_the_time_for_it_or_near_the_plain_peak() -> None:
    step = gpt_like(70, width=4096, vocab=2048)
    floor = plan_floor(step)
    assert workbench(step).closer(0, floor.floor_bytes, seconds=0.0) is None
    assert workbench(step).closer(0, floor.plain_peak_bytes - 1, seconds=60.0) is None


@pytest.mark.slow
def test_a_hundred_blocks_are_planned_to_two_percent() -> None:
    step = gpt_like(96, width=4096, vocab=32768)
    floor = plan_floor(step)
    for part in (0.03, 0.1, 0.3, 0.6):
        budget = floor.floor_bytes + int(part * (floor.plain_peak_bytes - floor.floor_bytes))
        result = plan_optimal(step, budget, time_limit=60.0)
        assert result.status is not Status.INFEASIBLE
        assert result.gap <= 0.02
