"""What each dropped storage costs: its share of the replays, and the price of making one alone again.

A replayed op often serves several storages. Its seconds are shared equally among those of its window that need it, so that the shares of
all storages sum to the seconds of the schedule. What a window retains only for the windows inside it (a segment's inputs) costs
those: its seconds are shared among what they serve.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepwise.ir import NO_OP, Schedule, Step, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.optimal.graph import Graph


def shares_of(step: Step, schedule: Schedule) -> dict[int, float]:
    """Dropped storage -> seconds of replays that are due to it. They sum to the seconds of all replays.

    Complexity: linear in the replayed ops and their inputs, with sets of a window's storages as integers.
    """
    lost = formally_droppable(step) - set(schedule.held)
    below: list[set[int]] = [set() for _ in schedule.windows]  # what a window and those inside it serve
    for window in reversed(schedule.windows):
        below[window.id] |= lost.intersection(window.retain)
        if window.parent != NO_WINDOW:
            below[window.parent] |= below[window.id]
    found: dict[int, float] = {}
    for window in schedule.windows:
        for storages, seconds in _by_need(step, window).items():
            served: set[int] = set()
            for s in storages:
                served |= {s} if s in lost else below[window.id]
            payers = served or below[window.id] or set(window.retain)
            for s in payers:
                found[s] = found.get(s, 0.0) + seconds / len(payers)
    return found


def _by_need(step: Step, window: Window) -> dict[tuple[int, ...], float]:
    """Retained storages -> seconds of the window's ops that exactly those need."""
    inside = set(window.ops)
    bit = {s: 1 << i for i, s in enumerate(window.retain)}
    need = dict.fromkeys(window.ops, 0)
    seconds: dict[int, float] = {}
    for o in reversed(window.ops):
        op = step.ops[o]
        for s in {*(step.values[v].storage for v in op.outputs), *op.writes}:
            need[o] |= bit.get(s, 0)
        for v in op.inputs:
            for maker in step.dependencies(v):
                if maker in inside:
                    need[maker] |= need[o]
        seconds[need[o]] = seconds.get(need[o], 0.0) + op.seconds
    return {tuple(s for s in window.retain if mask & bit[s]): total for mask, total in seconds.items()}


class Remaking:
    """The price of making single storages again under a schedule."""

    def __init__(self, step: Step, schedule: Schedule) -> None:
        self.step = step
        self.graph = Graph(step)
        self.held = frozenset(schedule.held)

    def seconds(self, storage: int) -> float | None:
        """Seconds of the ops that lead to a saved storage from what is there when it is first read, itself left out.

        What is held counts as there, and what is alive then for other reasons. None where one of the ops cannot be replayed.
        """
        first = min((first for first, _ in self.graph.reads[storage]), default=NO_OP)
        ops = self.graph.recipe((storage,), _There(self, storage, first))
        return None if ops is None else self.graph.seconds(ops)


class _There:
    """Storages that are there at a moment."""

    def __init__(self, remaking: Remaking, without: int, moment: int) -> None:
        self.remaking = remaking
        self.without = without
        self.moment = moment

    def __contains__(self, storage: object) -> bool:
        if storage == self.without or not isinstance(storage, int):
            return False
        if storage in self.remaking.held:
            return True
        graph = self.remaking.graph
        return storage not in graph.formal and graph.step.storages[storage].death >= self.moment

    def __iter__(self) -> Iterator[int]:
        return (s.id for s in self.remaking.step.storages if s.id in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)
