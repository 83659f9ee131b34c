"""The treewidth schedule of Kumar et al. (2019) is a schedule, saves memory as its paper says, and is not better than ours."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from keepwise.ir import Step
from keepwise.plan.optimal import Status, plan_optimal
from keepwise.simulate import simulate
from tests.plan.optimal.treewidth import treewidth_schedule
from tests.steps import chain, gpt_like, random_steps, unet_like


@pytest.mark.parametrize("n", [4, 8, 16, 32])
def test_on_a_chain_it_takes_logarithmic_memory(n: int) -> None:
    step = chain(n)
    timeline = simulate(step, treewidth_schedule(step))
    assert timeline.peak_bytes <= 3 * n.bit_length() + 6
    assert timeline.peak_bytes < simulate(step).peak_bytes or n < 16
    assert timeline.added_seconds <= n * n.bit_length()


@pytest.mark.parametrize("step", [gpt_like(3), unet_like(2), chain(12), chain(23)])
def test_ours_is_no_slower_at_its_peak(step: Step) -> None:
    timeline = simulate(step, treewidth_schedule(step))
    assert timeline.added_seconds > 0
    result = plan_optimal(step, timeline.peak_bytes)
    assert result.status is not Status.INFEASIBLE
    assert result.added_seconds <= timeline.added_seconds + 1e-9


def test_on_random_steps_it_is_hardly_ever_better() -> None:
    better: list[bool] = []

    @given(random_steps(max_ops=12))
    @settings(max_examples=100, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    def compare(step: Step) -> None:
        timeline = simulate(step, treewidth_schedule(step))
        result = plan_optimal(step, timeline.peak_bytes)
        better.append(result.status is Status.INFEASIBLE or result.added_seconds > timeline.added_seconds + 1e-9)

    compare()
    assert len(better) >= 90
    assert sum(better) <= 0.1 * len(better)
