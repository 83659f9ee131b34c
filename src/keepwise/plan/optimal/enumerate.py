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
beats however they are partitioned (`_worth`); above `MAX_PAIRS` pairs, X has at most two storages.

A stage with more than `MAX_STORAGES` large storages is not enumerated, but in pieces (`pieces`). Where it does not fall into pieces,
`relaxed_bounds` bounds it by running each op once and by what its nodes need at least at once, the smaller storages being free: valid
for any schedule of the stage, but weak.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.menu import dominant
from keepwise.plan.optimal.options import Choice, Option, Partition, StageProblem

SMALL_SHARE = 0.004
"""Share of a stage's bytes that storages may have together to count as small."""

MAX_STORAGES = 16
"""Above as many large storages nothing is enumerated."""

MAX_SETS = 2048
MAX_PAIRS = 1_000_000
MAX_EXACT_PAIRS = 200_000
MAX_NODES = 24
MAX_BOUNDS = 400

MAX_CHUNK = 1 << 22
"""Numbers that are compared at once."""

MAX_STEPS = 1 << 15
"""Numbers of one step of the shortest paths."""

Sets = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]


_Point = tuple[float, float, float, float, int, int]
"""Seconds, held bytes, limit on the peak, the smallest peak that it stands for, number of the held set, number of the limit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enumerated:
    """A complete menu and a bound on it."""

    options: list[Option]
    """Exactly priced."""
    bounds: list[Option]
    """Optimistic numbers (no windows): no option of the family beats all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Relation:
    """An op needs what `makers` make, unless `storage` (a large one, or -1) is at hand."""

    storage: int
    makers: tuple[int, ...]


def small_storages(problem: StageProblem, most: int | None = None) -> list[int]:
    """A stage's own storages that are small together, smallest first; more of them where more than `most` would be left."""
    order = sorted(problem.own, key=problem.bytes_of, reverse=True)
    total = sum(problem.bytes_of(i) for i in order)
    small: list[int] = []
    share = 0
    while order and (
        share + problem.bytes_of(order[-1]) <= SMALL_SHARE * total or (most is not None and len(order) > most)
    ):
        share += problem.bytes_of(order[-1])
        small.append(order.pop())
    return small


