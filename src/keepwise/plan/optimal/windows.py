"""What a stage's windows cost, for all sets that may be at hand: leaf windows over partitions of the nodes, and the replay before them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.arrays import Sets, StageArrays, Vector
from keepwise.plan.optimal.options import Partition

MAX_SETS = 2048
MAX_PAIRS = 1_000_000
MAX_EXACT_PAIRS = 200_000

MAX_CHUNK = 1 << 22
"""Numbers that are compared at once."""

MAX_STEPS = 1 << 15
"""Numbers of one step of the shortest paths."""


class Windows:
    """Steps 1 to 3 of `enumerate`: `seconds[limit][set]` of the best partition whose peak is within the limit."""

    def __init__(self, arrays: StageArrays, sets: Sets, peaks: Vector) -> None:
        self.arrays = arrays
        nodes, count = len(arrays.nodes), sets.shape[1]
        self.seconds: dict[tuple[int, int], Vector] = {}
        self.peak: dict[tuple[int, int], Vector] = {}
        need, _ = arrays.closure(arrays.dropped(sets), sets)
        self.absent = arrays.small_absent(need)
        self.carried = arrays.aside(need, sets)
        held = arrays.held_profile(sets)
        for absent, size, at in zip(self.absent, arrays.small_bytes, arrays.small_nodes, strict=True):
            for n in range(max(at, default=-1) + 1):
                held[n] = held[n] + size * absent
        self.head = arrays.head + held[0]
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
        arrays = self.arrays
        count = sets.shape[1]
        last = {c: n for n in range(i, j + 1) for c in arrays.node_reads[n]}
        wanted = [(c, ~sets[c]) for c in last]
        need, seconds = arrays.closure(wanted, sets)
        begun = np.zeros(count, dtype=np.bool_)
        peak = np.zeros(count)
        aside = arrays.aside(need, sets)
        # What is read in this window is made by it, or held although it need not be.
        read = [
            (p, size, absent, max(q for q in at if q <= j))
            for p, size, absent, at in zip(
                arrays.small, arrays.small_bytes, self.absent, arrays.small_nodes, strict=True
            )
            if any(i <= q <= j for q in at)
        ]
        inner = arrays.replay_peak(need, wanted, [p for p, *_ in read]) + aside
        for n in range(i, j + 1):
            fresh = np.zeros(count, dtype=np.bool_)
            for c in arrays.node_reads[n]:
                fresh |= ~sets[c]
            starts = fresh & ~begun
            peak = np.maximum(peak, np.where(starts, arrays.before[n] + held[n] + inner, 0.0))
            begun |= fresh
            now = sum((arrays.nbytes[c] * (where & begun) for c, where in wanted if last[c] >= n), np.zeros(count))
            for _, size, absent, end in read:
                if end >= n:
                    now = now + size * (begun & ~absent)
            peak = np.maximum(peak, arrays.at_node[n] + held[n] + now)
            peak = np.maximum(peak, np.where(starts, arrays.at_first[n] + held[n] + now + aside, 0.0))
            later = sum((arrays.nbytes[c] * (where & begun) for c, where in wanted if last[c] > n), np.zeros(count))
            for _, size, absent, end in read:
                if end > n:
                    later = later + size * (begun & ~absent)
            peak = np.maximum(peak, arrays.after[n] + held[n + 1] + later)
        self.seconds[i, j] = seconds
        self.peak[i, j] = peak

    def partition(self, index: int, limit: float) -> Partition:
        """The best partition of one set within a limit; fewest windows of equals."""
        nodes = len(self.arrays.nodes)
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


class Outer:
    """The replays that make A - K from K when the stage's backward begins.

    Attributes:
        above: numbers of the sets A, one a pair, by K.
        edges: where the pairs of each K begin, and the end.
        seconds: time of each pair's replay.
        peak: what it takes at least, with what is held then; 0 where there are too many pairs to say.
    """

    def __init__(self, arrays: StageArrays, sets: Sets) -> None:
        held, self.above = _pairs(sets)
        self.edges = np.searchsorted(held, np.arange(sets.shape[1] + 1))
        self.seconds = np.empty(len(held))
        self.peak = np.zeros(len(held))
        exact = len(held) <= MAX_EXACT_PAIRS
        before = self._before(arrays, sets) if exact else np.zeros(0)
        size = max(1, MAX_CHUNK // max(len(arrays.ops), 1))
        for first in range(0, len(held), size):
            part = slice(first, first + size)
            start, goal = sets[:, held[part]], sets[:, self.above[part]]
            wanted = [(c, goal[c] & ~start[c]) for c in range(len(start))]
            need, self.seconds[part] = arrays.closure(wanted, start)
            if not exact:
                continue
            node = np.full(start.shape[1], len(arrays.nodes))
            for n in range(len(arrays.nodes) - 1, -1, -1):
                node[~start[arrays.node_reads[n]].all(axis=0)] = n
            used = node < len(arrays.nodes)
            at = np.where(used, node, 0)
            peak = before[at, held[part]] + arrays.replay_peak(need, wanted) + arrays.aside(need, start)
            self.peak[part] = np.where(used & need.any(axis=0), peak, 0.0)

    @staticmethod
    def _before(arrays: StageArrays, sets: Sets) -> Vector:
        """[node, K]: bytes just before the node, or before an earlier one where there are fewer, with K held.

        Where small storages are made again as well, the replay may be needed at an earlier node.
        """
        held = arrays.held_profile(sets)
        return np.minimum.accumulate([arrays.before[n] + held[n] for n in range(len(arrays.nodes))], axis=0)


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
