"""Every schedule of a tiny step that holds whole storages and replays before reading nodes, by enumeration.

A family: the set of storages held from forward (saved or not), nested windows over the moments that read, and what each window
retains for the windows inside it. `build` completes each to a legal schedule, `simulate` prices it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from keepwise.ir import Category, Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.build import Span, build
from keepwise.plan.droppable import formally_droppable
from keepwise.simulate import ScheduleError, simulate


@dataclass(frozen=True)
class Best:
    """Least added seconds at a peak."""

    peak_bytes: int
    added_seconds: float
    schedule: Schedule


def reading_nodes(step: Step) -> list[tuple[int, int]]:
    """(first, last) moments of the reads of droppable storages, overlapping ones joined."""
    formal = formally_droppable(step)
    reads = sorted(
        {(r.first, r.last) for save in step.saves if step.values[save.value].storage in formal for r in save.reads}
    )
    nodes: list[tuple[int, int]] = []
    for first, last in reads:
        if nodes and first <= nodes[-1][1]:
            nodes[-1] = (nodes[-1][0], max(nodes[-1][1], last))
        else:
            nodes.append((first, last))
    return nodes


def num_choices(step: Step) -> int:
    """Storages that a schedule may decide about."""
    dynamic = (Category.ACTIVATION, Category.TEMPORARY)
    return sum(
        1 for s in step.storages if s.category in dynamic and s.birth >= 0 and step.ops[s.birth].phase == "forward"
    )


def _trees(a: int, b: int, depth: int) -> Iterator[tuple[tuple[int, int, int], ...]]:
    """Sequences of sibling spans (first node, last node, level) that cover nodes a..b, with spans inside them."""
    if a > b:
        yield ()
        return
    for stop in range(a, b + 1):
        for rest in _trees(stop + 1, b, depth):
            yield ((a, stop, depth), *rest)
            if depth < 2 and stop > a:
                for inner in _trees(a, stop, depth + 1):
                    yield ((a, stop, depth), *inner, *rest)


def _spans(nodes: Sequence[tuple[int, int]], tree: Sequence[tuple[int, int, int]]) -> list[Span]:
    spans: list[Span] = []
    stack: list[tuple[int, int]] = []  # (level, index)
    for a, b, level in tree:
        while stack and stack[-1][0] >= level:
            stack.pop()
        parent = stack[-1][1] if stack else NO_WINDOW
        spans.append(Span(start=nodes[a][0], stop=nodes[b][1], parent=parent))
        stack.append((level, len(spans) - 1))
    return spans


def all_schedules(step: Step, *, limit: int) -> Iterator[Schedule]:
    """Schedules of the family, at most `limit`."""
    formal = sorted(formally_droppable(step))
    made = [
        s.id
        for s in step.storages
        if s.category in (Category.ACTIVATION, Category.TEMPORARY)
        and s.birth >= 0
        and step.ops[s.birth].phase == "forward"
        and s.id not in formal
    ]
    nodes = reading_nodes(step)
    count = 0
    trees = list(dict.fromkeys(_trees(0, len(nodes) - 1, 0)))
    for size in range(len(formal) + len(made) + 1):
        for held in itertools.combinations([*formal, *made], size):
            dropped = [s for s in formal if s not in held]
            for tree in trees:
                spans = _spans(nodes, tree)
                outer = [i for i in range(len(spans)) if any(s.parent == i for s in spans)]
                for retained in itertools.product(
                    *(
                        itertools.chain.from_iterable(
                            itertools.combinations(dropped, n) for n in range(len(dropped) + 1)
                        )
                        for _ in outer
                    )
                ):
                    chosen = list(spans)
                    for i, keep in zip(outer, retained, strict=True):
                        chosen[i] = Span(start=spans[i].start, stop=spans[i].stop, parent=spans[i].parent, retain=keep)
                    yield build(step, held=held, spans=chosen)
                    count += 1
                    if count >= limit:
                        return


def best_schedules(step: Step, *, limit: int = 20_000) -> list[Best]:
    """Those that no other beats in peak and time, by rising peak."""
    found: dict[int, Best] = {}
    seen: set[Schedule] = set()
    for schedule in all_schedules(step, limit=limit):
        if schedule in seen:
            continue
        seen.add(schedule)
        try:
            timeline = simulate(step, schedule)
        except ScheduleError:
            continue
        known = found.get(timeline.peak_bytes)
        if known is None or timeline.added_seconds < known.added_seconds - 1e-9:
            found[timeline.peak_bytes] = Best(timeline.peak_bytes, timeline.added_seconds, schedule)
    kept: list[Best] = []
    for peak in sorted(found):
        if not kept or found[peak].added_seconds < kept[-1].added_seconds - 1e-9:
            kept.append(found[peak])
    return kept
