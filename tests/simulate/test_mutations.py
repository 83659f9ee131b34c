"""Schedules altered at random in many ways: each alteration is refused, or a slow judge agrees on every byte.

The slow judge (`oracle`) runs a schedule on contents: a replay that leaves anything else than the plain step had is refused there. So an
alteration that both accept computes the right values, and its timeline is right.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from keepwise import targets
from keepwise.ir import Schedule, Step, Window
from keepwise.plan import get_planner
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.session.batch import as_batch, whole_step
from keepwise.simulate import ScheduleError, simulate
from keepwise.trace import trace_steps
from tests.simulate.oracle import Oracle, Refused
from tests.steps import accumulated, chain, gpt_like, in_place_stream, read_twice, unet_like

Chance = random.Random


def _window(schedule: Schedule, i: int, **changes: object) -> Schedule:
    changed = msgspec.structs.replace(schedule.windows[i], **changes)
    return msgspec.structs.replace(schedule, windows=(*schedule.windows[:i], changed, *schedule.windows[i + 1 :]))


def _any_window(chance: Chance, schedule: Schedule, wanted: Callable[[Window], object] = lambda w: True) -> int | None:
    found = [i for i, w in enumerate(schedule.windows) if wanted(w)]
    return chance.choice(found) if found else None


def _listed(name: str) -> Callable[[Chance, Step, Schedule], Schedule | None]:
    """One entry of `ops`, `retain` or `copies` is taken out."""

    def alter(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
        i = _any_window(chance, schedule, lambda w: getattr(w, name))
        if i is None:
            return None
        items = list(getattr(schedule.windows[i], name))
        items.pop(chance.randrange(len(items)))
        return _window(schedule, i, **{name: tuple(items)})

    return alter


def more_ops(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    i = _any_window(chance, schedule)
    if i is None:
        return None
    ops = {*schedule.windows[i].ops, chance.randrange(len(step.ops))}
    return _window(schedule, i, ops=tuple(sorted(ops)))


def twice(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """An op is listed twice."""
    i = _any_window(chance, schedule, lambda w: w.ops)
    if i is None:
        return None
    ops = schedule.windows[i].ops
    return _window(schedule, i, ops=tuple(sorted((*ops, chance.choice(ops)))))


def out_of_order(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    i = _any_window(chance, schedule, lambda w: len(w.ops) > 1)
    if i is None:
        return None
    ops = list(schedule.windows[i].ops)
    a, b = chance.sample(range(len(ops)), 2)
    ops[a], ops[b] = ops[b], ops[a]
    return _window(schedule, i, ops=tuple(ops))


def moved_op(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """An op goes from one window to another."""
    a = _any_window(chance, schedule, lambda w: w.ops)
    b = _any_window(chance, schedule)
    if a is None or b is None or a == b:
        return None
    op = chance.choice(schedule.windows[a].ops)
    less = _window(schedule, a, ops=tuple(o for o in schedule.windows[a].ops if o != op))
    return _window(less, b, ops=tuple(sorted({*schedule.windows[b].ops, op})))


def more_retained(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    i = _any_window(chance, schedule, lambda w: w.ops)
    if i is None:
        return None
    w = schedule.windows[i]
    made = [step.values[v].storage for o in w.ops for v in step.ops[o].outputs]
    s = chance.choice(made) if made and chance.random() < 0.7 else chance.randrange(len(step.storages))
    return _window(schedule, i, retain=(*w.retain, s))


def other_version(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """A copy is taken of another version, or of anything else."""
    i = _any_window(chance, schedule, lambda w: w.ops)
    if i is None:
        return None
    w = schedule.windows[i]
    if not w.copies:
        read = [v for o in w.ops for v in step.ops[o].inputs]
        return _window(schedule, i, copies=(chance.choice(read),)) if read else None
    k = chance.randrange(len(w.copies))
    storage = step.values[w.copies[k]].storage
    others = [v.id for v in step.values if v.storage == storage and v.id != w.copies[k]]
    value = chance.choice(others) if others else chance.randrange(len(step.values))
    return _window(schedule, i, copies=(*w.copies[:k], value, *w.copies[k + 1 :]))


def shifted(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """A window begins or ends at another moment."""
    i = _any_window(chance, schedule)
    if i is None:
        return None
    w, name = schedule.windows[i], chance.choice(["start", "stop"])
    by = chance.choice([-20, -5, -2, -1, 1, 2, 5, 20])
    return _window(schedule, i, **{name: getattr(w, name) + by})


def other_parent(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    i = _any_window(chance, schedule)
    return None if i is None else _window(schedule, i, parent=chance.randint(-1, len(schedule.windows)))


def other_number(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    i = _any_window(chance, schedule)
    return None if i is None else _window(schedule, i, id=chance.randint(-1, len(schedule.windows)))


def swapped(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """Two windows change places; their numbers go with the places."""
    if len(schedule.windows) < 2:
        return None
    windows = list(schedule.windows)
    a, b = chance.sample(range(len(windows)), 2)
    windows[a], windows[b] = windows[b], windows[a]
    renamed = tuple(msgspec.structs.replace(w, id=i) for i, w in enumerate(windows))
    return msgspec.structs.replace(schedule, windows=renamed)


def doubled(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """A window is there twice, the second one inside the first or beside it."""
    i = _any_window(chance, schedule)
    if i is None:
        return None
    w = schedule.windows[i]
    again = msgspec.structs.replace(w, id=len(schedule.windows), parent=chance.choice([w.parent, i]))
    return msgspec.structs.replace(schedule, windows=(*schedule.windows, again))


def gone(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    """A window without content, so that its numbers stay."""
    i = _any_window(chance, schedule)
    return None if i is None else _window(schedule, i, ops=(), retain=(), copies=())


def less_held(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    if not schedule.held:
        return None
    s = chance.choice(schedule.held)
    return msgspec.structs.replace(schedule, held=tuple(h for h in schedule.held if h != s))


def more_held(chance: Chance, step: Step, schedule: Schedule) -> Schedule | None:
    held = (*schedule.held, chance.randrange(len(step.storages)))
    return msgspec.structs.replace(schedule, held=tuple(sorted(held)))


ALTERATIONS: dict[str, Callable[[Chance, Step, Schedule], Schedule | None]] = {
    "fewer ops": _listed("ops"),
    "fewer retained": _listed("retain"),
    "fewer copies": _listed("copies"),
    **{
        f.__name__: f
        for f in (
            *(more_ops, twice, out_of_order, moved_op, more_retained, other_version, shifted, other_parent),
            *(other_number, swapped, doubled, gone, less_held, more_held),
        )
    },
}


def verdict(step: Step, schedule: Schedule) -> str:
    """`refused` by both judges or `accepted` by both, at the same bytes."""
    try:
        live, before = Oracle(step, schedule).timeline()
    except Refused:
        with pytest.raises(ScheduleError):
            simulate(step, schedule)
        return "refused"
    found = simulate(step, schedule)
    assert found.live_bytes.tolist() == live
    assert found.replay_bytes.tolist() == before
    return "accepted"


def schedules(step: Step) -> list[Schedule]:
    """Those of named planners, and the solver's at three budgets."""
    floor = plan_floor(step)
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    solved = [plan_optimal(step, low + (high - low) * i // 4).schedule for i in (0, 1, 2)]
    return [*(get_planner(name).plan(step, None) for name in ("full", "recursive", "recompute_everything")), *solved]


def run(cases: list[tuple[Step, list[Schedule]]], number: int, seed: int) -> dict[str, Counter[str]]:
    """Alter `number` times, each time a random schedule in one to three ways; verdicts by the first way."""
    chance = Chance(seed)
    found = {name: Counter[str]() for name in ALTERATIONS}
    for name in itertools.islice(itertools.cycle(ALTERATIONS), number):
        step, all_of_it = chance.choice(cases)
        schedule: Schedule | None = chance.choice(all_of_it)
        for way in (name, *chance.choices(list(ALTERATIONS), k=chance.choice([0, 0, 0, 1, 2]))):
            schedule = ALTERATIONS[way](chance, step, schedule) or schedule
        found[name][verdict(step, schedule)] += 1
    return found


def families() -> list[tuple[Step, list[Schedule]]]:
    made = [
        chain(7),
        gpt_like(3, width=8, vocab=16, dropout=True, optimizer=True),
        unet_like(2),
        in_place_stream(4),
        accumulated(2, 3),
        read_twice(4),
    ]
    return [(step, schedules(step)) for step in made]


def recorded(*names: str) -> list[tuple[Step, list[Schedule]]]:
    found = []
    for name in names:
        target = targets.build(name)
        batch = as_batch(target.args, target.kwargs)
        step_of = whole_step(target.model, batch, target.loss, None)
        traced = trace_steps(step_of, model=target.model, inputs=(batch.args, batch.kwargs), device="cpu")
        found.append((traced.recording.step, schedules(traced.recording.step)))
    return found


def test_altered_schedules_of_made_up_steps() -> None:
    found = run(families(), 420, seed=1)
    refused = sum(c["refused"] for c in found.values())
    assert 100 < refused < 390
    for name in ("fewer ops", "twice", "out_of_order", "other_number"):
        assert found[name]["refused"] > 0.6 * found[name].total(), name


def test_altered_schedules_of_recorded_steps() -> None:
    found = run(recorded("lstm-tiny", "mlp-tiny"), 84, seed=2)
    assert sum(c["refused"] for c in found.values()) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_thousands_of_altered_schedules_of_made_up_steps(seed: int) -> None:
    run(families(), 2500, seed=10 + seed)


@pytest.mark.slow
def test_hundreds_of_altered_schedules_of_recorded_steps() -> None:
    names = ("gpt2-dropout-tiny", "resnet50-tiny", "vit-tiny", "unet-tiny", "lstm-tiny", "mlp-tiny")
    run(recorded(*names), 600, seed=20)
