"""What a policy does to each block: bytes held, bytes rebuilt, operators and collectives run again."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgspec

from keepwise.estimator.graph import Collective, Graph, Op, Walk
from keepwise.estimator.policy import Policy, products_kept, results_kept, segment_length, selective_kept


class Treatment(msgspec.Struct, frozen=True, kw_only=True):
    """One way of treating one graph."""

    kept_bytes: int
    """bytes held from forward until its backward."""
    backward_peak: int
    """bytes: most that is alive while its backward runs, `kept_bytes` included."""
    saved_in_peak: int
    """bytes: of these, what autograd holds of this piece at that moment."""
    forward_peak: int
    """bytes: most that is alive while its forward runs and after it, beyond what earlier pieces hold."""
    cached_bytes: int
    """bytes of narrow weights that nothing holds, but that autocast caches until the whole forward ends."""
    rebuilt_flops: float
    """floating-point operations run again."""
    rebuilt_seconds: float
    """seconds run again."""
    rebuilt_collectives: tuple[Collective, ...]
    """collectives run again."""


Cost = Callable[[Graph, Op], float]
"""Seconds of one forward operator."""


def keep_all(graph: Graph, walk: Walk) -> Treatment:
    """Nothing is rebuilt."""
    return Treatment(
        kept_bytes=graph.bytes_of(graph.saved()),
        backward_peak=walk.backward_peak,
        saved_in_peak=walk.backward_saved,
        forward_peak=walk.forward_peak,
        cached_bytes=0,
        rebuilt_flops=0.0,
        rebuilt_seconds=0.0,
        rebuilt_collectives=(),
    )


def keep_some(graph: Graph, walk: Walk, kept: frozenset[int], cost: Cost) -> Treatment:
    """Hold `kept` (and the entering states where they are read again), rebuild the rest when backward reaches the block."""
    ops, needed = graph.rebuild(kept)
    if not ops:
        return keep_all(graph, walk)
    held = kept | needed
    # Entering states that no operator saves are held beside everything else.
    beside = graph.bytes_of(held - graph.saved())
    return Treatment(
        kept_bytes=graph.bytes_of(held),
        backward_peak=max(walk.backward_peak, walk.forward_peak + walk.first_gradients) + beside,
        saved_in_peak=walk.backward_saved + beside,
        forward_peak=walk.forward_peak,
        cached_bytes=graph.bytes_of(graph.casts - held),
        rebuilt_flops=sum(graph.ops[i].flops for i in ops),
        rebuilt_seconds=sum(cost(graph, graph.ops[i]) for i in ops),
        rebuilt_collectives=tuple(c for i in ops for c in graph.ops[i].collectives if c.phase == "forward"),
    )


def rebuild_block(graph: Graph, walk: Walk, cost: Cost) -> Treatment:
    """Hold only what enters; the closure stops as PyTorch's early stop does, at the last saved value."""
    held = frozenset({graph.entry}) if graph.entry >= 0 else frozenset()
    return keep_some(graph, walk, held, cost)


def whole_again(graph: Graph, cost: Cost) -> tuple[float, float, tuple[Collective, ...]]:
    """FLOPs, seconds and collectives of running a whole forward again (all but the last block of a segment)."""
    return (
        graph.flops,
        sum(cost(graph, op) for op in graph.ops),
        tuple(c for op in graph.ops for c in op.collectives if c.phase == "forward"),
    )


def segment(graphs: list[Graph], walks: list[Walk], cost: Cost) -> Treatment:
    """Several blocks rebuilt together: the first one's entering states are held, and all of them are alive before backward."""
    last = rebuild_block(graphs[-1], walks[-1], cost)
    if len(graphs) == 1:
        return last
    earlier = sum(g.bytes_of(g.saved()) for g in graphs[:-1])
    again = [whole_again(g, cost) for g in graphs[:-1]]
    casts = [g.bytes_of(g.casts) for g in graphs]
    entry = graphs[0].entry
    kept = graphs[0].bytes_of({entry}) if entry >= 0 else 0
    beside = kept if entry not in graphs[0].saved() else 0
    return Treatment(
        kept_bytes=kept,
        backward_peak=beside
        + earlier
        + max(walks[-1].backward_peak, walks[-1].forward_peak + walks[-1].first_gradients),
        saved_in_peak=beside + earlier + walks[-1].backward_saved,
        forward_peak=max(
            walk.forward_peak + before
            for walk, before in zip(walks, itertools.accumulate(casts, initial=0), strict=False)
        ),
        cached_bytes=sum(casts),
        rebuilt_flops=last.rebuilt_flops + sum(a[0] for a in again),
        rebuilt_seconds=last.rebuilt_seconds + sum(a[1] for a in again),
        rebuilt_collectives=last.rebuilt_collectives + tuple(c for a in again for c in a[2]),
    )


