"""From decisions over the chain to a `Schedule`: windows, recipes, what is held.

The chain charges every stage's inputs; here those that nothing reads are let go, and windows that retain nothing vanish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from keepwise.ir import Schedule, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.optimal.chain import Pass, SegmentEntry, StageEntry
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.model import Model
from keepwise.plan.optimal.options import Option, Replay, StageProblem
from keepwise.plan.optimal.stages import Chain, Stage


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A window before it has a number."""

    start: int
    stop: int
    ops: tuple[int, ...]
    retain: frozenset[int]
    path: str
    reads: frozenset[int]
    """Storages that its ops, or those of the windows inside it, may read from outside."""
    children: list[_Draft] = field(default_factory=list)


class _Assembly:
    def __init__(self, graph: Graph, chain: Chain, problems: Sequence[StageProblem]) -> None:
        self.graph = graph
        self.stages = chain.stages
        self.problems = problems
        self.always = set(chain.held) | (graph.formal - graph.droppable)

    def run(self, root: Pass, windows: list[Window]) -> set[int]:
        """Append windows; return what is held."""
        left = frozenset(self.always | self._left_by(root))
        drafts = self._entries(root, left)
        first = len(windows)
        self._number(drafts, NO_WINDOW, windows)
        free = frozenset().union(*(_free(p) for p in self.problems))
        read = {s for w in windows[first:] for s in self.graph.read_by(w.ops, left | free)}
        return {s for s in left if s in self.graph.formal} | read

    def _left_by(self, run: Pass) -> set[int]:
        """What a pass leaves: inputs of later entries, and what options hold."""
        left: set[int] = set()
        for i, entry in enumerate(run.entries):
            if i > 0:
                first = entry.first if isinstance(entry, SegmentEntry) else entry.stage
                left.update(self.stages[first].inputs)
            if isinstance(entry, StageEntry):
                storages = self.problems[entry.stage].storages
                left.update(storages[p] for p in entry.option.held)
        return left

    def _entries(self, run: Pass, at_hand: frozenset[int]) -> list[_Draft]:
        found: list[_Draft] = []
        for entry in run.entries:
            if isinstance(entry, StageEntry):
                found.extend(self._option(self.stages[entry.stage], self.problems[entry.stage], entry.option))
            else:
                found.extend(self._segment(entry, at_hand))
        return found

    def _segment(self, entry: SegmentEntry, at_hand: frozenset[int]) -> list[_Draft]:
        left = self._left_by(entry.inner) - at_hand
        children = self._entries(entry.inner, at_hand | left)
        starts: list[int] = [c.start for c in children]
        inside = frozenset[int]().union(*(c.reads for c in children))
        used = set(left & inside)
        for stage in self.stages[entry.first : entry.last + 1]:
            for node in stage.nodes:
                read = left.intersection(node.storages)
                if read:
                    used |= read
                    starts.append(node.first)
        if not used:
            return children
        members = range(entry.first, entry.last + 1)
        ops = self.graph.recipe(used, at_hand.union(*(_free(self.problems[i]) for i in members)))
        assert ops is not None, "the chain replays only what has a recipe"
        first, last = self.stages[entry.first], self.stages[entry.last]
        path = first.path if first.path == last.path else f"{first.path}..{last.path}"
        reads = self._reads(ops) | inside
        return [
            _Draft(
                start=min(starts),
                stop=first.last,
                ops=ops,
                retain=frozenset(used),
                path=path,
                reads=reads,
                children=children,
            )
        ]

    def _reads(self, ops: tuple[int, ...]) -> frozenset[int]:
        return frozenset(n.storage for o in ops for n in self.graph.needs(o) if n.reference)

    def _option(self, stage: Stage, problem: StageProblem, option: Option) -> list[_Draft]:
        drafts = [self._replay(stage, problem, replay) for replay in option.windows]
        for draft, replay in reversed(list(zip(drafts, option.windows, strict=True))):
            if replay.parent >= 0:
                around = drafts[replay.parent]
                around.children.insert(0, draft)
                around.reads |= draft.reads
        return [d for d, replay in zip(drafts, option.windows, strict=True) if replay.parent < 0]

    def _replay(self, stage: Stage, problem: StageProblem, replay: Replay) -> _Draft:
        ops = tuple(stage.ops[p] for p in replay.ops)
        return _Draft(
            start=stage.first + replay.start,
            stop=stage.first + replay.stop,
            ops=ops,
            reads=self._reads(ops),
            retain=frozenset(problem.storages[p] for p in replay.retain),
            path=stage.path,
        )

    def _number(self, drafts: list[_Draft], parent: int, windows: list[Window]) -> None:
        for draft in drafts:
            index = len(windows)
            windows.append(
                Window(
                    id=index,
                    start=draft.start,
                    stop=draft.stop,
                    ops=draft.ops,
                    retain=tuple(sorted(draft.retain)),
                    copies=self.graph.copies(draft.ops),
                    parent=parent,
                    path=draft.path,
                )
            )
            self._number(draft.children, index, windows)


def assemble(model: Model, roots: Sequence[Pass]) -> Schedule:
    """Write decisions as a `Schedule`.

    Args:
        model: the step.
        roots: decisions of each real forward pass, in the order of the model's parts.
    """
    windows: list[Window] = []
    held = set(model.graph.formal - model.graph.droppable)
    for part, root in zip(model.parts, roots, strict=True):
        held |= _Assembly(model.graph, part.chain, part.problems).run(root, windows)
    return Schedule(held=tuple(sorted(held)), windows=tuple(windows), planner="optimal")


def _free(problem: StageProblem) -> frozenset[int]:
    """Storages that a stage's windows find without anyone's help."""
    return problem.at_hand - frozenset(problem.inputs)
