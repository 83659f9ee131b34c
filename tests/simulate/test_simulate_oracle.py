"""The judge against a slow one: on every step and schedule they agree, on the verdict and on every byte."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import Schedule, Step, Window
from keepwise.plan import get_planner
from keepwise.simulate import ScheduleError, simulate
from tests.simulate.oracle import Oracle, Refused
from tests.steps import accumulated, chain, gpt_like, in_place_stream, random_steps, read_twice, unet_like

PLANNERS = ["none", "full", "every:2", "sqrt", "recursive", "selective", "recompute_everything"]

planners = st.sampled_from(PLANNERS)


def assert_agree(step: Step, schedule: Schedule) -> bool:
    """Both judges say the same; whether they accept."""
    try:
        expected = Oracle(step, schedule).timeline()
    except Refused:
        with pytest.raises(ScheduleError):
            simulate(step, schedule)
        return False
    found = simulate(step, schedule)
    assert found.live_bytes.tolist() == expected[0]
    assert found.replay_bytes.tolist() == expected[1]
    return True


@settings(max_examples=150, deadline=None)
@given(random_steps(copied=True), planners)
def test_random_steps_under_named_planners(step: Step, planner: str) -> None:
    assert assert_agree(step, get_planner(planner).plan(step, None))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    "step",
    [
        chain(9),
        gpt_like(3, dropout=True, optimizer=True),
        gpt_like(2, grads="fresh"),
        unet_like(2),
        in_place_stream(4),
        accumulated(2, 4),
        read_twice(4),
    ],
    ids=["chain", "gpt", "fresh", "unet", "stream", "accumulated", "twice"],
)
def test_families_under_named_planners(step: Step, planner: str) -> None:
    assert assert_agree(step, get_planner(planner).plan(step, None))


def _without(draw: st.DrawFn, items: tuple[int, ...]) -> tuple[int, ...]:
    if not items:
        return items
    gone = draw(st.integers(0, len(items) - 1))
    return items[:gone] + items[gone + 1 :]


def _with(draw: st.DrawFn, items: tuple[int, ...], limit: int, *, ordered: bool) -> tuple[int, ...]:
    more = (*items, draw(st.integers(0, limit - 1)))
    return tuple(sorted(set(more))) if ordered else more


@st.composite
def altered(draw: st.DrawFn, step: Step, schedule: Schedule) -> Schedule:
    """A schedule with one thing changed."""
    kind = draw(st.sampled_from(["held", "window"])) if schedule.windows else "held"
    if kind == "held":
        grow = draw(st.booleans())
        held = _with(draw, schedule.held, len(step.storages), ordered=True) if grow else _without(draw, schedule.held)
        return msgspec.structs.replace(schedule, held=held)
    i = draw(st.integers(0, len(schedule.windows) - 1))
    w = schedule.windows[i]
    field = draw(st.sampled_from(["ops", "retain", "copies", "start", "stop", "parent", "gone"]))
    limits = {"ops": len(step.ops), "retain": len(step.storages), "copies": len(step.values)}
    if field in limits:
        items = getattr(w, field)
        grow = draw(st.booleans())
        change = (
            _with(draw, items, limits[field], ordered=draw(st.integers(0, 3)) > 0) if grow else _without(draw, items)
        )
        w = msgspec.structs.replace(w, **{field: change})
    elif field == "parent":
        w = msgspec.structs.replace(w, parent=draw(st.integers(-1, len(schedule.windows))))
    elif field == "gone":
        w = msgspec.structs.replace(w, ops=(), retain=(), copies=())
    else:
        w = msgspec.structs.replace(w, **{field: getattr(w, field) + draw(st.integers(-3, 3))})
    return msgspec.structs.replace(schedule, windows=(*schedule.windows[:i], w, *schedule.windows[i + 1 :]))


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_an_altered_schedule_is_caught_or_harmless(data: st.DataObject) -> None:
    step = data.draw(random_steps(copied=True))
    schedule = get_planner(data.draw(planners)).plan(step, None)
    for _ in range(data.draw(st.integers(1, 3))):
        schedule = data.draw(altered(step, schedule))
    assert_agree(step, schedule)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_alterations_on_nested_windows(data: st.DataObject) -> None:
    step = data.draw(st.sampled_from([chain(7), in_place_stream(4), gpt_like(3, width=8, vocab=16, dropout=True)]))
    schedule = get_planner("recursive").plan(step, None)
    assert_agree(step, data.draw(altered(step, schedule)))


def test_most_alterations_are_caught() -> None:
    """The mutation test above would prove nothing if alterations were harmless as a rule."""
    step = gpt_like(3, width=8, vocab=16)
    schedule = get_planner("full").plan(step, None)
    caught = total = 0
    for i, w in enumerate(schedule.windows):
        for op in w.ops:
            broken = msgspec.structs.replace(w, ops=tuple(x for x in w.ops if x != op))
            caught += not assert_agree(step, _replaced(schedule, i, broken))
            total += 1
        for s in w.retain:
            broken = msgspec.structs.replace(w, retain=tuple(x for x in w.retain if x != s))
            caught += not assert_agree(step, _replaced(schedule, i, broken))
            total += 1
    assert total > 40
    assert caught == total


def _replaced(schedule: Schedule, i: int, window: Window) -> Schedule:
    return msgspec.structs.replace(schedule, windows=(*schedule.windows[:i], window, *schedule.windows[i + 1 :]))
