"""Tiny random steps against every schedule of a wide family."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, seed, settings

from keepwise.ir import Step
from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from tests.plan.optimal.brute import best_schedules, num_choices, reading_nodes
from tests.steps import random_steps


@dataclass
class Count:
    points: int = 0
    higher_floor: int = 0
    slower: list[float] = field(default_factory=list)


def test_tiny_steps_equal_the_best_of_all_schedules() -> None:
    count = Count()

    @seed(7)
    @given(random_steps(max_ops=7, copied=True))
    @settings(max_examples=250, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    def compare(step: Step) -> None:
        if not 1 <= len(reading_nodes(step)) <= 3 or num_choices(step) > 5:
            return
        oracle = best_schedules(step, limit=3000)
        count.higher_floor += plan_floor(step).floor_bytes > oracle[0].peak_bytes
        for best in oracle:
            result = plan_optimal(step, best.peak_bytes)
            count.points += 1
            if result.status is not Status.INFEASIBLE and result.added_seconds > best.added_seconds + 1e-9:
                count.slower.append(result.added_seconds / best.added_seconds if best.added_seconds else float("inf"))

    compare()
    # Outside of the family: a window that begins at the inputs of an earlier stage, and inputs that are made again only late.
    assert count.points >= 50
    assert count.higher_floor <= 0.05 * count.points
    assert len(count.slower) <= 0.05 * count.points