def menu(graph: Graph, walk: Walk, cost: Cost) -> list[Treatment]:
    """Points of one block from "hold everything" to "hold what enters", on the lower convex hull of (bytes, seconds)."""
    saved = sorted(graph.saved())

    def rate(v: int) -> float:
        value = graph.values[v]
        if value.shared or value.maker < 0 or value.num_bytes == 0:
            return float("inf")
        return cost(graph, graph.ops[value.maker]) / value.num_bytes

    order = sorted((v for v in saved if rate(v) != float("inf")), key=rate)
    points = [keep_all(graph, walk)]
    kept = set(saved)
    for v in order:
        kept.discard(v)
        points.append(keep_some(graph, walk, frozenset(kept), cost))
    points.append(rebuild_block(graph, walk, cost))
    return lower_hull(points)


def lower_hull(points: list[Treatment]) -> list[Treatment]:
    """The points that no mixture of two others beats, from most bytes to fewest."""
    ordered = sorted(points, key=lambda p: (-p.kept_bytes, p.rebuilt_seconds))
    hull: list[Treatment] = []
    for point in ordered:
        if hull and point.kept_bytes == hull[-1].kept_bytes:
            continue
        while len(hull) >= 2 and _above(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    while len(hull) > 1 and hull[0].rebuilt_seconds > hull[1].rebuilt_seconds:
        hull.pop(0)
    return hull


def _above(a: Treatment, b: Treatment, c: Treatment) -> bool:
    """Whether b lies on or above the line from a to c."""
    left = (b.rebuilt_seconds - a.rebuilt_seconds) * (a.kept_bytes - c.kept_bytes)
    right = (c.rebuilt_seconds - a.rebuilt_seconds) * (a.kept_bytes - b.kept_bytes)
    return left >= right


def treatments(graphs: list[Graph], walks: dict[int, Walk], policy: Policy, cost: Cost) -> list[tuple[int, Treatment]]:
    """(blocks, treatment) in order for the blocks of one stack on one rank; a segment of several blocks is one entry."""
    if policy.kind in ("full", "every", "sqrt"):
        length = segment_length(policy, len(graphs))
        return _segments(graphs, walks, length, cost)
    made: dict[tuple[int, bool], Treatment] = {}
    result: list[tuple[int, Treatment]] = []
    for number, graph in enumerate(graphs):
        rebuilt = (
            policy.kind in ("selective", "sac", "save")
            or (policy.kind == "first" and number < policy.number)
            or (policy.kind == "nth" and number % policy.number == 0)
        )
        key = (id(graph), rebuilt)
        if key not in made:
            walk = walks[id(graph)]
            if not rebuilt:
                made[key] = keep_all(graph, walk)
            elif policy.kind in ("first", "nth"):
                made[key] = rebuild_block(graph, walk, cost)
            elif policy.kind == "save":
                made[key] = keep_some(graph, walk, results_kept(graph, policy.modules), cost)
            elif policy.kind == "sac":
                made[key] = keep_some(graph, walk, products_kept(graph, policy.number), cost)
            else:
                made[key] = keep_some(graph, walk, selective_kept(graph, policy.modules), cost)
        result.append((1, made[key]))
    return result


def _segments(graphs: list[Graph], walks: dict[int, Walk], length: int, cost: Cost) -> list[tuple[int, Treatment]]:
    made: dict[tuple[int, ...], Treatment] = {}
    result: list[tuple[int, Treatment]] = []
    for start in range(0, len(graphs), length):
        part = graphs[start : start + length]
        key = tuple(id(g) for g in part)
        if key not in made:
            made[key] = segment(part, [walks[id(g)] for g in part], cost)
        result.append((len(part), made[key]))
    return result
