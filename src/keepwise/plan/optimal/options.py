"""What a stage can do with its saved tensors: `Option`, and its exact price.

An option holds some of the stage's storages from forward until its backward, retains others at one replay when its backward starts,
and serves what is left by *windows* over a partition of the nodes that read: each replays what its nodes read, which dies with
the window, unless it is *lasting*: kept on for the windows after it, which then lie inside it. Bytes are relative to the stage's
`level` (the smallest `base` in its backward) and include the stage's inputs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.stages import Stage

Partition = tuple[tuple[int, int], ...]
"""First and last node of each window, in order, covering all nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A window of a stage."""

    start: int
    """Moment, relative to the stage's first backward moment."""
    stop: int
    ops: tuple[int, ...]
    """Positions in `Stage.ops`, so that equal stages share options."""
    retain: tuple[int, ...]
    """Storages by their position in `StageProblem.storages`."""
    parent: int
    """Position in `Option.windows`, or -1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What `StageProblem.evaluate` was asked to price."""

    held: frozenset[int]
    outer: frozenset[int]
    partition: Partition
    lasting: Mapping[int, frozenset[int]]
    again: Mapping[int, frozenset[int]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to run a stage's backward."""

    held: frozenset[int]
    """Storages held from forward, by position in `StageProblem.storages`."""
    windows: tuple[Replay, ...]
    """In order of time, parents first; empty for a bound."""
    seconds: float
    """Time of all replays."""
    held_bytes: int
    """Bytes held from forward until the stage's backward, without inputs and outputs of the stage."""
    peak_bytes: int
    """High water during the stage's backward above its level, with inputs and what it holds."""
    forward_bytes: int
    """High water during the stage's forward above the forward level, with inputs and what it holds."""
    choice: Choice | None = None
    """How it came about; for a bound that of one option that it stands for."""


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A window while it is priced; moments and storages as in the step."""

    start: int
    stop: int
    ops: tuple[int, ...]
    retain: dict[int, int]
    """Storage -> last moment that needs it."""
    at_hand: set[int]
    parent: int = -1


class StageProblem:
    """A stage with positions instead of ids; shared by equal stages.

    Attributes:
        storages: the stage's inputs, then its own, by id in the step.
        own: positions of its own storages.
        at_hand: storages that its windows find without its help: inputs, and what others hold.
        level: smallest base in the stage's backward, in bytes.
        gap_bytes: highest base above the level between its backward and that of the stage before, with shared inputs.
        forward_level: smallest base in the stage's forward.
        leaves: op -> leaves of which its replays, and those of no other stage, read the copy that forward takes.
        counted: ops for which another problem counts what forward sets aside.
    """

    def __init__(
        self,
        graph: Graph,
        stage: Stage,
        always_held: frozenset[int] = frozenset(),
        counted: frozenset[int] = frozenset(),
    ) -> None:
        self.graph = graph
        self.stage = stage
        self.inputs = stage.inputs
        self.storages = (*stage.inputs, *stage.own)
        self.own = range(len(stage.inputs), len(self.storages))
        self.position = {s: i for i, s in enumerate(self.storages)}
        self.op_position = {op: i for i, op in enumerate(stage.ops)}
        span = slice(stage.first, stage.last + 1)
        base = graph.base[span]
        self.level = int(base.min()) if len(base) else int(graph.base[min(stage.first, graph.num_moments - 1)])
        self.base = base - self.level
        self.between = graph.between[span] - self.level
        gap = graph.base[stage.last + 1 : stage.gap_stop]
        self.gap_bytes = int(gap.max()) - self.level if len(gap) else 0
        self.gap_bytes += sum(self.cost(s) for s in stage.shared)
        front = slice(stage.ops[0], stage.forward_stop)
        self.forward_level = int(graph.base[front].min())
        self.front = graph.base[front] - self.forward_level
        self.at_hand = frozenset(stage.inputs) | _held_elsewhere(graph, stage, always_held)
        self.leaves = _leaves_here(graph, stage)
        self.counted = counted
        self.reads_of = {s: [(n.first, n.last) for n in stage.nodes if s in n.storages] for s in self.storages}

    def aside_bytes(self, *, through: bool) -> int:
        """Bytes that forward sets aside where nothing of the stage is held: for a replay of what its backward reads.

        Args:
            through: whether its outputs are made again too, for the stages after it.
        """
        graph, outputs = self.graph, set(self.stage.outputs) - set(self.inputs)
        ops = (
            self.recipe(outputs.union(self.stage.own) if through else set(self.stage.own) - outputs, self.at_hand) or ()
        )
        leaves = {s for o in ops for s in self.leaves.get(o, ())}
        return graph.copied_bytes(ops) + sum(map(graph.drawn_bytes, ops)) + sum(graph.nbytes[s] for s in leaves)

    def last_need(self, storage: int) -> int:
        """Last moment of the stage's backward at which a held storage is needed, windows that read it apart."""
        if storage in self.stage.shared:
            return self.stage.last
        return max((last for _, last in self.reads_of[storage]), default=self.stage.first - 1)

    def recipe(self, targets: Collection[int], at_hand: Collection[int]) -> tuple[int, ...] | None:
        """Recipe within the stage; None where there is none, or where it leads out of the stage."""
        ops = self.graph.recipe(targets, at_hand)
        return None if ops is None or any(o not in self.op_position for o in ops) else ops

    def bytes_of(self, position: int) -> int:
        """Bytes that holding a storage of the plan adds to the base."""
        return self.cost(self.storages[position])

    def cost(self, storage: int) -> int:
        """Bytes that holding a storage adds to the base; zero where others hold it to the end."""
        s = self.graph.step.storages[storage]
        end = s.held_until if storage in self.graph.droppable else s.death
        return 0 if end >= self.stage.last or s.category.is_static else self.graph.nbytes[storage]

    def makers(self, position: int) -> frozenset[int]:
        """Ops that make a storage, as positions in `Stage.ops`; empty if one lies outside."""
        ops = self.graph.makers(self.storages[position]) or ()
        return frozenset(self.op_position[o] for o in ops) if all(o in self.op_position for o in ops) else frozenset()

    def evaluate(
        self,
        held: frozenset[int],
        outer: frozenset[int],
        partition: Partition,
        lasting: Mapping[int, frozenset[int]] | None = None,
        again: Mapping[int, frozenset[int]] | None = None,
    ) -> Option | None:
        """Price an option; None where a recipe does not exist.

        Args:
            held: positions of own storages that are held from forward.
            outer: positions of own storages that one replay at the start retains for all windows.
            partition: the windows' nodes.
            lasting: window (position in `partition`) -> storages that it retains for its own nodes and all windows after it.
            again: window -> storages that one more replay just before it retains for it and all windows after it.
        """
        choice = Choice(held=held, outer=outer, partition=partition, lasting=lasting or {}, again=again or {})
        windows = self._windows(choice)
        if windows is None:
            return None
        drafts, needed = windows
        self._nest(drafts)
        return self._priced(choice, drafts, needed)

    def _windows(self, choice: Choice) -> tuple[list[_Draft], dict[int, int]] | None:
        """Windows in order of time, and the last need of what is at hand."""
        graph, stage = self.graph, self.stage
        partition, lasting = choice.partition, choice.lasting
        at_hand = set(self.at_hand) | {self.storages[i] for i in choice.held}
        needed = dict.fromkeys(stage.shared, stage.last)
        drafts: list[_Draft] = []
        keeper: dict[int, _Draft] = {}  # lasting storage -> its window

        def add(start: int, stop: int, targets: set[int], keep: set[int]) -> bool:
            hand = at_hand | set(keeper)
            ops = self.recipe(targets | keep, hand)
            if ops is None:
                return False
            draft = _Draft(
                start=start, stop=stop, ops=ops, retain=dict.fromkeys(targets | keep, start - 1), at_hand=hand
            )
            for s in graph.read_by(ops, hand):
                self._need(s, start, keeper, needed)
            drafts.append(draft)
            keeper.update(dict.fromkeys(keep, draft))
            return True

        for number, (a, b) in enumerate(partition):
            ids = {
                self.storages[i]
                for i in choice.again.get(number, frozenset()) | (choice.outer if not number else frozenset())
            }
            first = self._first_use(at_hand | set(keeper), ids, partition, lasting, number) if ids else -1
            if first >= 0 and not add(first, first, set(), ids):
                return None
            hand = at_hand | set(keeper)
            wanted = {s: node.last for node in stage.nodes[a : b + 1] for s in node.storages if s not in hand}
            keep = {self.storages[i] for i in lasting.get(number, ())} - hand
            start = next((n.first for n in stage.nodes[a : b + 1] if any(s in wanted for s in n.storages)), -1)
            if wanted and not add(start, start, set(wanted) - keep, keep):
                return None
            own = drafts[-1] if wanted else None
            for node in stage.nodes[a : b + 1]:
                for s in node.storages:
                    if own is not None and s in own.retain:
                        own.retain[s] = node.last
                    else:
                        self._need(s, node.last, keeper, needed)
        for draft in drafts:
            draft.stop = max([draft.start, *draft.retain.values()])
        return drafts, needed

    @staticmethod
    def _need(storage: int, moment: int, keeper: Mapping[int, _Draft], needed: dict[int, int]) -> None:
        table = keeper[storage].retain if storage in keeper else needed
        table[storage] = max(table.get(storage, -1), moment)

    def _first_use(
        self,
        at_hand: set[int],
        ids: set[int],
        partition: Partition,
        lasting: Mapping[int, frozenset[int]],
        begin: int,
    ) -> int:
        """Moment at which a replay that retains `ids` is needed: a node reads one of them, or a window from `begin` on begins."""
        for number, (a, b) in list(enumerate(partition))[begin:]:
            later = {self.storages[i] for i in lasting.get(number, ())}
            for node in self.stage.nodes[a : b + 1]:
                if any(s in ids or s not in at_hand or s in later for s in node.storages):
                    return node.first
        return -1

    @staticmethod
    def _nest(drafts: Sequence[_Draft]) -> None:
        """Stretch windows over those that begin in them, and find parents."""
        for i in range(len(drafts) - 1, -1, -1):
            for j in range(i + 1, len(drafts)):
                if drafts[j].start <= drafts[i].stop:
                    drafts[i].stop = max(drafts[i].stop, drafts[j].stop)
        for j, draft in enumerate(drafts):
            around = [i for i in range(j) if drafts[i].stop >= draft.start]
            draft.parent = around[-1] if around else -1

    def _reserved(self, drafts: Sequence[_Draft]) -> list[tuple[int, int]]:
        """(last moment, bytes) of what forward sets aside: copies for each window or for all, what an op drew until its last replay."""
        graph = self.graph
        last = {o: draft.start for draft in drafts for o in draft.ops if graph.drawn_bytes(o)}
        found = [(draft.start, graph.copied_bytes(draft.ops)) for draft in drafts]
        found += [(start, graph.drawn_bytes(o)) for o, start in last.items()]
        if self.leaves:
            needed = {s: d.start for d in drafts for o in d.ops for s in self.leaves.get(o, ())}
            found += [(start, graph.nbytes[s]) for s, start in needed.items()]
        return found

    def _priced(self, choice: Choice, drafts: list[_Draft], needed: dict[int, int]) -> Option:
        graph, stage, held = self.graph, self.stage, choice.held
        origin, reserved = stage.first, self._reserved(drafts)
        profile, before = self.base.copy(), self.between.copy()
        for s in (*self.inputs, *(self.storages[i] for i in held)):
            end = needed.get(s, origin - 1) + 1 - origin
            profile[:end] += self.cost(s)
            before[:end] += self.cost(s)
        for start, size in reserved:
            profile[: start + 1 - origin] += size
            before[: start + 1 - origin] += size
        for draft in drafts:
            for s, last in draft.retain.items():
                profile[draft.start - origin : last + 1 - origin] += graph.nbytes[s]
                before[draft.start + 1 - origin : last + 1 - origin] += graph.nbytes[s]
        peak = int(profile.max()) if len(profile) else 0
        seconds = 0.0
        for j, draft in enumerate(drafts):
            beside = sum(
                graph.nbytes[s]
                for other in drafts[:j]
                if other.start == draft.start
                for s, last in other.retain.items()
                if last >= draft.start
            )
            inner = graph.replay_peak(draft.ops, draft.at_hand, draft.retain)
            peak = max(peak, int(before[draft.start - origin]) + beside + inner)
            seconds += graph.seconds(draft.ops)
        outputs = set(stage.outputs)
        held_bytes = sum(self.bytes_of(i) for i in held if self.storages[i] not in outputs)
        return Option(
            held=held,
            windows=tuple(self._replay(d) for d in drafts),
            seconds=seconds,
            held_bytes=held_bytes + sum(n for _, n in reserved),
            peak_bytes=peak,
            forward_bytes=self.forward_peak(held),
            choice=choice,
        )

    def _replay(self, draft: _Draft) -> Replay:
        return Replay(
            start=draft.start - self.stage.first,
            stop=draft.stop - self.stage.first,
            ops=tuple(self.op_position[o] for o in draft.ops),
            retain=tuple(sorted(self.position[s] for s in draft.retain)),
            parent=draft.parent,
        )

    def forward_peak(self, held: frozenset[int]) -> int:
        """High water during the stage's forward above the forward level, in bytes, where `held` is held."""
        stage, step = self.stage, self.graph.step
        front = self.front.copy()
        origin = stage.ops[0]
        for s in (*self.inputs, *(self.storages[i] for i in held)):
            begin = step.storages[s].held_until + 1
            front[max(begin - origin, 0) :] += self.cost(s)
        return int(front.max())


def _leaves_here(graph: Graph, stage: Stage) -> dict[int, tuple[int, ...]]:
    """Op -> leaves of which its replays read a shared copy; without those that other stages read too: no byte may count twice."""
    here = set(stage.ops)
    leaves = {op: tuple(s for s in graph.leaves.get(op, ()) if graph.leaf_readers[s] <= here) for op in stage.ops}
    return {op: found for op, found in leaves.items() if found}


def _held_elsewhere(graph: Graph, stage: Stage, always_held: frozenset[int]) -> frozenset[int]:
    """Storages that are alive all through the stage's backward whatever the stage does: free to read."""
    step = graph.step
    found: set[int] = set()
    for op in stage.ops:
        for need in graph.needs(op):
            s = step.storages[need.storage]
            if need.storage in always_held:
                found.add(need.storage)
            if need.storage not in graph.droppable and not need.copy and s.death >= stage.last:
                found.add(need.storage)
        for s in graph.made_by[op]:
            if s not in graph.droppable and step.storages[s].death >= stage.last:
                found.add(s)
    return frozenset(found)
