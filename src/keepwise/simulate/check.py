"""The rules of `Schedule` that can be judged without a replay."""

from __future__ import annotations

from itertools import pairwise

from keepwise.ir import Schedule, Step, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.simulate.errors import ScheduleError


def check_structure(step: Step, schedule: Schedule) -> None:
    """Identifiers exist, windows nest, ops are in order.

    Raises:
        ScheduleError: the first rule that is broken.
    """
    if len(set(schedule.held)) != len(schedule.held):
        raise ScheduleError("held lists one twice")
    for s in schedule.held:
        if not 0 <= s < len(step.storages):
            raise ScheduleError("held names an unknown storage", storage=s)
    children: dict[int, list[Window]] = {}
    for i, window in enumerate(schedule.windows):
        if window.id != i:
            raise ScheduleError(f"window at position {i} has id {window.id}", window=i)
        if not 0 <= window.start <= window.stop < len(step.ops):
            raise ScheduleError(f"its span [{window.start}, {window.stop}] is not within {len(step.ops)} ops", window=i)
        _check_parent(schedule, window)
        _check_ops(step, window)
        for name, ids, limit in (("retain", window.retain, step.storages), ("copies", window.copies, step.values)):
            if len(set(ids)) != len(ids):
                raise ScheduleError(f"{name} lists one twice", window=i)
            for x in ids:
                if not 0 <= x < len(limit):
                    raise ScheduleError(f"{name} names the unknown {x}", window=i)
        children.setdefault(window.parent, []).append(window)
    for siblings in children.values():
        siblings.sort(key=lambda w: w.start)
        for a, b in pairwise(siblings):
            if b.start <= a.stop:
                raise ScheduleError(
                    f"its span begins at {b.start}, within [{a.start}, {a.stop}] of window {a.id}, and neither encloses the other",
                    window=b.id,
                )


def _check_parent(schedule: Schedule, window: Window) -> None:
    if window.parent == NO_WINDOW:
        return
    if not 0 <= window.parent < window.id:
        raise ScheduleError(f"its parent {window.parent} does not come before it", window=window.id)
    parent = schedule.windows[window.parent]
    if not parent.start <= window.start <= window.stop <= parent.stop:
        raise ScheduleError(
            f"its span [{window.start}, {window.stop}] is not inside [{parent.start}, {parent.stop}] of parent {parent.id}",
            window=window.id,
        )


def _check_ops(step: Step, window: Window) -> None:
    previous = -1
    for i in window.ops:
        if not 0 <= i < len(step.ops):
            raise ScheduleError("no such op in the step", window=window.id, op=i)
        if i <= previous:
            raise ScheduleError(f"ops are not in ascending order: it comes after op {previous}", window=window.id, op=i)
        if i >= window.start:
            raise ScheduleError(f"it runs only after the window starts at {window.start}", window=window.id, op=i)
        if not step.ops[i].replayable:
            raise ScheduleError(
                f"{step.ops[i].target} is not replayable: {step.ops[i].why_not}", window=window.id, op=i
            )
        previous = i
