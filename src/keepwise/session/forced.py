"""Recomputation that the user asked for, laid over any planner's schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator

from keepwise.ir import Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.boundaries import find_blocks, stretches
from keepwise.plan.build import Span, build
from keepwise.plan.segments import common_path
from keepwise.plan.tables import tables_of
from keepwise.simulate import Timeline, simulate

ROUNDS = 8
"""How often the planner is asked for less where the forced recomputation makes its plan too large."""


def force(step: Step, schedule: Schedule, storages: frozenset[int]) -> Schedule:
    """The schedule with `storages` recomputed.

    They are no longer held; their reads are served by the windows around them, else by new ones, one in each block's stretch of
    backward.

    Returns:
        A schedule that `simulate` accepts. A storage that has no recipe beside what the schedule drops stays held.
    """
    held = set(schedule.held) - storages
    spans = [
        Span(
            start=window.start,
            stop=window.stop,
            parent=window.parent,  # Windows and spans are numbered alike.
            retain=tuple(s for s in window.retain if s not in held),
            path=window.path,
        )
        for window in schedule.windows
    ]
    spans.extend(_missing(step, schedule, storages))
    return build(step, held=held, spans=spans, planner=schedule.planner, why=schedule.why)


def _missing(step: Step, schedule: Schedule, storages: frozenset[int]) -> Iterator[Span]:
    """Spans over the reads of `storages` that lie in no window; none of them reaches over a window."""
    top = sorted((w.start, w.stop) for w in schedule.windows if w.parent == NO_WINDOW)
    starts = [start for start, _ in top]
    for part in stretches(step, [block.start for block in find_blocks(step)]):
        runs: dict[int, list[int]] = {}
        for r in tables_of(step).reads:
            if r.storage in storages and part.first <= r.first <= part.last:
                before = bisect_right(starts, r.first)
                if not before or r.first > top[before - 1][1]:
                    runs.setdefault(before, []).append(r.first)
        for moments in runs.values():
            path = common_path(step, part.start, part.stop)
            yield Span(start=moments[0], stop=moments[-1], copy_before=part.start, path=path)


def plan_forced(
    step: Step,
    budget_bytes: int | None,
    storages: frozenset[int],
    planner: Callable[[int | None], Schedule],
    others: Iterable[Schedule] = (),
) -> tuple[Schedule, Timeline]:
    """The planner's schedule with `storages` recomputed, asked for less until the whole fits.

    Args:
        step: the recorded step.
        budget_bytes: of the whole step; None for no limit.
        storages: what the user wants recomputed.
        planner: budget -> schedule; the one with the smallest peak where nothing fits.
        others: schedules that recompute much by themselves: where the user's storages follow from one another, laying them over
            such a schedule may cost less.

    Returns:
        The fastest that fits of what was tried, else the one with the smallest peak.
    """
    limit = float("inf") if budget_bytes is None else budget_bytes
    tried: list[tuple[Schedule, Timeline]] = []

    def attempt(schedule: Schedule) -> int:
        found = force(step, schedule, storages)
        tried.append((found, simulate(step, found)))
        return tried[-1][1].peak_bytes

    target = budget_bytes
    for _ in range(ROUNDS):
        peak = attempt(planner(target))
        if peak <= limit or budget_bytes is None or target is None:
            break
        target -= peak - budget_bytes
        if target <= 0:
            break
    for schedule in others:
        attempt(schedule)

    def rank(found: tuple[Schedule, Timeline]) -> tuple[bool, float, int]:
        timeline = found[1]
        over = timeline.peak_bytes > limit
        return over, timeline.peak_bytes if over else timeline.added_seconds, timeline.peak_bytes

    return min(tried, key=rank)
