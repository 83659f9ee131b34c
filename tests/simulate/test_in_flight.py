"""Micro-batches in flight: what the forward passes of others left is there throughout."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.simulate import LiveKind, simulate
from tests.steps import StepBuilder, Tensor, check_step, gpt_like, random_steps


def several(step: Step, n: int) -> Step:
    return msgspec.structs.replace(step, in_flight=n)


def forward(b: StepBuilder, weight: Tensor, layers: int) -> Tensor:
    x = b.one(b.input(8), size=8, target="aten.copy.default")
    for _ in range(layers):
        y = b.one(x, weight, size=16, save=[x, weight], seconds=3.0)
        x = b.one(y, size=8, save=[y], seconds=1.0)
    return b.one(x, size=4, save=[x])


@pytest.mark.parametrize("layers", [1, 3, 6])
def test_two_forward_passes_before_a_backward(layers: int) -> None:
    b = StepBuilder()
    weight = b.parameter(8)
    one = check_step(b.build(forward(b, weight, layers)))
    b = StepBuilder()
    weight = b.parameter(8)
    first = forward(b, weight, layers)
    waiting = list(b.nodes)
    b.nodes.clear()
    b.backward(forward(b, weight, layers))
    b.nodes.extend(waiting)
    both = check_step(b.build(first))
    assert simulate(both).peak_bytes == simulate(several(one, 2)).peak_bytes + 8  # the other micro-batch's input


def test_what_is_dropped_counts_once_and_what_is_held_n_times() -> None:
    step = gpt_like(4)
    plain, full = None, get_planner("full").plan(step, None)
    for schedule in (plain, full):
        alone = simulate(step, schedule)
        one_more = simulate(several(step, 2), schedule).others_bytes
        for n in (2, 3, 7):
            timeline = simulate(several(step, n), schedule)
            assert timeline.others_bytes == (n - 1) * one_more
            assert timeline.peak_bytes == alone.peak_bytes + (n - 1) * one_more
            assert timeline.added_seconds == alone.added_seconds
            assert (timeline.live_bytes - alone.live_bytes == (n - 1) * one_more).all()
    assert simulate(several(step, 2), full).others_bytes < 0.5 * simulate(several(step, 2)).others_bytes
    assert simulate(step).others_bytes == 0


@settings(max_examples=60, deadline=None)
@given(
    random_steps(copied=True), st.sampled_from(["none", "full", "recursive", "recompute_everything"]), st.integers(2, 5)
)
def test_sums_agree_with_what_is_listed(step: Step, name: str, n: int) -> None:
    schedule = get_planner(name).plan(step, None)
    timeline = simulate(several(step, n), schedule)
    assert timeline.peak_bytes == simulate(step, schedule).peak_bytes + timeline.others_bytes
    for t in range(len(step.ops)):
        assert sum(x.nbytes for x in timeline.live_at(t)) == timeline.live_bytes[t]
        assert sum(timeline.by_category(t).values()) == timeline.high_water[t]
    named = {x.nbytes for x in timeline.at_peak if x.kind is LiveKind.IN_FLIGHT}
    assert named == ({timeline.others_bytes} if timeline.others_bytes else set())
