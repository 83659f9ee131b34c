"""The menu of a stage: options that no other beats in time, held bytes and peak, found by search.

1. *Sets*: beginning with everything held, the storage whose loss costs least time a byte is dropped, one after the other;
   each set is then improved by exchanging single storages. The sets on the way are what a stage may hold, or retain at
   its first replay.
2. *Partitions*: for each set, the leaf windows are a path through the reading nodes; labels (time, peak) that no other
   beats.
3. *Pairs*: of two sets, the smaller one is held from forward and the difference is retained by one replay when backward
   begins.

It is a search, not a proof.
"""

from __future__ import annotations

import itertools

from keepwise.plan.optimal.dominance import dominant
from keepwise.plan.optimal.options import Option, StageProblem

MAX_GROUPS = 16
"""Reading nodes are joined to at most as many groups before they are partitioned."""

MAX_SETS = 48


def search_menu(problem: StageProblem, *, pairs: bool = True) -> list[Option]:
    """Options of a stage; never empty (holding everything is always one).

    Args:
        problem: the stage.
        pairs: whether to look at pairs of sets; else nothing is retained by a first replay.
    """
    groups = _groups(problem)
    everything = frozenset(problem.own)
    whole = ((groups[0][0], groups[-1][1]),) if groups else ()
    plain = problem.evaluate(everything, frozenset(), whole)
    assert plain is not None, "holding everything needs no recipe"
    sets = _sets(problem, everything, whole)
    found: list[Option] = [plain]
    labels = {s: _partitions(problem, s, groups) for s in sets}
    for larger in sets:
        for smaller in sets:
            if not smaller <= larger or not (pairs or smaller == larger):
                continue
            for partition in labels[larger]:
                option = problem.evaluate(smaller, larger - smaller, partition)
                if option is not None:
                    found.append(option)
    return dominant(found)


def _groups(problem: StageProblem) -> list[tuple[int, int]]:
    count = len(problem.stage.nodes)
    if count <= MAX_GROUPS:
        return [(i, i) for i in range(count)]
    edges = [round(i * count / MAX_GROUPS) for i in range(MAX_GROUPS + 1)]
    return [(a, b - 1) for a, b in itertools.pairwise(edges)]


def _sets(
    problem: StageProblem, everything: frozenset[int], whole: tuple[tuple[int, int], ...]
) -> list[frozenset[int]]:
    """Sets on the way from everything to nothing, each improved by single exchanges."""
    price_cache: dict[frozenset[int], float] = {}

    def seconds(held: frozenset[int]) -> float:
        if held not in price_cache:
            hand = set(problem.at_hand) | {problem.storages[i] for i in held}
            wanted = {s for n in problem.stage.nodes for s in n.storages if s not in hand}
            ops = problem.recipe(wanted, hand)
            price_cache[held] = float("inf") if ops is None else problem.graph.seconds(ops)
        return price_cache[held]

    size = {i: max(problem.bytes_of(i), 1) for i in everything}
    path = [everything]
    current = everything
    while current:
        best = min(current, key=lambda i: (max(seconds(current - {i}) - seconds(current), 0.0) + 1e-12) / size[i])
        if seconds(current - {best}) == float("inf"):
            break
        current = current - {best}
        path.append(current)
    improved: list[frozenset[int]] = []
    for a, b in itertools.pairwise(path):
        freed = sum(size[i] for i in a) - sum(size[i] for i in b)
        price = max(seconds(b) - seconds(a), 0.0) / max(freed, 1)
        improved.append(_exchange(b, everything, price, size, seconds))
    unique = list(dict.fromkeys([*path, *improved, frozenset()]))
    unique = [s for s in unique if seconds(s) < float("inf")]
    if len(unique) > MAX_SETS:
        stride = len(unique) / MAX_SETS
        unique = [unique[int(i * stride)] for i in range(MAX_SETS)]
    return unique


def _exchange(
    start: frozenset[int], everything: frozenset[int], price: float, size: dict[int, int], seconds
) -> frozenset[int]:
    def total(held: frozenset[int]) -> float:
        return seconds(held) + price * sum(size[i] for i in held)

    current, value = start, total(start)
    while True:
        steps = [current ^ {i} for i in everything]
        best = min(steps, key=total)
        if total(best) >= value - 1e-15:
            return current
        current, value = best, total(best)


def _partitions(
    problem: StageProblem, at_hand: frozenset[int], groups: list[tuple[int, int]]
) -> list[tuple[tuple[int, int], ...]]:
    """Partitions of the nodes into windows that no other beats in (seconds, peak), by labels along the nodes."""
    stage = problem.stage
    hand = set(problem.at_hand) | {problem.storages[i] for i in at_hand}
    if not groups or not any(s not in hand for n in stage.nodes for s in n.storages):
        return [((groups[0][0], groups[-1][1]),)] if groups else [()]
    held = problem.base.copy()
    before = problem.between.copy()
    for s in (*problem.inputs, *(problem.storages[i] for i in at_hand)):
        end = problem.last_need(s)
        held[: end + 1 - stage.first] += problem.cost(s)
        before[: end + 1 - stage.first] += problem.cost(s)
    labels: list[list[tuple[float, int, tuple[tuple[int, int], ...]]]] = [[] for _ in range(len(groups) + 1)]
    labels[0] = [(0.0, 0, ())]
    for i in range(len(groups)):
        if not labels[i]:
            continue
        for j in range(i, len(groups)):
            a, b = groups[i][0], groups[j][1]
            priced = _window(problem, a, b, hand, held, before)
            if priced is None:
                continue
            seconds, peak = priced
            labels[j + 1].extend((t + seconds, max(p, peak), (*path, (a, b))) for t, p, path in labels[i])
        labels[i + 1] = _best(labels[i + 1])
    return [path for _, _, path in _best(labels[-1])]


def _window(problem: StageProblem, a: int, b: int, hand: set[int], held, before) -> tuple[float, int] | None:
    """(seconds, peak bytes in its span) of one leaf window."""
    graph, stage = problem.graph, problem.stage
    wanted: dict[int, int] = {}
    start = -1
    for node in stage.nodes[a : b + 1]:
        for s in node.storages:
            if s not in hand:
                wanted[s] = node.last
                if start < 0:
                    start = node.first
    low = stage.nodes[a].first - stage.first
    high = (stage.nodes[b + 1].first if b + 1 < len(stage.nodes) else stage.last + 1) - stage.first
    profile = held[low:high].copy()
    if not wanted:
        return 0.0, int(profile.max())
    ops = problem.recipe(wanted, hand)
    if ops is None:
        return None
    for s, last in wanted.items():
        profile[start - stage.first - low : last + 1 - stage.first - low] += graph.nbytes[s]
    peak = int(before[start - stage.first]) + graph.replay_peak(ops, hand, wanted)
    return graph.seconds(ops), max(peak, int(profile.max()))


def _best(
    labels: list[tuple[float, int, tuple[tuple[int, int], ...]]], limit: int = 24
) -> list[tuple[float, int, tuple[tuple[int, int], ...]]]:
    kept: list[tuple[float, int, tuple[tuple[int, int], ...]]] = []
    lowest = None
    for label in sorted(labels, key=lambda x: (x[0], x[1], len(x[2]))):
        if lowest is None or label[1] < lowest:
            kept.append(label)
            lowest = label[1]
    if len(kept) > limit:
        stride = (len(kept) - 1) / (limit - 1)
        kept = [kept[round(i * stride)] for i in range(limit)]
    return kept