class _Tables:
    """A stage as arrays. `large` and `small` are positions in `StageProblem.storages`."""

    def __init__(self, problem: StageProblem, most: int = MAX_STORAGES) -> None:
        self.problem = problem
        graph, stage = problem.graph, problem.stage
        self.small = small_storages(problem, most)
        self.large = sorted(set(problem.own) - set(self.small))
        self.column = {problem.storages[p]: i for i, p in enumerate(self.large)}
        self.free = set(problem.at_hand) | {problem.storages[p] for p in self.small}
        # Views cost nothing and make nothing: whoever needs one needs what made its storage.
        self.ops = [o for o in stage.ops if not graph.step.ops[o].is_view]
        self.op_index = {op: i for i, op in enumerate(self.ops)}
        self.views = set(stage.ops) - set(self.ops)
        self.seconds = np.array([graph.step.ops[o].seconds for o in self.ops])
        self.possible = np.array([graph.step.ops[o].replayable for o in self.ops])
        self.workspace = np.array([graph.step.ops[o].workspace_bytes for o in self.ops], dtype=np.float64)
        self.drawn = np.array([graph.step.ops[o].rng_bytes for o in self.ops], dtype=np.float64)
        self.copied = [
            ([i for i, o in enumerate(self.ops) if s in problem.leaves.get(o, ())], float(graph.nbytes[s]))
            for s in sorted({s for found in problem.leaves.values() for s in found})
        ]
        """Rows of the ops that read each leaf of which forward takes a copy, and its bytes."""
        self.relations: list[list[_Relation]] = [[] for _ in self.ops]
        for i, op in enumerate(self.ops):
            for need in graph.needs(op):
                if need.reference and need.storage in self.free:
                    continue
                if not need.makers:
                    self.possible[i] &= need.copy
                    continue
                makers = self.indices(need.makers)
                if makers is None:
                    self.possible[i] = False
                elif makers:
                    column = self.column.get(need.storage, -1) if need.reference else -1
                    self.relations[i].append(_Relation(storage=column, makers=makers))
        self.nodes = stage.nodes
        self.node_reads = [[self.column[s] for s in n.storages if s in self.column] for n in stage.nodes]
        self.target_makers: list[tuple[int, ...]] = []
        self.can: list[bool] = []
        for p in self.large:
            makers = self.indices(graph.makers(problem.storages[p]) or ())
            self.can.append(bool(makers))
            self.target_makers.append(makers or ())
        self.nbytes = np.array([graph.nbytes[problem.storages[p]] for p in self.large], dtype=np.float64)
        self.held_bytes = np.array([problem.bytes_of(p) for p in self.large], dtype=np.float64)
        reads = [[n for n, columns in enumerate(self.node_reads) if c in columns] for c in range(len(self.large))]
        self.last_node = [max(r, default=-1) for r in reads]
        self.small_makers = [self.indices(graph.makers(problem.storages[p]) or ()) or () for p in self.small]
        self.small_bytes = [float(problem.bytes_of(p)) for p in self.small]
        self.small_nodes = [
            [n for n, x in enumerate(stage.nodes) if problem.storages[p] in x.storages] for p in self.small
        ]
        shared = [problem.storages[p] in stage.shared for p in self.large]
        self.stay = [len(self.nodes) if shared[c] else self.last_node[c] for c in range(len(self.large))]
        self._base()

    def indices(self, ops: Sequence[int]) -> tuple[int, ...] | None:
        """Rows of the ops that are no views; None where one lies outside the stage."""
        if any(o not in self.op_index and o not in self.views for o in ops):
            return None
        return tuple(self.op_index[o] for o in ops if o in self.op_index)

    def _base(self) -> None:
        """Highest base in each node, at its first moment and in the gap after it, inputs included; base just before each node."""
        problem, stage = self.problem, self.problem.stage
        level = problem.base.astype(np.float64).copy()
        before = problem.between.astype(np.float64).copy()
        for s in stage.inputs:
            end = problem.last_need(s)
            level[: end + 1 - stage.first] += problem.cost(s)
            before[: end + 1 - stage.first] += problem.cost(s)
        self.at_node: list[float] = []
        self.at_first: list[float] = []
        self.after: list[float] = []
        self.before: list[float] = []
        for i, node in enumerate(self.nodes):
            stop = self.nodes[i + 1].first if i + 1 < len(self.nodes) else stage.last + 1
            self.at_node.append(float(level[node.first - stage.first : node.last + 1 - stage.first].max()))
            self.at_first.append(float(level[node.first - stage.first]))
            gap = level[node.last + 1 - stage.first : stop - stage.first]
            self.after.append(float(gap.max()) if len(gap) else 0.0)
            self.before.append(float(before[node.first - stage.first]))
        head = level[: self.nodes[0].first - stage.first] if self.nodes else level
        self.head = float(head.max()) if len(head) else 0.0

    def held_profile(self, sets: Sets) -> list[Vector]:
        """Bytes of the sets that are still needed at each node, and (last) all of them."""
        size = self.held_bytes[:, None] * sets
        return [
            sum((size[c] for c in range(len(self.large)) if self.stay[c] >= n), np.zeros(sets.shape[1]))
            for n in range(len(self.nodes) + 1)
        ]

    def closure(self, wanted: Sequence[tuple[int, Sets]], sets: Sets) -> tuple[Sets, Vector]:
        """Ops that rebuild the wanted columns (where the bit vector says so) from each set, and their seconds."""
        count = sets.shape[1]
        need = np.zeros((len(self.seconds), count), dtype=np.bool_)
        impossible = np.zeros(count, dtype=np.bool_)
        for column, where in wanted:
            if not self.can[column]:
                impossible |= where
            for m in self.target_makers[column]:
                need[m] |= where
        for i in range(len(self.seconds) - 1, -1, -1):
            here = need[i]
            if not here.any():
                continue
            if not self.possible[i]:
                impossible |= here
            for relation in self.relations[i]:
                where = here if relation.storage < 0 else here & ~sets[relation.storage]
                for m in relation.makers:
                    need[m] |= where
        seconds = self.seconds @ need
        seconds[impossible] = np.inf
        return need, seconds

    def aside(self, need: Sets, held: Sets) -> Vector:
        """Bytes that forward sets aside for the needed ops: what they draw, and where nothing is held the leaves that they read."""
        found = self.drawn @ need
        bare = np.flatnonzero(~held.any(axis=0))
        for rows, nbytes in self.copied if len(bare) else ():
            found[bare] += nbytes * need[rows][:, bare].any(axis=0)
        return found

    def dropped(self, sets: Sets) -> list[tuple[int, Sets]]:
        """Columns that some replay makes, where they are not in the sets."""
        return [(c, ~sets[c]) for c in range(len(self.large)) if self.last_node[c] >= 0]

    def small_absent(self, need: Sets) -> list[Sets]:
        """For each small storage the sets beside which no replay makes it, so that it is held or costs a replay of its own.

        Args:
            need: the ops that rebuild all that is not in the sets.
        """
        return [np.logical_not(np.asarray(need[list(rows)].any(axis=0))) for rows in self.small_makers]

    def small_prices(self, absent: Sequence[Sets], k: int) -> list[tuple[float, float]]:
        """(bytes, seconds) of holding the absent small storages or making them again, by the op that makes them, for one set."""
        groups: dict[tuple[int, ...], float] = {}
        for rows, size, where in zip(self.small_makers, self.small_bytes, absent, strict=True):
            if where[k]:
                groups[rows] = groups.get(rows, 0.0) + size
        return [(size, float(self.seconds[list(rows)].sum()) if rows else np.inf) for rows, size in groups.items()]

    def replay_peak(self, need: Sets, retained: Sequence[tuple[int, Sets]], small: Sequence[int] = ()) -> Vector:
        """High water of each set's replay: its own storages and workspace.

        Args:
            need: the ops that it runs.
            retained: columns that it retains, and for which sets.
            small: positions of small storages that it retains where it makes them.
        """
        graph = self.problem.graph
        keep = dict(retained)
        kept = {self.problem.storages[p] for p in small}
        names: dict[int, int] = {}
        born: list[int] = []
        size: list[float] = []
        for i, op in enumerate(self.ops):
            for s in graph.made_by[op]:
                names[s] = len(born)
                born.append(i)
                size.append(float(graph.nbytes[s]))
        count = need.shape[1]
        alive = np.zeros((len(born), count), dtype=np.bool_)
        for s, row in names.items():
            column = self.column.get(s)
            if column is not None and column in keep:
                alive[row] = keep[column]
            elif s in kept:
                alive[row] = True
        peak = np.zeros(count)
        weights = np.array(size)
        born_at = np.array(born)
        for i in range(len(self.ops) - 1, -1, -1):
            here = need[i]
            if not here.any():
                continue
            for need_ in graph.needs(self.ops[i]):
                row = names.get(need_.storage)
                if row is not None:
                    alive[row] |= here & need[born[row]]
            for s in graph.step.ops[self.ops[i]].writes:
                row = names.get(s)
                if row is not None:
                    alive[row] |= here
            own = [names[s] for s in graph.made_by[self.ops[i]]]
            rows = born_at <= i
            live = (weights[rows, None] * (alive[rows] & need[born_at[rows]])).sum(axis=0)
            for row in own:
                live += weights[row] * (~alive[row])
            peak = np.maximum(peak, np.where(here, live + self.workspace[i], 0.0))
        return peak


