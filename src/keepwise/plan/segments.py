"""Plans that replay whole segments: the inputs of segments are held, everything else inside them is dropped."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from keepwise.ir import Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.boundaries import Segment, Stretch, crossings, find_blocks, stretches
from keepwise.plan.build import Span, build
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.tables import tables_of
from keepwise.simulate import simulate

# The last block is left alone unless that raises the peak by more than this factor.
_TOLERATED = 1.1

# A piece that saves less than this share of what a block usually saves is no block.
_LEAST_BLOCK = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Forward ops `start <= i < stop` that are replayed together, or left as in the plain step."""

    start: int
    stop: int
    replay: bool


def plan_groups(
    step: Step, groups: Sequence[Group], *, also_held: Iterable[int] = (), planner: str, why: str = ""
) -> Schedule:
    """One window for each replayed group; its inputs, `also_held` and all that the other groups save are held."""
    cuts = [g.start for g in groups]
    parts = stretches(step, cuts)
    crossing = crossings(step, {p.start for p in parts})
    held = set(also_held)
    spans: list[Span] = []
    for part in parts:
        if is_replayed(groups, part):
            held.update(crossing[part.start])
            spans.append(span_of(step, part))
        else:
            held.update(read_within(step, part))
    return build(step, held=held, spans=spans, planner=planner, why=why)


def is_replayed(groups: Sequence[Group], part: Stretch) -> bool:
    """Whether the last group of a stretch is replayed (several share one where backward does not keep them apart)."""
    last = [g for g in groups if g.start < part.stop]
    return bool(last) and last[-1].replay


def span_of(step: Step, part: Stretch, *, parent: int = NO_WINDOW) -> Span:
    """The span of one stretch."""
    return Span(
        start=part.first,
        stop=part.last,
        parent=parent,
        copy_before=part.start,
        path=common_path(step, part.start, part.stop),
    )


def read_within(step: Step, part: Stretch) -> set[int]:
    """Storages that are read in a stretch."""
    return {r.storage for r in tables_of(step).reads if part.first <= r.first <= part.last}


def common_path(step: Step, start: int, stop: int) -> str:
    """Longest module path that holds every op with a path among `start <= i < stop`."""
    common: list[str] | None = None
    for op in step.ops[start:stop]:
        if op.path:
            parts = op.path.split(".")
            if common is None:
                common = parts
            n = next(
                (i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), min(len(common), len(parts))
            )
            common = common[:n]
    return ".".join(common or ())


def blocks_and_rest(step: Step) -> tuple[tuple[Segment, ...], int]:
    """The blocks of a step, and the position of the first that is left alone.

    Replaying the last block would gain nothing at the peak: backward begins with it, so that it is replayed while everything
    else is still held. Where the loss after it is so large that keeping the block raises the peak, it is replayed all the same.
    """
    table = vars(step)
    key = "_plan_blocks"
    if key not in table:
        table[key] = _blocks_and_rest(step)
    return table[key]


def _blocks_and_rest(step: Step) -> tuple[tuple[Segment, ...], int]:
    blocks = find_blocks(step)
    if not blocks:
        return blocks, 0
    tables = tables_of(step)
    saved = [0] * len(blocks)
    starts = [b.start for b in blocks]
    for s in step.saved_storages:
        if step.storages[s].birth >= starts[0]:
            saved[bisect_right(starts, step.storages[s].birth) - 1] += tables.nbytes[s]
    usual = sorted(saved)[len(saved) // 2]
    # The last block is the last of a repetition, or the last that saves as much as a block does: a small head is not.
    alone = next(
        (i for i in range(len(blocks) - 1, -1, -1) if blocks[i].is_repeated or saved[i] >= _LEAST_BLOCK * usual),
        len(blocks) - 1,
    )
    if alone + 1 < len(blocks):
        early = _peak(step, blocks, alone)
        late = _peak(step, blocks, alone + 1)
        alone += early > _TOLERATED * late
    return blocks, alone


def _peak(step: Step, blocks: Sequence[Segment], alone: int) -> int:
    return simulate(step, plan_groups(step, groups_of(blocks, alone), planner="")).peak_bytes


def groups_of(blocks: Sequence[Segment], alone: int, replay: Callable[[int], bool] = lambda i: True) -> list[Group]:
    """One group a block, replayed where `replay` says so, up to the first that is left alone."""
    return [Group(start=b.start, stop=b.stop, replay=i < alone and replay(i)) for i, b in enumerate(blocks)]


def joined(blocks: Sequence[Segment], edges: Sequence[int], *, replay: bool = True) -> list[Group]:
    """Groups of consecutive blocks between the positions `edges`."""
    return [
        Group(start=blocks[a].start, stop=blocks[b - 1].stop, replay=replay)
        for a, b in itertools.pairwise(edges)
        if a < b
    ]


def hold_everything(step: Step, *, planner: str, why: str = "") -> Schedule:
    """The plain step."""
    return Schedule(held=tuple(sorted(formally_droppable(step))), planner=planner, why=why)
