"""Where to cut a step: narrow points of the forward pass, blocks, and the spans of backward that belong to them.

A *cut* lies before a forward op; what crosses it are the storages born before it that a later forward op reads. Two kinds of
cuts are candidates: those that a single storage crosses (apart from what crosses most of the pass, such as masks and rotary
tables), and valleys of the crossing bytes. *Blocks* are the longest repeated sequence of the pieces between candidates, then the
next longest, and what is left over in between. Module names play no role.

Backward visits the nodes of a segment together, later segments first, wherever autograd's order allows; a cut is *clean* if all
nodes above it come before all nodes below it, and only clean cuts part windows.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from keepwise.ir import NO_OP, Phase, Step
from keepwise.plan.repeats import find_runs
from keepwise.plan.tables import SavedRead, Tables, tables_of

# What crosses this share of a forward pass (masks, rotary tables) does not tell one cut from another.
_LASTING_SHARE = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A place in the forward pass, before op `op`."""

    op: int
    nbytes: int
    """Bytes that cross it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Forward ops `start <= i < stop`."""

    start: int
    stop: int
    is_repeated: bool = False
    """Whether it is one of several equal blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """A stretch of backward, `first <= t <= last`, that reads what forward ops `start <= i < stop` saved."""

    start: int
    stop: int
    first: int
    last: int


def crossings(step: Step, cuts: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Cut -> the storages that cross it, leaves left out; a cut is given by the forward op after it."""
    tables = tables_of(step)
    order = sorted(set(cuts))
    found: dict[int, list[int]] = {c: [] for c in order}
    for s in step.storages:
        if not tables.is_leaf[s.id]:
            for c in order[bisect_right(order, s.birth) : bisect_right(order, tables.last_forward_read[s.id])]:
                found[c].append(s.id)
    return {c: tuple(storages) for c, storages in found.items()}


def narrow_points(step: Step) -> tuple[Cut, ...]:
    """Candidate cuts of every forward pass, ascending; the beginning of each pass is one."""
    tables = tables_of(step)
    found: list[Cut] = []
    for run in tables.passes:
        found.extend(_narrow_points(tables, run))
    return tuple(found)


def _narrow_points(tables: Tables, run: range) -> list[Cut]:
    """Cuts of one forward pass."""
    n = len(run)
    births, ends, nbytes = _lives(tables, run)
    width = _profile(births, ends, nbytes, n)
    lasting = ends - births > _LASTING_SHARE * n
    local = ~lasting & (nbytes > 0)
    count = _profile(births[local], ends[local], np.ones(int(local.sum()), dtype=np.int64), n)
    # Cuts that the same storages cross are one: a storage begins or ends to cross only at an op that makes or last reads one.
    change = np.zeros(n + 2, dtype=bool)
    change[births + 1] = True
    change[ends + 1] = True
    valley = _valleys(width, n)
    cuts = [Cut(op=run.start, nbytes=int(width[0]))]
    for i in range(1, n):
        if change[i] and (count[i] == 1 or valley[i]):
            cuts.append(Cut(op=run.start + i, nbytes=int(width[i])))
    return cuts


