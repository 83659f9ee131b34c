"""A real small step: its frontier, and the prices that `explain` shows."""

from __future__ import annotations

import itertools
import re

import pytest

import keepwise
from keepwise._errors import UsageError
from keepwise.ir import Phase
from keepwise.session import overheads
from keepwise.session.decisions import Keep, Recompute
from tests.session.models import loss, stack


@pytest.fixture(scope="module")
def curve() -> keepwise.Frontier:
    model, x = stack(depth=5)
    return keepwise.frontier(model, x, loss=loss, points=9)


def test_less_budget_never_has_a_higher_peak_or_takes_less_time(curve: keepwise.Frontier) -> None:
    assert len(curve.points) == 9
    for less, more in itertools.pairwise(curve.points):
        assert less.budget_bytes <= more.budget_bytes
        assert less.peak_bytes <= more.peak_bytes <= more.budget_bytes
        assert less.replay_seconds >= more.replay_seconds
        assert less.bound_seconds <= less.added_seconds
    assert curve.points[-1].added_seconds == 0
    assert curve.points[-1].peak_bytes == curve.plain_peak_bytes
    assert curve.points[-1].replay_seconds == 0
    assert curve.points[0].replay_seconds > 0


def test_the_knee_is_below_the_straight_line(curve: keepwise.Frontier) -> None:
    knee, first, last = curve.knee, curve.points[0], curve.points[-1]
    share = (knee.peak_bytes - first.peak_bytes) / (last.peak_bytes - first.peak_bytes)
    assert knee.added_seconds <= first.added_seconds * (1 - share) + 1e-12
    with pytest.raises(UsageError, match="points must be at least 2"):
        keepwise.frontier(*stack(depth=1), loss=loss, points=1)


def test_micro_batches_in_flight_count_at_every_budget(curve: keepwise.Frontier) -> None:
    model, x = stack(depth=5)
    several = keepwise.frontier(model, x, loss=loss, points=5, in_flight=3)
    assert several.plain_peak_bytes > curve.plain_peak_bytes
    for less, more in itertools.pairwise(several.points):
        assert less.peak_bytes <= more.peak_bytes <= more.budget_bytes
        assert less.replay_seconds >= more.replay_seconds
    # What `fit` promises for the same number at a budget of the curve is the same plan's peak or a lower one.
    middle = several.points[2]
    plan = keepwise.fit(model, x, loss=loss, budget=middle.budget_bytes, in_flight=3, verify=False)
    assert plan.peak_bytes <= middle.budget_bytes
    with pytest.raises(UsageError, match="in_flight must be a positive number"):
        keepwise.frontier(model, x, loss=loss, in_flight=0)


def test_a_budget_costs_what_fit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overheads, "memory_seconds", lambda nbytes: overheads.MemorySeconds(0.0, 0.0))
    monkeypatch.setattr(overheads, "watching_seconds", lambda evicted: 1e-5)
    model, x = stack(depth=5)
    point = keepwise.frontier(model, x, loss=loss, points=3).points[1]
    plan = keepwise.fit(model, x, loss=loss, budget=point.budget_bytes, verify=False)
    watching = 1e-5 * sum(op.phase is Phase.FORWARD for op in plan.step.ops)
    assert point.added_seconds - point.replay_seconds == pytest.approx(watching)
    assert plan.added_seconds - plan.replay_seconds == pytest.approx(watching)


def test_masks_may_be_expanded_from_their_bits_as_in_fit() -> None:
    model, x = stack(depth=3, dropout=0.1)
    curve = keepwise.frontier(model, x, loss=loss, points=4)
    plan = keepwise.fit(model, x, loss=loss, budget="min", verify=False)
    assert curve.points[0].peak_bytes <= plan.peak_bytes * 1.01


@pytest.fixture(scope="module")
def plan() -> keepwise.Plan:
    model, x = stack(depth=5)
    return keepwise.fit(model, x, loss=loss, budget="0.6x", verify=False)


def test_seconds_of_decisions_sum_to_those_of_the_plan(plan: keepwise.Plan) -> None:
    assert plan.added_seconds > 0
    assert sum(d.seconds for d in plan.decisions) == pytest.approx(plan.replay_seconds)
    for d in plan.decisions:
        assert d.seconds == 0 or isinstance(d, Recompute)
        if isinstance(d, Recompute):
            assert d.again_seconds is not None
            assert d.seconds_per_gib == pytest.approx(d.again_seconds / d.nbytes * 2**30)


def test_explain_shows_two_prices_and_that_of_memory(plan: keepwise.Plan) -> None:
    text = plan.explain("blocks.1")
    price = plan.memory_price
    assert price is not None
    assert price > 0
    assert text.startswith(f"memory at this budget: {price:.3g} s a GiB")
    own = [d for d in plan.decisions if d.path.startswith("blocks.1")]
    assert len(re.findall("prices: ", text)) == len(own)
    for d in own:
        if d.seconds_per_gib is None:
            continue
        word = "dearer" if d.seconds_per_gib > price else "cheaper"
        assert f"{d.seconds_per_gib:.3g} s a GiB, {word} than memory" in text
    # Both kinds are there, and most decisions follow the prices.
    assert {type(d) for d in own} == {Keep, Recompute}


def test_where_the_plain_step_fits_memory_is_free() -> None:
    model, x = stack(depth=2)
    plan = keepwise.fit(model, x, loss=loss, budget="2x", verify=False)
    assert plan.memory_price == 0
    assert "memory at this budget: free" in plan.explain()
    named = keepwise.fit(stack(depth=2)[0], x, loss=loss, budget="max", planner="full", verify=False)
    assert named.memory_price is None
    assert "memory at this budget" not in named.explain()


def test_str_says_which_planner_was_chosen_and_why(plan: keepwise.Plan) -> None:
    assert "planner optimal: the budget of" in str(plan)
    assert "lies between" in str(plan)
