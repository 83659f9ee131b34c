"""Chains whose optimum is known: binomial checkpointing, and a dynamic program over persistent schedules."""

from __future__ import annotations

import functools

import pytest
from checkpoint_schedules import Revolve
from checkpoint_schedules.schedule import EndForward, EndReverse, Forward

from keepwise.ir import Step
from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from keepwise.plan.optimal.chain import splits
from tests.steps import chain


def revolve_forwards(n: int, snapshots: int) -> int:
    """Forwards beyond the first sweep in Griewank and Walther's schedule, the taping ones apart."""
    schedule = Revolve(n, snapshots)
    advanced = 0
    for action in schedule:
        if isinstance(action, Forward) and not action.write_adj_deps:
            advanced += min(action.n1, n) - action.n0
        if isinstance(action, EndForward):
            schedule.finalize(n)
        if isinstance(action, EndReverse):
            break
    return advanced - (n - 1)


@pytest.mark.parametrize("n", range(2, 31))
def test_uniform_chain_is_binomial_for_every_number_of_slots(n: int) -> None:
    step = chain(n)
    floor = plan_floor(step).floor_bytes
    plain = plan_floor(step).plain_peak_bytes
    # Beside what is read there is room for `budget - floor` values; the chain's input is a snapshot that costs nothing.
    for budget in range(floor, plain + 1):
        snapshots = min(budget - floor + 1, n)
        result = plan_optimal(step, budget)
        assert result.status is Status.OPTIMAL
        assert result.added_seconds == pytest.approx(revolve_forwards(n, snapshots) if snapshots < n else 0.0)
        assert result.peak_bytes <= budget


def persistent_optimum(step: Step, sizes: list[int], seconds: list[float], budget: int) -> float:
    """Least replayed seconds of x_i = f_i(x_(i-1)), x_0 free, when a value that is left stays until it is read.

    The memory of a moment is written out from the builder's rules: input, gradients, what is left, what is read; a replay holds two
    neighbouring values.
    """
    n = len(seconds)
    live = [0] * n  # base while f_(i+1)'s backward reads x_i: input, gradient in, gradient out
    for i in range(n):
        live[i] = sizes[0] + sizes[i + 1] + sizes[i]

    @functools.cache
    def segment(s: int, t: int, held: int) -> float:
        """Backward of reads s..t with x_s there and counted in `held`; x_0 is made again from the input at each use."""
        first = sizes[0] if s == 0 else 0
        if s == t:
            return 0.0 if held + live[s] + first <= budget else float("inf")
        best = float("inf")
        between = sizes[0] + sizes[t + 1]
        for k in range(s + 1, t + 1):
            here = max(
                (between + held + (sizes[i - 1] if i - 1 > s else first) + sizes[i] for i in range(s + 1, k + 1)),
                default=0,
            )
            if here <= budget:
                best = min(best, sum(seconds[s:k]) + segment(k, t, held + sizes[k]) + segment(s, k - 1, held))
        return best

    @functools.cache
    def sweep(s: int, held: int) -> float:
        """The first forward is at x_s, which is left (counted in `held`); forward itself always fits in these chains."""
        if s == n - 1:
            return segment(s, s, held)
        best = float("inf")
        for k in range(s + 1, n + 1):
            right = sweep(k, held + sizes[k]) if k < n else 0.0
            best = min(best, right + segment(s, k - 1, held))
        return best

    # x_0 is a copy of the input that takes no time: it is not left, and costs its bytes only while it is read.
    del step
    return sweep(0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_heterogeneous_chain_equals_the_program_over_persistent_schedules(seed: int) -> None:
    import random

    rng = random.Random(seed)
    n = 7
    sizes = [rng.randint(1, 9) for _ in range(n + 1)]
    seconds = [float(rng.randint(1, 9)) for _ in range(n)]
    step = chain(n, sizes=sizes, seconds=seconds)
    floor = plan_floor(step)
    for budget in range(floor.floor_bytes, floor.plain_peak_bytes + 1, 2):
        result = plan_optimal(step, budget)
        oracle = persistent_optimum(step, sizes, seconds, budget)
        assert result.added_seconds == pytest.approx(oracle)
        assert result.bound_seconds <= oracle + 1e-9


def test_equal_segments_of_a_long_chain_are_split_alike() -> None:
    for length in (65, 90, 133, 256):
        relative = [[k - first for k in splits(first, first + length)] for first in range(7)]
        assert all(r == relative[0] for r in relative)
        assert relative[0][0] == 1
        assert relative[0][-1] == length


@pytest.mark.slow
def test_a_chain_longer_than_any_segment_has_a_floor_and_a_bound() -> None:
    step = chain(300)
    floor = plan_floor(step)
    for budget in (floor.floor_bytes, floor.floor_bytes + 3, floor.floor_bytes + 40):
        result = plan_optimal(step, budget)
        assert result.status is not Status.INFEASIBLE
        assert result.peak_bytes <= budget
        assert result.bound_seconds <= result.added_seconds