def _lives(tables: Tables, run: range) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(birth, last forward read, bytes) of the storages that cross a cut inside `run`, relative to its first op."""
    last = tables.last_forward_read
    rows = [
        (max(s.birth, run.start - 1) - run.start, min(last[s.id], run.stop - 1) - run.start, s.nbytes)
        for s in tables.step.storages
        if s.birth < last[s.id] and s.birth < run.stop and last[s.id] >= run.start and not tables.is_leaf[s.id]
    ]
    table = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return table[:, 0], table[:, 1], table[:, 2]


def _profile(births: np.ndarray, ends: np.ndarray, weights: np.ndarray, n: int) -> np.ndarray:
    """Sum of the weights that cross each cut: int64 [n + 1], entry i for the cut before op i."""
    steps = np.zeros(n + 2, dtype=np.int64)
    np.add.at(steps, births + 1, weights)
    np.add.at(steps, ends + 1, -weights)
    return np.cumsum(steps)[: n + 1]


def _valleys(width: np.ndarray, n: int) -> np.ndarray:
    """Whether each cut lies on a plateau of equal widths that is lower than both its neighbours: bool [n + 1]."""
    inner = width[1:n]
    edges = np.flatnonzero(np.diff(inner)) + 1
    starts = np.concatenate([[0], edges]).astype(np.int64)
    stops = np.concatenate([edges, [len(inner)]]).astype(np.int64)
    found = np.zeros(n + 1, dtype=bool)
    for a, b in zip(starts.tolist(), stops.tolist(), strict=True):
        falls = a == 0 or inner[a - 1] > inner[a]
        rises = b == len(inner) or inner[b] > inner[a]
        found[a + 1 : b + 1] = falls and rises
    return found


def find_blocks(step: Step) -> tuple[Segment, ...]:
    """The forward passes cut into blocks, in order; passes that save nothing (what follows backward) are left out.

    Equal blocks are marked. Pieces outside any repetition are joined until they save about as much as a block does.
    """
    tables = tables_of(step)
    saved_at = sorted(save.at for save in step.saves)
    found: list[Segment] = []
    for run in tables.passes:
        if bisect_right(saved_at, run.start) == bisect_right(saved_at, run.stop):
            continue
        found.extend(_blocks(tables, run, _narrow_points(tables, run)))
    return tuple(found)


def _blocks(tables: Tables, run: range, cuts: Sequence[Cut]) -> list[Segment]:
    edges = [c.op for c in cuts] + [run.stop]
    tokens = _tokens(tables.step, edges)
    saved = _saved_bytes(tables, edges)
    widths = [c.nbytes for c in cuts] + [0]
    sizes = [b - a for a, b in pairwise(edges)]
    runs = find_runs(tokens, sizes, widths)
    blocks = [
        range(a, a + period) for first, period, count in runs for a in range(first, first + period * count, period)
    ]
    weight = sorted(sum(saved[i] for i in block) for block in blocks)
    target = weight[len(weight) // 2] if weight else sum(saved) / 12
    found: list[Segment] = []
    position = 0
    for block in [*sorted(blocks, key=lambda b: b.start), range(len(sizes), len(sizes))]:
        found.extend(_joined(edges, saved, position, block.start, target))
        if len(block):
            found.append(Segment(start=edges[block.start], stop=edges[block.stop], is_repeated=True))
        position = block.stop
    return found


def _joined(edges: Sequence[int], saved: Sequence[int], begin: int, end: int, target: float) -> list[Segment]:
    """Pieces `begin..end` joined into segments that save about `target` bytes each."""
    found: list[Segment] = []
    first, total = begin, 0
    for i in range(begin, end):
        total += saved[i]
        if total >= target and i + 1 < end:
            found.append(Segment(start=edges[first], stop=edges[i + 1]))
            first, total = i + 1, 0
    if first < end:
        found.append(Segment(start=edges[first], stop=edges[end]))
    return found


def _tokens(step: Step, edges: Sequence[int]) -> list[int]:
    """A number for each piece between two edges: equal for equal sequences of targets and result shapes."""
    numbers: dict[tuple[object, ...], int] = {}
    found = []
    for a, b in pairwise(edges):
        key = tuple(
            (op.target, tuple((step.values[o].shape, step.values[o].dtype) for o in op.outputs)) for op in step.ops[a:b]
        )
        found.append(numbers.setdefault(key, len(numbers)))
    return found


def _saved_bytes(tables: Tables, edges: Sequence[int]) -> list[int]:
    """Bytes of the storages born in each piece that autograd saves."""
    found = [0] * (len(edges) - 1)
    for s in tables.step.saved_storages:
        birth = tables.step.storages[s].birth
        if edges[0] <= birth < edges[-1]:
            found[bisect_right(edges, birth) - 1] += tables.nbytes[s]
    return found


# ---------------------------------------------------------------- backward


@dataclass(frozen=True, slots=True, kw_only=True)
class _Node:
    """An autograd node that reads saves."""

    first: int
    last: int
    op: int
    """Forward op that it belongs to."""


def _nodes(tables: Tables) -> list[list[_Node]]:
    """The nodes that read saves, in order of time, one list for each pass of backward.

    A pass ends where forward goes on, or where a save is read a second time.
    """
    step = tables.step
    forward = [op.index for op in step.ops if op.phase == Phase.FORWARD]
    passes: list[list[_Node]] = []
    seen: set[int] = set()
    nodes: dict[tuple[int, int], int] = {}
    previous = NO_OP

    def close() -> None:
        if nodes:
            passes.append([_Node(first=a, last=b, op=op) for (a, b), op in sorted(nodes.items())])
        nodes.clear()
        seen.clear()

    for r in tables.reads:
        if r.save in seen or (previous != NO_OP and bisect_left(forward, previous) != bisect_left(forward, r.first)):
            close()
        seen.add(r.save)
        previous = r.first
        key = (r.first, r.last)
        nodes[key] = min(nodes.get(key, len(step.ops)), _op_of(step, r))
    close()
    return passes


def _op_of(step: Step, read: SavedRead) -> int:
    """Forward op whose node reads a save: an op saves its inputs just before it runs and its results just after."""
    if read.at < len(step.ops):
        storages = {step.values[v].storage for v in step.ops[read.at].inputs}
        if read.storage in storages:
            return read.at
    return read.at - 1


def stretches(step: Step, cuts: Iterable[int]) -> tuple[Stretch, ...]:
    """Backward parted by those of the forward cuts that are clean, in order of time.

    Every read of a save lies in exactly one stretch.
    """
    tables = tables_of(step)
    edges = sorted({0, len(step.ops), *cuts})
    found: list[Stretch] = []
    for nodes in _nodes(tables):
        found.extend(_part(nodes, edges))
    return tuple(found)


def _part(nodes: list[_Node], edges: list[int]) -> list[Stretch]:
    """Stretches of one backward pass, in order of time."""
    by_op = sorted(nodes, key=lambda node: node.op)
    n = len(by_op)
    ops = [node.op for node in by_op]
    earliest_below = [by_op[0].first] * (n + 1)
    for i, node in enumerate(by_op):
        earliest_below[i + 1] = min(earliest_below[i], node.first) if i else node.first
    latest_above = [NO_OP] * (n + 1)
    for i in range(n - 1, -1, -1):
        latest_above[i] = max(latest_above[i + 1], by_op[i].last)
    clean = [edges[bisect_right(edges, ops[0]) - 1]]
    clean += [c for c in edges if 0 < (i := bisect_left(ops, c)) < n and latest_above[i] < earliest_below[i]]
    clean.append(edges[bisect_right(edges, ops[-1])])
    found: list[Stretch] = []
    for a, b in pairwise(clean):
        inside = by_op[bisect_left(ops, a) : bisect_left(ops, b)]
        if inside:
            found.append(Stretch(start=a, stop=b, first=min(x.first for x in inside), last=max(x.last for x in inside)))
    return sorted(found, key=lambda s: s.first)
