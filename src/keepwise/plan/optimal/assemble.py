"""From decisions over the chain to a `Schedule`: windows, recipes, what is held."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from keepwise.ir import Schedule, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.optimal.chain import Pass, SegmentEntry, StageEntry
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.options import Option, Replay, StageProblem
from keepwise.plan.optimal.stages import Chain, Stage


class _Assembly:
    def __init__(self, graph: Graph, chain: Chain, problems: Sequence[StageProblem]) -> None:
        self.graph = graph
        self.chain = chain
        self.problems = problems
        self.windows: list[Window] = []
        self.held: set[int] = set(chain.held)

    def add(self, *, start: int, stop: int, ops: tuple[int, ...], retain: Sequence[int], parent: int, path: str) -> int:
        index = len(self.windows)
        window = Window(
            id=index,
            start=start,
            stop=stop,
            ops=ops,
            retain=tuple(sorted(retain)),
            copies=self.graph.copies(ops),
            parent=parent,
            path=path,
        )
        self.windows.append(window)
        return index

    def run(self, root: Pass) -> None:
        self.held |= self._left_by(root)
        self._entries(root, NO_WINDOW, frozenset(self.held))

    def _left_by(self, run: Pass) -> set[int]:
        """What a pass leaves: inputs of later entries, and what options hold."""
        left: set[int] = set()
        for i, entry in enumerate(run.entries):
            if i > 0:
                first = entry.first if isinstance(entry, SegmentEntry) else entry.stage
                left.update(self.chain.stages[first].inputs)
            if isinstance(entry, StageEntry):
                storages = self.problems[entry.stage].storages
                left.update(storages[p] for p in entry.option.held)
        return left

    def _entries(self, run: Pass, parent: int, at_hand: frozenset[int]) -> None:
        for entry in run.entries:
            if isinstance(entry, StageEntry):
                self._option(self.chain.stages[entry.stage], self.problems[entry.stage], entry.option, parent)
            else:
                self._segment(entry, parent, at_hand)

    def _segment(self, entry: SegmentEntry, parent: int, at_hand: frozenset[int]) -> None:
        left = self._left_by(entry.inner) - at_hand
        if not left:
            self._entries(entry.inner, parent, at_hand)
            return
        hand = (
            at_hand
            | self.problems[entry.first].at_hand
            | frozenset().union(*(_free(self.problems[i]) for i in range(entry.first, entry.last + 1)))
        )
        ops = self.graph.recipe(left, hand)
        assert ops is not None, "the chain replays only what has a recipe"
        stages = self.chain.stages
        stop = stages[entry.first].last
        place = len(self.windows)
        index = self.add(
            start=0,
            stop=stop,
            ops=ops,
            retain=sorted(left),
            parent=parent,
            path=_between(stages[entry.first], stages[entry.last]),
        )
        self._entries(entry.inner, index, at_hand | left)
        start = self._first_use(entry, left, place)
        self.windows[place] = msgspec.structs.replace(self.windows[place], start=start)

    def _first_use(self, entry: SegmentEntry, left: set[int], place: int) -> int:
        starts = [w.start for w in self.windows[place + 1 :]]
        for stage in self.chain.stages[entry.first : entry.last + 1]:
            starts.extend(n.first for n in stage.nodes if left.intersection(n.storages))
        return min(starts)

    def _option(self, stage: Stage, problem: StageProblem, option: Option, parent: int) -> None:
        if option.outer is not None:
            parent = self._replay(stage, problem, option.outer, parent)
        for leaf in option.leaves:
            self._replay(stage, problem, leaf, parent)

    def _replay(self, stage: Stage, problem: StageProblem, replay: Replay, parent: int) -> int:
        return self.add(
            start=stage.first + replay.start,
            stop=stage.first + replay.stop,
            ops=tuple(stage.ops[p] for p in replay.ops),
            retain=[problem.storages[p] for p in replay.retain],
            parent=parent,
            path=stage.path,
        )


def assemble(graph: Graph, chain: Chain, problems: Sequence[StageProblem], root: Pass) -> Schedule:
    """Write decisions as a `Schedule`.

    Args:
        graph: the step.
        chain: its stages.
        problems: one a stage, in order.
        root: decisions of the real forward pass.
    """
    assembly = _Assembly(graph, chain, problems)
    assembly.run(root)
    read = {s for w in assembly.windows for s in graph.read_by(w.ops, _free_of(problems))}
    held = assembly.held | read
    return Schedule(held=tuple(sorted(held)), windows=tuple(assembly.windows), planner="optimal")


def _free(problem: StageProblem) -> frozenset[int]:
    """Storages that are at hand at no cost in a stage's backward."""
    return problem.at_hand - frozenset(problem.inputs)


def _free_of(problems: Sequence[StageProblem]) -> frozenset[int]:
    return frozenset().union(*(_free(p) for p in problems)) if problems else frozenset()


def _between(first: Stage, last: Stage) -> str:
    return first.path if first.path == last.path else f"{first.path}..{last.path}"
