"""The forward pass as a chain of *stages*, and which of them are the same problem.

A stage is a piece between two cuts (`cuts`) with its backward: the moments at which the saved tensors of its ops are read. Pieces
whose backward is not visited one after the other, in reverse order, are joined.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from keepwise.plan.optimal.cuts import Piece, find_pieces
from keepwise.plan.optimal.graph import Graph


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
    """Inputs that the stage before needs too (its backward reads them, or they cross it): they stay while this one runs."""
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
    """A forward pass as stages."""

    stages: tuple[Stage, ...]
    held: frozenset[int]
    """Droppable storages of the step that no stage decides about: always held."""


def cut_chains(graph: Graph, *, whole: bool = False) -> tuple[Chain, ...]:
    """Every forward pass of the step, cut unless wanted as a whole; the graph's base then charges what is always held."""
    found: list[tuple[tuple[int, ...], list[Piece], frozenset[int]]] = []
    for forward in graph.passes:
        pieces, wide = ([(0, len(forward), ())], frozenset[int]()) if whole else find_pieces(graph, forward)
        found.append((forward, _consistent(graph, forward, pieces, wide), wide))
    stages = [_stages(graph, *args) for args in found]
    decided = {s for chain in stages for stage in chain for s in (*stage.own, *stage.inputs)}
    held = frozenset(s for s in graph.droppable - decided if graph.reads[s])
    graph.hold(held)
    return tuple(Chain(stages=tuple(_stages(graph, *args)), held=held) for args in found)


def _consistent(graph: Graph, forward: Sequence[int], groups: list[Piece], wide: frozenset[int]) -> list[Piece]:
    """Join pieces until the spans of their backwards are disjoint and in reverse order."""
    groups = list(groups)
    while len(groups) > 1:
        stages = _stages(graph, forward, groups, wide)
        bad = next((i for i in range(len(stages) - 1) if stages[i].first <= stages[i + 1].last), None)
        if bad is None:
            break
        groups[bad : bad + 2] = [(groups[bad][0], groups[bad + 1][1], groups[bad][2])]
    return groups


def _stages(graph: Graph, forward: Sequence[int], groups: list[Piece], wide: frozenset[int]) -> list[Stage]:
    reads = _assign_reads(graph, forward, groups)
    step = graph.step
    stages: list[Stage] = []
    following = forward[-1] + 1
    bounds: list[tuple[int, int]] = [(0, 0)] * len(groups)
    for i in reversed(range(len(groups))):
        moments = [m for _, first, last in reads[i] for m in (first, last)]
        bounds[i] = (min(moments), max(moments)) if moments else (following, following - 1)
        following = bounds[i][1] + 1
    for i, (a, b, inputs) in enumerate(groups):
        ops = tuple(forward[a:b])
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
        nodes = nodes_of([r for r in reads[i] if r[0] in own or r[0] in mine])
        path = _common_path([step.ops[o].path for o in ops])
        stop = forward[groups[i + 1][0]] if i + 1 < len(groups) else max(first, ops[-1] + 1)
        before = {s for s, _, _ in reads[i - 1]}.union(groups[i - 1][2]) if i > 0 else set[int]()
        shared = frozenset(before & mine)
        key = (_key(graph, ops, inputs, outputs, own, nodes, first, last), tuple(s in shared for s in inputs))
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


def _assign_reads(graph: Graph, forward: Sequence[int], groups: list[Piece]) -> list[list[tuple[int, int, int]]]:
    """(storage, first, last) of the reads of each stage's saved tensors that were made in this pass.

    `Save.at` does not tell whether an op saved its output or the next one its input; at a cut the moment of the read decides.
    """
    step = graph.step
    stage_of: dict[int, int] = {}
    for i, (a, b, _) in enumerate(groups):
        for at in range(a, b):
            stage_of[forward[at]] = i
    starts = {forward[a]: i for i, (a, _, _) in enumerate(groups) if i > 0}
    order = sorted(stage_of)
    sure: list[list[tuple[int, int, int]]] = [[] for _ in groups]
    open_reads: list[tuple[int, tuple[int, int, int]]] = []
    for save in step.saves:
        storage = step.values[save.value].storage
        if step.storages[storage].birth not in stage_of:
            continue
        later = starts.get(save.at)
        index = stage_of[save.at if save.at in stage_of else _before(order, save.at)]
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
    """Last op of the pass before `at`; the first one where there is none."""
    return order[max(bisect_left(order, at) - 1, 0)]


def nodes_of(reads: Iterable[tuple[int, int, int]]) -> tuple[Node, ...]:
    """Reads, as (storage, first moment, last moment), with overlapping moments joined, in order."""
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
) -> tuple[object, ...]:
    """Ops, wiring, bytes and the shape of base memory in backward, all relative."""
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
        shared = tuple(
            (name(s), graph.nbytes[s], inside.issuperset(graph.leaf_readers[s])) for s in graph.leaves.get(op, ())
        )
        wiring.append(
            (
                o.signature or o.target,
                round(o.seconds, 9),
                o.workspace_bytes,
                o.replayable,
                needs,
                shared,
                made,
                tuple(name(s) for s in o.writes),
            )
        )
    base = graph.base[first : last + 1]
    between = graph.between[first : last + 1]
    level = int(base.min()) if len(base) else 0
    return (
        tuple(wiring),
        tuple((name(s), graph.nbytes[s]) for s in inputs),
        tuple((name(s), graph.nbytes[s]) for s in outputs),
        tuple((name(s), step.storages[s].held_until - ops[0]) for s in own),
        # In an order of their own: a storage's number says nothing about its place in the stage.
        tuple((n.first - first, n.last - first, tuple(sorted(name(s) for s in n.storages))) for n in nodes),
        (base - level).tobytes(),
        (between - level).tobytes(),
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
