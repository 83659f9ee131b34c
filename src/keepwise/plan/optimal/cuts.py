"""Where the forward pass may be cut: its narrow points.

A *cut* lies before a forward op. What crosses it is every storage that was born before and is read after. A point is narrow
where at most one *short-lived* storage crosses (two or three, as the states of a recurrent cell, where that leaves large pieces).
Long-lived ones are of two kinds: small ones (masks, rotary tables) are held always; large ones (skips of a U-Net, an encoder's
output) cross with it. How long is long is found by trying: as long as the pieces are small enough to be planned one by one.

Consecutive pieces are joined where the joined sequence repeats: attention and MLP of a transformer make a block.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from keepwise.plan.optimal.graph import Graph

TARGET_OPS = 60
"""Pieces are made of about as many ops, where the graph allows."""

TARGET_SAVES = 14
"""Pieces save about as many storages at most, where the graph allows."""

MIN_SAVES = 3
"""What a second look cuts off saves at least as many."""

MAX_JOINED_SAVES = 12
"""Pieces that save more together are not joined: their menu would take longer than it is worth."""

NEAR = 4
"""Cuts as many ops apart are the same place."""

SMALL_SHARE = 0.003
"""Share of all saved bytes below which a long-lived storage is held always."""

WIDE_SHARE = 0.02
"""Share of all saved bytes that those may have together."""

MAX_CROSSING = 12

Cut = tuple[int, tuple[int, ...]]
"""Position in forward, storages that cross."""

Piece = tuple[int, int, tuple[int, ...]]
"""From, to (positions in forward), storages that cross the cut before it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Life:
    """Positions in forward by storage."""

    first: dict[int, int]
    """Where it is born."""
    last: dict[int, int]
    """Where it is read last."""
    moving: dict[int, int]
    """Where a version that is overwritten later is read last: no cut may lie between."""


def find_pieces(graph: Graph, forward: Sequence[int]) -> tuple[list[Piece], frozenset[int]]:
    """The pieces of the forward ops, in order (positions in `forward`), and the long-lived storages that are held always."""
    life = _lifetimes(graph, forward)
    births = _births(graph, life)
    cuts, wide = _cuts(graph, life, births, len(forward))
    cuts = _refined(graph, life, births, len(forward), cuts, wide)

    def is_small(a: int, b: int) -> bool:
        return b - a <= 2 * TARGET_OPS and sum(a <= at < b for at in births) <= MAX_JOINED_SAVES

    return _join_repeats(graph, forward, cuts, is_small), wide


def _lifetimes(graph: Graph, forward: Sequence[int]) -> _Life:
    step = graph.step
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    moving: dict[int, int] = {}
    for at, op in enumerate(forward):
        for storage in graph.made_by[op]:
            first[storage] = last[storage] = at
    for at, op in enumerate(forward):
        for value in step.ops[op].inputs:
            storage = step.values[value].storage
            if storage in first:
                last[storage] = max(last[storage], at)
                if not graph.settled(value, op) or graph.outlives_reads(storage):
                    moving[storage] = max(moving.get(storage, 0), at)
    return _Life(first=first, last=last, moving=moving)


def _charged(graph: Graph, storage: int) -> bool:
    """Whether holding the storage costs anything: not where others hold it to the end."""
    s = graph.step.storages[storage]
    return not graph.is_leaf(storage) and s.held_until < graph.num_moments - 1


def _births(graph: Graph, life: _Life) -> list[int]:
    """Positions at which storages that are saved, and not small, are born."""
    saved = [s for s in life.first if graph.reads[s] and graph.nbytes[s]]
    total = sum(graph.nbytes[s] for s in saved)
    return sorted(life.first[s] for s in saved if graph.nbytes[s] > SMALL_SHARE * total / 10)


def _cuts(graph: Graph, life: _Life, births: Sequence[int], size: int) -> tuple[list[Cut], frozenset[int]]:
    """Cuts for the largest limit on what counts as short-lived that makes the pieces small."""
    total = sum(graph.nbytes[s] for s in life.first if graph.reads[s])
    best: tuple[list[Cut], frozenset[int]] = ([(0, ())], frozenset())
    lowest = float("inf")
    for most, limit in itertools.product((1, 2, 3), _halved(size + 1)):
        long = {s for s, at in life.first.items() if life.last[s] - at > limit and _charged(graph, s)}
        wide = frozenset(s for s in long if graph.nbytes[s] <= SMALL_SHARE * total)
        if sum(graph.nbytes[s] for s in wide) > WIDE_SHARE * total:
            wide = frozenset()
        narrow = _narrow(graph, life, size, wide, long - wide, most)
        # What is saved costs nothing to hold until it is read: prefer cuts where only such storages cross.
        saved_only = [cut for cut in narrow if all(graph.reads[s] for s in cut[1])]
        for cuts in (saved_only, _without_unsaved(graph, narrow)):
            edges = [at for at, _ in cuts] + [size]
            widest = max(_weight(births, a, b) for a, b in itertools.pairwise(edges))
            if widest < 0.8 * lowest:
                best, lowest = (cuts, wide), widest
            if lowest <= 1.0:
                return best
    return best


