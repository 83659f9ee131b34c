"""A stage as NumPy arrays, for all sets of its large storages at once: recipes, bytes, the high water of replays.

*Small storages* (statistics of a norm, log-sum-exp) are no part of the sets: together they are below `SMALL_SHARE` of the stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.options import StageProblem

SMALL_SHARE = 0.004
"""Share of a stage's bytes that storages may have together to count as small."""

MAX_STORAGES = 16
"""Above as many large storages nothing is enumerated."""

Sets = npt.NDArray[np.bool_]
Vector = npt.NDArray[np.float64]


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


def all_sets(width: int) -> Sets:
    """[column, set] of all sets of `width` storages."""
    return ((np.arange(1 << width)[None, :] >> np.arange(width)[:, None]) & 1).astype(np.bool_)


class StageArrays:
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
        self.drawn = np.array(
            [0 if o in problem.counted else graph.step.ops[o].rng_bytes for o in self.ops], dtype=np.float64
        )
        elsewhere = {s for o in problem.counted for s in problem.leaves.get(o, ())}
        self.copied = [
            ([i for i, o in enumerate(self.ops) if s in problem.leaves.get(o, ())], float(graph.nbytes[s]))
            for s in sorted({s for found in problem.leaves.values() for s in found} - elsewhere)
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