def enumerate_menu(problem: StageProblem, known: list[Option], *, exact: bool = True) -> Enumerated | None:
    """All of the family; None where the stage is too large.

    Args:
        problem: the stage.
        known: options of the search menu, to leave out what they beat.
        exact: whether to price options; else there are bounds only.
    """
    tables = _Tables(problem, most=len(problem.own))
    if is_wide(problem) or not tables.nodes:
        return None
    sets = _all_sets(len(tables.large))
    if sets.shape[1] > MAX_SETS:
        sets = sets[:, _worth(tables, sets, known)]
        if sets.shape[1] > 4 * MAX_SETS:
            return None
    outer = _Outer(tables, sets)
    return _Menu(tables, sets, outer, _Windows(tables, sets, outer.peak)).run(exact)


def is_wide(problem: StageProblem) -> bool:
    """Whether a stage has too many large storages or reading nodes to be enumerated."""
    return len(problem.own) - len(small_storages(problem)) > MAX_STORAGES or len(problem.stage.nodes) > MAX_NODES


def relaxed_bounds(problem: StageProblem) -> list[Option]:
    """Optimistic options of a stage that is too large to enumerate: no schedule of it beats all of them."""
    tables = _Tables(problem)
    sets = _all_sets(len(tables.large))
    least, size, low = _relaxed(tables, sets)
    low = np.maximum(low, problem.gap_bytes) if not len(tables.nodes) else low
    order = np.lexsort((low, size, least))
    order = order[np.isfinite(least[order])]
    points = undominated([(float(least[k]), float(size[k]), float(low[k]), float(low[k]), int(k), 0) for k in order])
    return [
        Option(
            held=frozenset(p for c, p in enumerate(tables.large) if sets[c, k]),
            windows=(),
            seconds=seconds,
            held_bytes=int(nbytes),
            peak_bytes=int(peak),
            forward_bytes=int(problem.front.max()),
        )
        for seconds, nbytes, peak, _, k, _ in _thinned(points)
    ]