def _refined(
    graph: Graph, life: _Life, births: Sequence[int], size: int, cuts: list[Cut], wide: frozenset[int]
) -> list[Cut]:
    """Pieces that are still large cut once more each, where what crosses is saved, or tiny; the others' cuts stay as they are."""
    total = sum(graph.nbytes[s] for s in life.first if graph.reads[s])
    tiny = {s for s in life.first if graph.nbytes[s] <= SMALL_SHARE * total / 10}
    found = list(cuts)
    narrow: list[Cut] | None = None
    for (a, _), b in zip(cuts, [*(at for at, _ in cuts[1:]), size], strict=True):
        if _weight(births, a, b) <= 1.0:
            continue
        narrow = narrow if narrow is not None else _narrow(graph, life, size, wide, tiny, 1)
        inside = [
            (max(_weight(births, a, at), _weight(births, at, b)), at, crossing)
            for at, crossing in narrow
            if min(sum(a <= n < at for n in births), sum(at <= n < b for n in births)) >= MIN_SAVES
            and any(s not in tiny for s in crossing)
            and all(graph.reads[s] or s in tiny for s in crossing)
        ]
        if inside:
            _, at, crossing = min(inside)
            found.append((at, crossing))
    return sorted(found)


def _halved(limit: int) -> Iterator[int]:
    while limit >= NEAR:
        yield limit
        limit //= 2


def _weight(births: Sequence[int], a: int, b: int) -> float:
    """Size of a piece in units of what can be planned well."""
    saves = sum(1 for at in births if a <= at < b)
    return max((b - a) / (2 * TARGET_OPS), saves / TARGET_SAVES)


def _narrow(graph: Graph, life: _Life, size: int, wide: frozenset[int], long: set[int], most: int) -> list[Cut]:
    """Cuts where at most `most` short-lived storages cross."""
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
    cuts: list[Cut] = [(0, ())]
    crossing: set[int] = set()
    closed = shut[0]
    for at in range(1, size):
        crossing.difference_update(closes[at])
        crossing.update(opens[at])
        closed += shut[at]
        short = sum(1 for s in crossing if s not in long)
        if closed or short > most or not 1 <= len(crossing) <= MAX_CROSSING:
            continue
        here = tuple(sorted(crossing))
        if here != cuts[-1][1]:
            cuts.append((at, here))
    return cuts


def _without_unsaved(graph: Graph, cuts: list[Cut]) -> list[Cut]:
    """Leave out cuts at a storage that nobody saves where one at saved storages is near: those cost nothing to hold."""

    def free(crossing: tuple[int, ...]) -> bool:
        return all(graph.reads[s] for s in crossing)

    saved = [at for at, crossing in cuts if crossing and free(crossing)]
    return [
        (at, crossing) for at, crossing in cuts if free(crossing) or not any(abs(at - other) <= NEAR for other in saved)
    ]


def _join_repeats(
    graph: Graph, forward: Sequence[int], cuts: Sequence[Cut], is_small: Callable[[int, int], bool]
) -> list[Piece]:
    """(from, to, inputs) of stages: consecutive pieces joined to the period of the longest repetition, where that is small."""
    size = len(forward)
    ops = graph.step.ops
    pieces = [(cut, cuts[i + 1][0] if i + 1 < len(cuts) else size, crossing) for i, (cut, crossing) in enumerate(cuts)]
    pieces = _with_saves(graph, forward, pieces)
    names = [tuple(ops[forward[i]].signature or ops[forward[i]].target for i in range(a, b)) for a, b, _ in pieces]
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
    joined: list[Piece] = list(pieces[:best_start])
    i = best_start
    while i + best_period <= best_start + best_cover:
        run = pieces[i : i + best_period]
        if is_small(run[0][0], run[-1][1]):
            joined.append((run[0][0], run[-1][1], run[0][2]))
        else:
            joined.extend(run)
        i += best_period
    joined.extend(pieces[i:])
    return joined


def _with_saves(graph: Graph, forward: Sequence[int], pieces: list[Piece]) -> list[Piece]:
    """Join pieces to the one before that make nothing saved, and whose inputs nobody saves either."""
    saved = graph.step.saved_storages
    result: list[Piece] = []
    for piece in pieces:
        makes = any(s in saved for i in range(piece[0], piece[1]) for s in graph.made_by[forward[i]])
        if makes or len(result) == 0 or all(graph.reads[s] for s in piece[2]):
            result.append(piece)
        else:
            result[-1] = (result[-1][0], piece[1], result[-1][2])
    return result
