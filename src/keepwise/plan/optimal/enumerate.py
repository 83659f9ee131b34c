"""The complete menu of a stage: every set that it can hold, retain and leave to windows, priced at once with NumPy.

*Family.* A stage holds a set K from forward, one replay at the start of its backward retains X, and leaf windows over any partition
of its reading nodes serve the rest from A = K + X. All pairs K <= A and all partitions are compared:

1. recipes of all sets A at once: an op is needed if something that needs it is needed and not in A (one pass over the ops,
   backwards, a bit vector over the sets each);
2. time and peak of the window over the nodes i..j, for all A (n^2 / 2 of them);
3. for each limit on the peak, a shortest path through the nodes, for all A;
4. for each K, the best A above it, the replay of X included.

*Small storages* (statistics of a norm, log-sum-exp) are taken as held; together they are below `SMALL_SHARE` of the stage. In the
*bound* those weigh nothing that a replay makes anyway, nothing is charged for the outer replay's temporaries, and what a window
reads is charged to its last saved read only; hence it is at most the optimum of the family. Copies of small leaves are
counted for the empty set alone: other sets that differ in them would be points of their own, more than those bytes are worth. The
*menu* is priced exactly by `StageProblem.evaluate`.

Complexity: ops x nodes^2 x 2^storages bit operations. Above `MAX_SETS` sets, those are left out that an option of the search menu
beats however they are partitioned (`relaxed.worthwhile`); above `MAX_PAIRS` pairs, X has at most two storages.

A stage with more than `MAX_STORAGES` large storages is not enumerated, but in pieces (`pieces`). Where it does not fall into pieces,
`relaxed_bounds` bounds it by running each op once and by what its nodes need at least at once, the smaller storages being free: valid
for any schedule of the stage, but weak.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from keepwise.plan.optimal.arrays import MAX_STORAGES, Sets, StageArrays, Vector, all_sets, small_storages
from keepwise.plan.optimal.dominance import Point, dominant, undominated_apart
from keepwise.plan.optimal.options import Choice, Option, Partition, StageProblem
from keepwise.plan.optimal.relaxed import worthwhile
from keepwise.plan.optimal.windows import MAX_CHUNK, MAX_SETS, Outer, Windows

MAX_NODES = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumerated:
    """A complete menu and a bound on it."""

    options: list[Option]
    """Exactly priced."""
    bounds: list[Option]
    """Optimistic numbers (no windows): no option of the family beats all of them."""


def enumerate_menu(problem: StageProblem, known: list[Option], *, exact: bool = True) -> Enumerated | None:
    """All of the family; None where the stage is too large.

    Args:
        problem: the stage.
        known: options of the search menu, to leave out what they beat.
        exact: whether to price options; else there are bounds only.
    """
    arrays = StageArrays(problem, most=len(problem.own))
    if is_wide(problem) or not arrays.nodes:
        return None
    sets = all_sets(len(arrays.large))
    if sets.shape[1] > MAX_SETS:
        sets = sets[:, worthwhile(arrays, sets, known)]
        if sets.shape[1] > 4 * MAX_SETS:
            return None
    outer = Outer(arrays, sets)
    return _Menu(arrays, sets, outer, Windows(arrays, sets, outer.peak)).run(exact)


def is_wide(problem: StageProblem) -> bool:
    """Whether a stage has too many large storages or reading nodes to be enumerated."""
    return len(problem.own) - len(small_storages(problem)) > MAX_STORAGES or len(problem.stage.nodes) > MAX_NODES


class _Menu:
    """Step 4, and the exact prices of what is left."""

    def __init__(self, arrays: StageArrays, sets: Sets, outer: Outer, windows: Windows) -> None:
        self.arrays = arrays
        self.sets = sets
        self.outer = outer
        self.windows = windows

    def run(self, exact: bool) -> Enumerated:
        arrays, sets, windows = self.arrays, self.sets, self.windows
        # Where several windows run an op again, what forward sets aside for it is there once.
        size = [self._size(k) for k in range(sets.shape[1])]
        absent = windows.absent
        least = self._with_retained()
        points: list[Point] = []
        for k in range(sets.shape[1]):
            previous = np.inf
            prices = arrays.small_prices(absent, k)
            must, again = sum(b for b, _ in prices), sum(s for _, s in prices)
            for row, (limit, value) in enumerate(zip(windows.limits, least[:, k], strict=True)):
                if value < previous - 1e-12:
                    low = float(windows.lows[row])
                    points.append((float(value), size[k] + must, float(limit), low, k, row))
                    if prices and np.isfinite(again):  # nothing small is held
                        points.append((float(value) + again, size[k], float(limit) - must, low - must, k, row))
                    if len(prices) > 1:  # some are: at least the smallest, and the fastest of the others is made again
                        least_bytes, least_seconds = min(b for b, _ in prices), min(s for _, s in prices)
                        spared = must - least_bytes
                        points.append(
                            (
                                float(value) + least_seconds,
                                size[k] + least_bytes,
                                float(limit) - spared,
                                low - spared,
                                k,
                                row,
                            )
                        )
                    previous = value
        return self._price(undominated_apart(points, sets), exact)

    def _with_retained(self) -> Vector:
        """[limit, set K]: least seconds over all A >= K."""
        best, limits = self.windows.best, self.windows.limits
        edges, above = self.outer.edges, self.outer.above
        least = best.copy()
        chunk = max(1, MAX_CHUNK // len(best))
        k = 0
        while k < self.sets.shape[1]:
            stop = int(np.searchsorted(edges, edges[k] + chunk, side="right")) - 1
            stop = max(stop, k + 1)
            part = slice(edges[k], edges[stop])
            total = best[:, above[part]] + self.outer.seconds[None, part]
            total[limits[:, None] < self.outer.peak[None, part]] = np.inf
            least[:, k:stop] = np.minimum.reduceat(total, edges[k:stop] - edges[k], axis=1)
            k = stop
        return least

    def _best_above(self, k: int, row: int) -> int:
        """The A >= K with the least seconds within a limit; K itself where nothing is better."""
        part = slice(self.outer.edges[k], self.outer.edges[k + 1])
        above = self.outer.above[part]
        total = self.windows.best[row, above] + self.outer.seconds[part]
        total[self.windows.limits[row] < self.outer.peak[part]] = np.inf
        if self.windows.best[row, k] <= total.min() + 1e-12:
            return k
        return int(above[int(total.argmin())])

    def _size(self, k: int) -> float:
        """Bytes that a set leaves in forward, small storages apart."""
        return float(self.arrays.held_bytes @ self.sets[:, k] + self.windows.carried[k])

    def _price(self, points: list[Point], exact: bool) -> Enumerated:
        arrays, problem = self.arrays, self.arrays.problem
        bounds: list[Option] = []
        options: list[Option] = []
        for seconds, size, _, below, k, row in points:
            a = self._best_above(k, row)
            held = frozenset(p for c, p in enumerate(arrays.large) if self.sets[c, k])
            outer = frozenset(p for c, p in enumerate(arrays.large) if self.sets[c, a] and not self.sets[c, k])
            partition = self.windows.partition(a, float(self.windows.limits[row]))
            # What no replay makes is held: such an option is none for a segment that holds nothing.
            mine = held | frozenset(arrays.small) if size > self._size(k) else held
            bounds.append(
                Option(
                    held=mine,
                    windows=(),
                    seconds=seconds,
                    held_bytes=int(
                        size - sum(problem.bytes_of(p) for p in held if problem.storages[p] in problem.stage.outputs)
                    ),
                    peak_bytes=int(below),
                    forward_bytes=problem.forward_peak(held),
                    choice=Choice(held=mine, outer=outer, partition=partition, lasting={}, again={}),
                )
            )
            if exact:
                options.extend(self._variants(held, outer, partition))
        return Enumerated(options=options, bounds=dominant(bounds, limit=100_000))

    def _variants(self, held: frozenset[int], outer: frozenset[int], partition: Partition) -> list[Option]:
        """Exact prices: small storages held, or where a window makes them anyway, retained from there; then `_kept_on`."""
        problem = self.arrays.problem
        small = frozenset(self.arrays.small)
        found: list[Option] = []
        for chosen, retained in ((held | small, outer), (held, outer), (held, outer | small)):
            if held and chosen == held and small:
                continue
            option = problem.evaluate(chosen, retained, partition)
            if option is None:
                continue
            found.append(option)
            lasting = lasting_small(problem, option, partition, small - retained)
            if lasting:
                chosen = chosen - frozenset().union(*lasting.values())
                lighter = problem.evaluate(chosen, retained, partition, lasting)
                if lighter is None:
                    continue
                found.append(lighter)
                option = lighter
            found.extend(self._kept_on(option, chosen, retained, partition, lasting))
        return found

    def _kept_on(
        self,
        option: Option,
        held: frozenset[int],
        outer: frozenset[int],
        partition: Partition,
        lasting: dict[int, frozenset[int]],
    ) -> list[Option]:
        """Options beyond the family: a large storage that a later window makes again is kept on by the first that makes it."""
        problem = self.arrays.problem
        nodes, first = problem.stage.nodes, problem.stage.first
        found: list[Option] = []
        numbered = {
            number: window
            for number, (a, b) in enumerate(partition)
            for window in option.windows
            if nodes[a].first <= first + window.start <= nodes[b].last
        }
        order = sorted(numbered)
        for p in self.arrays.large:
            makers = problem.makers(p)
            users = [n for n in order if makers and makers <= set(numbered[n].ops)]
            if p in held or p in outer or len(users) < 2 or p not in numbered[users[0]].retain:
                continue
            more = dict(lasting)
            more[users[0]] = more.get(users[0], frozenset()) | {p}
            better = problem.evaluate(held, outer, partition, more)
            if better is not None and better.seconds < option.seconds - 1e-12:
                found.append(better)
        return found


def lasting_small(
    problem: StageProblem, option: Option, partition: Partition, small: frozenset[int]
) -> dict[int, frozenset[int]]:
    """Window of the partition -> small storages that it makes anyway before they are read."""
    nodes, first = problem.stage.nodes, problem.stage.first
    made: dict[int, set[int]] = {}
    for p in small:
        makers = problem.makers(p)
        reads = [begin for begin, _ in problem.reads_of[problem.storages[p]]]
        if not makers or not reads:
            continue
        for number, (a, b) in enumerate(partition):
            if nodes[a].first > min(reads):
                break
            ops = [set(w.ops) for w in option.windows if nodes[a].first <= first + w.start <= nodes[b].last]
            if any(makers <= o for o in ops[-1:]):
                made.setdefault(number, set()).add(p)
                break
    return {number: frozenset(found) for number, found in made.items()}