def _all_sets(width: int) -> Sets:
    """[column, set] of all sets of `width` storages."""
    return ((np.arange(1 << width)[None, :] >> np.arange(width)[:, None]) & 1).astype(np.bool_)


def _thinned(points: list[_Point]) -> list[_Point]:
    """At most `MAX_BOUNDS` points, each at most what it stands for; a set that holds nothing stays by itself."""
    alone = [p for p in points if p[4] == 0]
    rest = [p for p in points if p[4] != 0]
    stride = -(-len(rest) // MAX_BOUNDS) if rest else 1
    groups = [rest[i : i + stride] for i in range(0, len(rest), stride)]
    merged = [
        (min(p[0] for p in g), min(p[1] for p in g), min(p[2] for p in g), min(p[3] for p in g), g[0][4], 0)
        for g in groups
    ]
    return [*alone, *merged]


def _relaxed(tables: _Tables, sets: Sets) -> tuple[Vector, Vector, Vector]:
    """Seconds, held bytes and peak that each held set has at least, whatever its windows."""
    need, least = tables.closure(tables.dropped(sets), sets)
    held = tables.held_profile(sets)
    low = tables.head + held[0]
    for n in range(len(tables.nodes)):
        dropped = sum((tables.nbytes[c] * ~sets[c] for c in tables.node_reads[n]), np.zeros(sets.shape[1]))
        low = np.maximum(low, tables.at_node[n] + held[n] + dropped)
    outputs = np.array([tables.problem.storages[p] not in tables.problem.stage.outputs for p in tables.large])
    size = (tables.held_bytes * outputs) @ sets if len(outputs) else np.zeros(sets.shape[1])
    return least, size + tables.drawn @ need, low


def _worth(tables: _Tables, sets: Sets, known: list[Option]) -> npt.NDArray[np.intp]:
    """Sets that no known option beats in (seconds, bytes, peak), whatever their windows: indices."""
    least, size, low = _relaxed(tables, sets)
    beaten = np.isinf(least)
    for option in known:
        beaten |= (option.seconds <= least) & (option.held_bytes <= size) & (option.peak_bytes <= low)
    return np.flatnonzero(~beaten)


class _Windows:
    """Steps 1 to 3 for all sets: `seconds[limit][set]` of the best partition whose peak is within the limit."""

    def __init__(self, tables: _Tables, sets: Sets, peaks: Vector) -> None:
        self.tables = tables
        nodes, count = len(tables.nodes), sets.shape[1]
        self.seconds: dict[tuple[int, int], Vector] = {}
        self.peak: dict[tuple[int, int], Vector] = {}
        need, _ = tables.closure(tables.dropped(sets), sets)
        self.absent = tables.small_absent(need)
        self.carried = tables.aside(need, sets)
        held = tables.held_profile(sets)
        for absent, size, at in zip(self.absent, tables.small_bytes, tables.small_nodes, strict=True):
            for n in range(max(at, default=-1) + 1):
                held[n] = held[n] + size * absent
        self.head = tables.head + held[0]
        for i in range(nodes):
            for j in range(i, nodes):
                self._window(i, j, sets, held)
        every = values = np.unique(np.concatenate([self.head, peaks, *self.peak.values()]))
        most = 400 if count <= 2 * MAX_SETS else 100
        if len(values) > most:
            values = np.unique(np.quantile(values, np.linspace(0, 1, most), method="higher"))
        self.limits = values
        self.lows = every[
            np.minimum(np.searchsorted(every, np.concatenate([[-np.inf], values[:-1]]), side="right"), len(every) - 1)
        ]
        self.best = np.full((len(values), count), np.inf)
        size = max(1, MAX_STEPS // count)
        for first in range(0, len(values), size):
            limits = values[first : first + size, None]
            reach = np.full((nodes + 1, len(limits), count), np.inf)
            reach[0] = np.where(self.head <= limits, 0.0, np.inf)
            for i in range(nodes):
                for j in range(i, nodes):
                    step = reach[i] + self.seconds[i, j]
                    step[self.peak[i, j] > limits] = np.inf
                    np.minimum(reach[j + 1], step, out=reach[j + 1])
            self.best[first : first + size] = reach[nodes]

    def _window(self, i: int, j: int, sets: Sets, held: list[Vector]) -> None:
        tables = self.tables
        count = sets.shape[1]
        last = {c: n for n in range(i, j + 1) for c in tables.node_reads[n]}
        wanted = [(c, ~sets[c]) for c in last]
        need, seconds = tables.closure(wanted, sets)
        begun = np.zeros(count, dtype=np.bool_)
        peak = np.zeros(count)
        aside = tables.aside(need, sets)
        # What is read in this window is made by it, or held although it need not be.
        read = [
            (p, size, absent, max(q for q in at if q <= j))
            for p, size, absent, at in zip(
                tables.small, tables.small_bytes, self.absent, tables.small_nodes, strict=True
            )
            if any(i <= q <= j for q in at)
        ]
        inner = tables.replay_peak(need, wanted, [p for p, *_ in read]) + aside
        for n in range(i, j + 1):
            fresh = np.zeros(count, dtype=np.bool_)
            for c in tables.node_reads[n]:
                fresh |= ~sets[c]
            starts = fresh & ~begun
            peak = np.maximum(peak, np.where(starts, tables.before[n] + held[n] + inner, 0.0))
            begun |= fresh
            now = sum((tables.nbytes[c] * (where & begun) for c, where in wanted if last[c] >= n), np.zeros(count))
            for _, size, absent, end in read:
                if end >= n:
                    now = now + size * (begun & ~absent)
            peak = np.maximum(peak, tables.at_node[n] + held[n] + now)
            peak = np.maximum(peak, np.where(starts, tables.at_first[n] + held[n] + now + aside, 0.0))
            later = sum((tables.nbytes[c] * (where & begun) for c, where in wanted if last[c] > n), np.zeros(count))
            for _, size, absent, end in read:
                if end > n:
                    later = later + size * (begun & ~absent)
            peak = np.maximum(peak, tables.after[n] + held[n + 1] + later)
        self.seconds[i, j] = seconds
        self.peak[i, j] = peak

    def partition(self, index: int, limit: float) -> Partition:
        """The best partition of one set within a limit; fewest windows of equals."""
        nodes = len(self.tables.nodes)
        reach: list[tuple[float, int, int]] = [(0.0, 0, -1)] + [(float("inf"), 0, -1)] * nodes
        for j in range(nodes):
            for i in range(j + 1):
                if self.peak[i, j][index] <= limit:
                    label = (reach[i][0] + float(self.seconds[i, j][index]), reach[i][1] + 1, i)
                    reach[j + 1] = min(reach[j + 1], label)
        path: list[tuple[int, int]] = []
        at = nodes
        while at > 0:
            start = reach[at][2]
            assert start >= 0, "the limit admits a partition"
            path.append((start, at - 1))
            at = start
        return tuple(reversed(path))


class _Outer:
    """The replays that make A - K from K when the stage's backward begins.

    Attributes:
        above: numbers of the sets A, one a pair, by K.
        edges: where the pairs of each K begin, and the end.
        seconds: time of each pair's replay.
        peak: what it takes at least, with what is held then; 0 where there are too many pairs to say.
    """

    def __init__(self, tables: _Tables, sets: Sets) -> None:
        held, self.above = _pairs(sets)
        self.edges = np.searchsorted(held, np.arange(sets.shape[1] + 1))
        self.seconds = np.empty(len(held))
        self.peak = np.zeros(len(held))
        exact = len(held) <= MAX_EXACT_PAIRS
        before = self._before(tables, sets) if exact else np.zeros(0)
        size = max(1, MAX_CHUNK // max(len(tables.ops), 1))
        for first in range(0, len(held), size):
            part = slice(first, first + size)
            start, goal = sets[:, held[part]], sets[:, self.above[part]]
            wanted = [(c, goal[c] & ~start[c]) for c in range(len(start))]
            need, self.seconds[part] = tables.closure(wanted, start)
            if not exact:
                continue
            node = np.full(start.shape[1], len(tables.nodes))
            for n in range(len(tables.nodes) - 1, -1, -1):
                node[~start[tables.node_reads[n]].all(axis=0)] = n
            used = node < len(tables.nodes)
            at = np.where(used, node, 0)
            peak = before[at, held[part]] + tables.replay_peak(need, wanted) + tables.aside(need, start)
            self.peak[part] = np.where(used & need.any(axis=0), peak, 0.0)

    @staticmethod
    def _before(tables: _Tables, sets: Sets) -> Vector:
        """[node, K]: bytes just before the node, or before an earlier one where there are fewer, with K held.

        Where small storages are made again as well, the replay may be needed at an earlier node.
        """
        held = tables.held_profile(sets)
        return np.minimum.accumulate([tables.before[n] + held[n] for n in range(len(tables.nodes))], axis=0)


def _pairs(sets: Sets) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """All (K, A) with K <= A, by K; where there are too many, those that differ by at most two."""
    width, count = sets.shape
    codes = (sets * (1 << np.arange(width, dtype=np.int64))[:, None]).sum(axis=0)
    held: list[npt.NDArray[np.intp]] = []
    above: list[npt.NDArray[np.intp]] = []
    for k in range(count):
        found = np.flatnonzero((codes & codes[k]) == codes[k])
        held.append(np.full(len(found), k))
        above.append(found)
    pairs = np.concatenate(held), np.concatenate(above)
    if len(pairs[0]) <= MAX_PAIRS:
        return pairs
    weight = sets.sum(axis=0)
    few = weight[pairs[1]] - weight[pairs[0]] <= 2
    return pairs[0][few], pairs[1][few]


class _Menu:
    """Step 4, and the exact prices of what is left."""

    def __init__(self, tables: _Tables, sets: Sets, outer: _Outer, windows: _Windows) -> None:
        self.tables = tables
        self.sets = sets
        self.outer = outer
        self.windows = windows

    def run(self, exact: bool) -> Enumerated:
        tables, sets, windows = self.tables, self.sets, self.windows
        # Where several windows run an op again, what forward sets aside for it is there once.
        size = [self._size(k) for k in range(sets.shape[1])]
        absent = windows.absent
        least = self._with_retained()
        points: list[_Point] = []
        for k in range(sets.shape[1]):
            previous = np.inf
            prices = tables.small_prices(absent, k)
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
        bare = [p for p in points if not sets[:, p[4]].any()]
        others = [p for p in points if sets[:, p[4]].any()]
        # What nothing is held for is compared with its like only: segments need those.
        return self._price([*undominated(bare), *undominated(others)], exact)

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
        return float(self.tables.held_bytes @ self.sets[:, k] + self.windows.carried[k])

    def _price(self, points: list[_Point], exact: bool) -> Enumerated:
        tables, problem = self.tables, self.tables.problem
        bounds: list[Option] = []
        options: list[Option] = []
        for seconds, size, _, below, k, row in points:
            a = self._best_above(k, row)
            held = frozenset(p for c, p in enumerate(tables.large) if self.sets[c, k])
            outer = frozenset(p for c, p in enumerate(tables.large) if self.sets[c, a] and not self.sets[c, k])
            partition = self.windows.partition(a, float(self.windows.limits[row]))
            # What no replay makes is held: such an option is none for a segment that holds nothing.
            mine = held | frozenset(tables.small) if size > self._size(k) else held
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
        problem = self.tables.problem
        small = frozenset(self.tables.small)
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
        problem = self.tables.problem
        nodes, first = problem.stage.nodes, problem.stage.first
        found: list[Option] = []
        numbered = {
            number: window
            for number, (a, b) in enumerate(partition)
            for window in option.windows
            if nodes[a].first <= first + window.start <= nodes[b].last
        }
        order = sorted(numbered)
        for p in self.tables.large:
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


def undominated(points: list[_Point]) -> list[_Point]:
    """Points that no other beats in (seconds, bytes, limit)."""
    points = sorted(points)
    kept: list[_Point] = []
    size = np.empty(len(points))
    limit = np.empty(len(points))
    for p in points:
        n = len(kept)
        if n and bool(((size[:n] <= p[1]) & (limit[:n] <= p[2])).any()):
            continue
        size[n], limit[n] = p[1], p[2]
        kept.append(p)
    return kept
