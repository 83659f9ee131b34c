"""A bound over all schedules, whatever their windows: what must be held or made again, and what can be held at once.

    k[s]    storage s is held from forward (binary)
    y[o]    forward op o is replayed at least once (binary)
    minimise     sum of seconds(o) y[o]
    s is read by backward:   k[s] + y[o] >= 1            for each op o that makes s
    input u of o:            k[u] + y[p] >= y[o]         for each op p that makes u
    at each moment of forward, and when backward begins:
        base + bytes held of what was born by then <= budget

Each schedule that `simulate` accepts gives a point of this program that costs no more: a replay needs its inputs held or made again,
and what is held from forward is live from its birth until backward reads it. Windows, the memory of replays, and ops that are
replayed more than once are left out. Hence it is valid for every schedule, and weak where memory is scarce in backward. HiGHS's dual
bound is returned, so that a time limit costs strength, never validity.
"""

from __future__ import annotations

import itertools
import os
import sys

import highspy
import numpy as np

from keepwise.ir import NO_OP, Phase, Step
from keepwise.plan.optimal.graph import Graph


def bound_over_all_schedules(step: Step, budget_bytes: int, *, time_limit: float = 10.0) -> float:
    """Seconds that every schedule within the budget adds at least; infinite where none can hold even what is needed.

    Args:
        step: a steady training step.
        budget_bytes: bound on the peak of the whole step.
        time_limit: seconds for the solver.
    """
    program = _Program(Graph(step), budget_bytes)
    return program.solve(time_limit)


class _Program:
    """The mixed-integer program. Columns are the storages that may be held, then the ops."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        self.graph = graph
        self.budget = budget_bytes
        self.ops = sorted({o for run in graph.passes for o in run})
        self.starts = _backward_starts(graph.step, self.ops)
        self.column: dict[int, int] = {}
        self.rows: list[tuple[dict[int, float], float, float]] = []
        made = [s for o in self.ops for s in graph.made_by[o]]
        for s in made:
            self.column[s] = len(self.column)
        self.op_column = {o: len(self.column) + i for i, o in enumerate(self.ops)}
        self._needs()
        self._memory()

    def _free(self, storage: int) -> bool:
        """Whether a replay finds it without anyone's help: a leaf, or alive when backward begins for other reasons."""
        graph = self.graph
        if storage not in self.column:
            return True
        return storage not in graph.droppable and graph.step.storages[storage].death >= self._start(storage)

    def _start(self, storage: int) -> int:
        return self.starts[self.graph.step.storages[storage].birth]

    def _needs(self) -> None:
        graph = self.graph
        for s in self.column:
            if s in graph.droppable and graph.reads[s]:
                for o in graph.makers(s) or ():
                    self._at_least({self.column[s]: 1.0, self.op_column[o]: 1.0}, 1.0)
        for o in self.ops:
            for need in graph.needs(o):
                if self._free(need.storage):
                    continue
                for p in need.makers:
                    if p in self.op_column and p != o:
                        row = {self.op_column[o]: -1.0, self.op_column[p]: 1.0}
                        row[self.column[need.storage]] = 1.0
                        self._at_least(row, 0.0)

    def _at_least(self, row: dict[int, float], low: float) -> None:
        self.rows.append((row, low, highspy.kHighsInf))

    def _memory(self) -> None:
        """Rows for the moments at which the base is higher than at any later one of the same forward pass, and its end."""
        graph, step = self.graph, self.graph.step
        for run in graph.passes:
            start = self.starts[run[0]]
            born = [(o, s) for o in run for s in graph.made_by[o]]
            moments: list[int] = []
            highest = -1
            for m in (start, *reversed(run)):
                if m < graph.num_moments and graph.base[m] > highest:
                    highest = int(graph.base[m])
                    moments.append(m)
            for m in moments:
                row = {}
                for o, s in born:
                    until = step.storages[s].held_until if s in graph.droppable else step.storages[s].death
                    lasting = not graph.reads[s] or graph.last_read[s] >= m
                    if o <= m and until < m and lasting and graph.nbytes[s]:
                        row[self.column[s]] = float(graph.nbytes[s])
                self.rows.append((row, -highspy.kHighsInf, float(self.budget - int(graph.base[m]))))

    def solve(self, time_limit: float) -> float:
        count = len(self.column) + len(self.ops)
        if not count:
            return 0.0
        step = self.graph.step
        lp = highspy.HighsLp()
        lp.num_col_, lp.num_row_ = count, len(self.rows)
        lp.col_cost_ = np.array([0.0] * len(self.column) + [step.ops[o].seconds for o in self.ops])
        lp.col_lower_ = np.zeros(count)
        lp.col_upper_ = np.array([1.0] * len(self.column) + [float(step.ops[o].replayable) for o in self.ops])
        lp.row_lower_ = np.array([low for _, low, _ in self.rows])
        lp.row_upper_ = np.array([high for _, _, high in self.rows])
        lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array([0, *itertools.accumulate(len(row) for row, _, _ in self.rows)], dtype=np.int32)
        lp.a_matrix_.index_ = np.array([c for row, _, _ in self.rows for c in row], dtype=np.int32)
        lp.a_matrix_.value_ = np.array([v for row, _, _ in self.rows for v in row.values()])
        lp.integrality_ = [highspy.HighsVarType.kInteger] * count
        solver = _silent_solver()
        solver.setOptionValue("threads", 1)
        solver.setOptionValue("time_limit", time_limit)
        solver.setOptionValue("mip_rel_gap", 1e-6)
        solver.passModel(lp)
        solver.run()
        if solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible:
            return float("inf")
        return max(float(solver.getInfo().mip_dual_bound), 0.0)


def _silent_solver() -> highspy.Highs:
    """A solver that prints nothing. Its first instance writes a banner to the file behind stdout before an option can forbid it."""
    sys.stdout.flush()
    kept = os.dup(1)
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        solver = highspy.Highs()
    finally:
        os.dup2(kept, 1)
        os.close(kept)
    solver.setOptionValue("output_flag", False)
    return solver


def _backward_starts(step: Step, ops: list[int]) -> dict[int, int]:
    """Forward op -> first op of the backward that follows it; the number of ops where none does."""
    found: dict[int, int] = {}
    following = len(step.ops)
    wanted = set(ops)
    for o in range(len(step.ops) - 1, NO_OP, -1):
        if step.ops[o].phase is Phase.BACKWARD:
            following = o
        elif o in wanted:
            found[o] = following
    return found
