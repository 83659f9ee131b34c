"""Cuts the forward pass at its narrow points into a chain of *stages*, and recognises equal ones.

A *cut* lies before a forward op. What crosses it is every storage that was born before and is read after. Where at most
one storage crosses (apart from what is alive almost everywhere and is always held: masks, rotary tables, an encoder's
output), the forward pass can be started again from that storage alone. Stages are what lies between two cuts; consecutive
small ones are joined where the joined sequence repeats (attention and MLP of a transformer make a block), and where
backward does not visit them one after the other.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from keepwise.ir import NO_OP
from keepwise.plan.optimal.graph import Graph

TARGET_OPS = 60
"""Stages are made of about as many ops, where the graph allows."""

NEAR = 4
"""Cuts as many ops apart are the same place."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Node:
    """One or several autograd nodes that read saved tensors at overlapping moments."""

    first: int
    last: int
    storages: tuple[int, ...]
    """Storages of the plan (the stage's own and its inputs) that are read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A piece of the forward pass between two cuts."""

    index: int
    ops: tuple[int, ...]
    """Forward ops, ascending."""
    inputs: tuple[int, ...]
    """Storages that cross the cut before it."""
    shared: frozenset[int]
    """Inputs that the backward of the stage before reads too: they stay to the end of this stage's backward."""
    outputs: tuple[int, ...]
    """Storages that cross the cut after it."""
    own: tuple[int, ...]
    """Droppable storages that are born in it and read in its backward."""
    nodes: tuple[Node, ...]
    """Where its backward reads, in order."""
    first: int
    """First moment of its backward; the whole step's first backward moment where it reads nothing."""
    last: int
    """Last moment of its backward at which it reads; `first - 1` if it reads nothing."""
    gap_stop: int
    """First moment of the backward of the stage before: what lies between belongs to no stage."""
    forward_stop: int
    """First moment after its forward: where the next stage's forward begins, or the first backward moment of the last stage."""
    key: tuple[object, ...]
    """Equal for stages that are the same problem."""
    path: str

    @property
    def span(self) -> range:
        """Moments of its backward."""
        return range(self.first, self.last + 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chain:
    """The forward pass as stages."""

    stages: tuple[Stage, ...]
    held: frozenset[int]
    """Droppable storages that no stage decides about: always held."""


def cut_chain(graph: Graph, *, target_ops: int = TARGET_OPS) -> Chain:
    """Cut the forward pass of `graph`."""
    forward = graph.forward
    position = {op: i for i, op in enumerate(forward)}
    life = _lifetimes(graph, position)
    wide = _always_held(graph, life, target_ops)
    cuts = _cuts(graph, life, wide)
    groups = _join_repeats(graph, cuts, target_ops)
    return _consistent(graph, groups, wide)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Life:
    """Positions in forward by storage."""

    first: dict[int, int]
    """Where it is born."""
    last: dict[int, int]
    """Where it is read last."""
    moving: dict[int, int]
    """Where a version that is overwritten later is read last: no cut may lie between."""


def _lifetimes(graph: Graph, position: dict[int, int]) -> _Life:
    step = graph.step
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    moving: dict[int, int] = {}
    for op, at in position.items():
        for storage in graph.made_by[op]:
            first[storage] = last[storage] = at
    for op, at in position.items():
        for value in step.ops[op].inputs:
            storage = step.values[value].storage
            if storage in first:
                last[storage] = max(last[storage], at)
                if not graph.settled(value) or graph.outlives_reads(storage):
                    moving[storage] = max(moving.get(storage, 0), at)
    return _Life(first=first, last=last, moving=moving)


def _charged(graph: Graph, storage: int) -> bool:
    """Whether holding the storage costs anything: not where others hold it to the end."""
    s = graph.step.storages[storage]
    return not graph.is_leaf(storage) and s.held_until < graph.num_moments - 1


def _always_held(graph: Graph, life: _Life, target_ops: int) -> frozenset[int]:
    """Storages whose readers are so far apart that no narrow point is left unless they are held."""
    spans = {s: life.last[s] - at for s, at in life.first.items() if _charged(graph, s) and s not in life.moving}
    size = len(graph.forward)
    best: frozenset[int] = frozenset()
    widest = size + 1
    limit = size + 1
    while limit > target_ops // 4:
        wide = frozenset(s for s, span in spans.items() if span > limit)
        edges = [at for at, _ in _cuts(graph, life, wide)] + [size]
        gap = max(b - a for a, b in itertools.pairwise(edges))
        if gap < 0.8 * widest:
            best, widest = wide, gap
        if widest <= 2 * target_ops:
            break
        limit //= 2
    return best


def _cuts(graph: Graph, life: _Life, wide: frozenset[int]) -> list[tuple[int, tuple[int, ...]]]:
    """(position, crossing storages) where at most one storage crosses."""
    size = len(graph.forward)
    opens: list[list[int]] = [[] for _ in range(size + 1)]
    closes: list[list[int]] = [[] for _ in range(size + 1)]
    shut = [0] * (size + 2)
    for storage, at in life.first.items():
        if storage in life.moving:
            shut[at + 1] += 1
            shut[life.moving[storage] + 1] -= 1
        if storage in wide or not _charged(graph, storage) or life.last[storage] <= at:
            continue
        opens[at + 1].append(storage)  # crosses cuts at+1 .. last
        closes[min(life.last[storage] + 1, size)].append(storage)
    cuts: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    crossing: set[int] = set()
    closed = shut[0]
    for at in range(1, size):
        crossing.difference_update(closes[at])
        crossing.update(opens[at])
        closed += shut[at]
        if len(crossing) == 1 and not closed and tuple(crossing) != cuts[-1][1]:
            cuts.append((at, tuple(crossing)))
    return _without_unsaved(graph, cuts)


def _without_unsaved(graph: Graph, cuts: list[tuple[int, tuple[int, ...]]]) -> list[tuple[int, tuple[int, ...]]]:
    """Leave out cuts at a storage that nobody saves where one at a saved storage is near: that one costs nothing to hold."""
    saved = [at for at, crossing in cuts if any(graph.reads[s] for s in crossing)]
    kept: list[tuple[int, tuple[int, ...]]] = []
    for at, crossing in cuts:
        good = not crossing or any(graph.reads[s] for s in crossing)
        if good or not any(abs(at - other) <= NEAR for other in saved):
            kept.append((at, crossing))
    return kept


def _join_repeats(
    graph: Graph, cuts: Sequence[tuple[int, tuple[int, ...]]], target_ops: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    """(from, to, inputs) of stages: consecutive pieces joined to the period of the longest repetition."""
    size = len(graph.forward)
    ops = graph.step.ops
    pieces = [(cut, cuts[i + 1][0] if i + 1 < len(cuts) else size, crossing) for i, (cut, crossing) in enumerate(cuts)]
    pieces = _with_saves(graph, pieces)
    names = [
        tuple(ops[graph.forward[i]].signature or ops[graph.forward[i]].target for i in range(a, b))
        for a, b, _ in pieces
    ]
    best_period, best_start, best_cover = 1, 0, 0
    for period in range(1, min(len(pieces) // 2, 32) + 1):
        start, run, top, top_start = 0, 0, 0, 0
        for i in range(len(pieces) - period):
            if names[i] == names[i + period]:
                if run == 0:
                    start = i
                run += 1
                if run > top:
                    top, top_start = run, start
            else:
                run = 0
        cover = top + period if top >= period else 0
        if cover > best_cover * 1.1:
            best_period, best_start, best_cover = period, top_start, cover
    if best_cover == 0:
        return pieces
    joined: list[tuple[int, int, tuple[int, ...]]] = list(pieces[:best_start])
    i = best_start
    while i + best_period <= best_start + best_cover:
        run = pieces[i : i + best_period]
        if run[-1][1] - run[0][0] <= 2 * target_ops:
            joined.append((run[0][0], run[-1][1], run[0][2]))
        else:
            joined.extend(run)
        i += best_period
    joined.extend(pieces[i:])
    return joined


def _with_saves(graph: Graph, pieces: list[tuple[int, int, tuple[int, ...]]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """Join pieces that save nothing to the one before."""
    saved = graph.step.saved_storages
    result: list[tuple[int, int, tuple[int, ...]]] = []
    for piece in pieces:
        makes = any(s in saved for i in range(piece[0], piece[1]) for s in graph.made_by[graph.forward[i]])
        if makes or len(result) == 0:
            result.append(piece)
        else:
            result[-1] = (result[-1][0], piece[1], result[-1][2])
    return result


def _consistent(graph: Graph, groups: list[tuple[int, int, tuple[int, ...]]], wide: frozenset[int]) -> Chain:
    """Stages whose backward spans are disjoint and in reverse order; others are joined."""
    while True:
        stages = _stages(graph, groups, wide)
        bad = next((i for i in range(len(stages) - 1) if stages[i].first <= stages[i + 1].last), None)
        if bad is None or len(groups) == 1:
            break
        groups[bad : bad + 2] = [(groups[bad][0], groups[bad + 1][1], groups[bad][2])]
    decided = {s for stage in stages for s in (*stage.own, *stage.inputs)}
    held = frozenset(s for s in graph.droppable - decided if graph.reads[s])
    graph.hold(held)
    return Chain(stages=tuple(_stages(graph, groups, wide)), held=held)


def _stages(graph: Graph, groups: list[tuple[int, int, tuple[int, ...]]], wide: frozenset[int]) -> list[Stage]:
    reads = _assign_reads(graph, groups)
    step = graph.step
    stages: list[Stage] = []
    following = max(graph.forward, default=0) + 1
    bounds: list[tuple[int, int]] = [(0, 0)] * len(groups)
    for i in reversed(range(len(groups))):
        moments = [m for _, first, last in reads[i] for m in (first, last)]
        bounds[i] = (min(moments), max(moments)) if moments else (following, following - 1)
        following = bounds[i][1] + 1
    for i, (a, b, inputs) in enumerate(groups):
        ops = tuple(graph.forward[a:b])
        outputs = groups[i + 1][2] if i + 1 < len(groups) else ()
        first, last = bounds[i]
        gap_stop = max(bounds[i - 1][0], last + 1) if i > 0 else graph.num_moments
        born = {s for o in ops for s in graph.made_by[o]}
        mine = set(inputs)
        own = tuple(
            sorted(
                {s for s, _, _ in reads[i] if _decidable(graph, s) and s not in wide and s not in mine and s in born}
            )
        )
        nodes = _nodes([r for r in reads[i] if r[0] in own or r[0] in mine])
        path = _common_path([step.ops[o].path for o in ops])
        stop = graph.forward[groups[i + 1][0]] if i + 1 < len(groups) else max(first, ops[-1] + 1)
        shared = frozenset(s for s, _, _ in reads[i - 1] if s in mine) if i > 0 else frozenset()
        key = (_key(graph, ops, inputs, outputs, own, nodes, first, last, stop), tuple(s in shared for s in inputs))
        stages.append(
            Stage(
                index=i,
                ops=ops,
                inputs=inputs,
                shared=shared,
                outputs=outputs,
                own=own,
                nodes=nodes,
                first=first,
                last=last,
                gap_stop=gap_stop,
                forward_stop=stop,
                key=key,
                path=path,
            )
        )
    return stages


def _decidable(graph: Graph, storage: int) -> bool:
    return storage in graph.droppable and not graph.outlives_reads(storage)


def _assign_reads(graph: Graph, groups: list[tuple[int, int, tuple[int, ...]]]) -> list[list[tuple[int, int, int]]]:
    """(storage, first, last) of the reads of each stage's saved tensors.

    `Save.at` does not tell whether an op saved its output or the next one its input; at a cut the moment of the read decides.
    """
    step = graph.step
    stage_of: dict[int, int] = {}
    for i, (a, b, _) in enumerate(groups):
        for at in range(a, b):
            stage_of[graph.forward[at]] = i
    starts = {graph.forward[a]: i for i, (a, _, _) in enumerate(groups) if i > 0}
    order = sorted(stage_of)
    sure: list[list[tuple[int, int, int]]] = [[] for _ in groups]
    open_reads: list[tuple[int, tuple[int, int, int]]] = []
    for save in step.saves:
        storage = step.values[save.value].storage
        later = starts.get(save.at)
        op = save.at if save.at in stage_of else _before(order, save.at)
        index = stage_of.get(op, len(groups) - 1)
        for read in save.reads:
            item = (storage, read.first, read.last)
            if later is not None:
                open_reads.append((later, item))
            else:
                sure[index].append(item)
    low = [min((f for _, f, _ in items), default=None) for items in sure]
    for later, item in open_reads:
        edge = low[later - 1]
        earlier = edge is not None and item[1] >= edge
        sure[later - 1 if earlier and not _inside(sure[later], item) else later].append(item)
    return sure


def _inside(items: list[tuple[int, int, int]], item: tuple[int, int, int]) -> bool:
    return bool(items) and min(f for _, f, _ in items) <= item[1] <= max(last for _, _, last in items)


def _before(order: list[int], at: int) -> int:
    """Last forward op before `at`."""
    i = bisect_left(order, at)
    return order[i - 1] if i else NO_OP


def _nodes(reads: list[tuple[int, int, int]]) -> tuple[Node, ...]:
    """Reads with overlapping moments joined, in order."""
    nodes: list[Node] = []
    for storage, first, last in sorted(reads, key=lambda r: (r[1], r[2], r[0])):
        if nodes and first <= nodes[-1].last:
            top = nodes[-1]
            nodes[-1] = Node(
                first=top.first, last=max(top.last, last), storages=tuple(sorted({*top.storages, storage}))
            )
        else:
            nodes.append(Node(first=first, last=last, storages=(storage,)))
    return tuple(nodes)


def _key(
    graph: Graph,
    ops: tuple[int, ...],
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    own: tuple[int, ...],
    nodes: tuple[Node, ...],
    first: int,
    last: int,
    forward_stop: int,
) -> tuple[object, ...]:
    """Ops, wiring, bytes and the shape of base memory, all relative."""
    names: dict[int, int] = {}

    def name(storage: int) -> int:
        return names.setdefault(storage, len(names))

    step = graph.step
    wiring: list[object] = []
    inside = set(ops)
    for op in ops:
        o = step.ops[op]
        # Where an op outside the stage made it, only that matters: it is held.
        needs = tuple(
            (name(n.storage), n.reference, n.copy, tuple(m - ops[0] if m in inside else -1 for m in n.makers))
            for n in graph.needs(op)
        )
        made = tuple((name(s), graph.nbytes[s], s in graph.droppable) for s in graph.made_by[op])
        wiring.append(
            (
                o.signature or o.target,
                round(o.seconds, 9),
                o.workspace_bytes,
                o.replayable,
                needs,
                made,
                tuple(name(s) for s in o.writes),
            )
        )
    base = graph.base[first : last + 1]
    between = graph.between[first : last + 1]
    level = int(base.min()) if len(base) else 0
    front = graph.base[ops[0] : forward_stop]
    front = front - front.min()
    return (
        tuple(wiring),
        tuple((name(s), graph.nbytes[s]) for s in inputs),
        tuple((name(s), graph.nbytes[s]) for s in outputs),
        tuple((name(s), step.storages[s].held_until - ops[0]) for s in own),
        tuple((n.first - first, n.last - first, tuple(name(s) for s in n.storages)) for n in nodes),
        (base - level).tobytes(),
        (between - level).tobytes(),
        front.tobytes(),
    )


def _common_path(paths: Sequence[str]) -> str:
    parts = [p.split(".") for p in paths if p]
    if not parts:
        return ""
    common: list[str] = []
    for pieces in zip(*parts, strict=False):
        if len(set(pieces)) > 1:
            break
        common.append(pieces[0])
    return ".".join(common)
