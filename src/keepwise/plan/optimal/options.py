"""What a stage can do with its saved tensors: `Option`, and its exact price.

An option holds some of the stage's storages from forward until its backward, retains others at one replay when its backward starts,
and serves what is left by *leaf windows*, a partition of the nodes that read: each replays what its nodes read, which dies with
the window. Bytes are relative to the stage's `level` (the smallest `base` in its backward) and include the stage's inputs.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.stages import Stage


@dataclass(frozen=True, kw_only=True, slots=True)
class Replay:
    """A leaf window over consecutive nodes, or an outer one over all of them."""

    start: int
    """Moment, relative to the stage's first backward moment."""
    stop: int
    ops: tuple[int, ...]
    """Positions in `Stage.ops`, so that equal stages share options."""
    retain: tuple[int, ...]
    """Storages by their position in `StageProblem.storages`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to run a stage's backward."""

    held: frozenset[int]
    """Storages held from forward, by position in `StageProblem.storages`."""
    outer: Replay | None
    leaves: tuple[Replay, ...]
    seconds: float
    """Time of all replays."""
    held_bytes: int
    """Bytes held from forward until the stage's backward, without inputs and outputs of the stage."""
    peak_bytes: int
    """High water during the stage's backward above its level, with inputs and what it holds."""
    forward_bytes: int
    """High water during the stage's forward above the forward level, with inputs and what it holds."""


class StageProblem:
    """A stage with positions instead of ids; shared by equal stages.

    Attributes:
        storages: the stage's inputs, then its own, then other storages that a window may want to hold, by id in the step.
        level: smallest base in the stage's backward, in bytes.
        gap_bytes: highest base above the level between its backward and that of the stage before, with shared inputs.
        forward_level: smallest base in the stage's forward.
    """

    def __init__(self, graph: Graph, stage: Stage, always_held: frozenset[int] = frozenset()) -> None:
        self.graph = graph
        self.stage = stage
        self.inputs = stage.inputs
        self.storages = (*stage.inputs, *stage.own)
        self.own = range(len(stage.inputs), len(self.storages))
        self.position = {s: i for i, s in enumerate(self.storages)}
        self._op_position = {op: i for i, op in enumerate(stage.ops)}
        span = slice(stage.first, stage.last + 1)
        base = graph.base[span]
        self.level = int(base.min()) if len(base) else int(graph.base[min(stage.first, graph.num_moments - 1)])
        self.base = base - self.level
        self.between = graph.between[span] - self.level
        front = slice(stage.ops[0], stage.forward_stop)
        gap = graph.base[stage.last + 1 : stage.gap_stop]
        self.gap_bytes = int(gap.max()) - self.level if len(gap) else 0
        self.gap_bytes += sum(self.cost(s) for s in stage.shared)
        self.forward_level = int(graph.base[front].min())
        self.front = graph.base[front] - self.forward_level
        self.at_hand = frozenset(stage.inputs) | _held_elsewhere(graph, stage, always_held)
        self.reads_of = {s: [(n.first, n.last) for n in stage.nodes if s in n.storages] for s in self.storages}

    def last_need(self, storage: int) -> int:
        """Last moment of the stage's backward at which a held storage is needed, windows that read it apart."""
        if storage in self.stage.shared:
            return self.stage.last
        return max((last for _, last in self.reads_of[storage]), default=self.stage.first - 1)

    def recipe(self, targets: Collection[int], at_hand: Collection[int]) -> tuple[int, ...] | None:
        """Recipe within the stage; None where there is none, or where it leads out of the stage."""
        ops = self.graph.recipe(targets, at_hand)
        return None if ops is None or any(o not in self._op_position for o in ops) else ops

    def bytes_of(self, position: int) -> int:
        """Bytes of a storage of the plan; zero where it costs nothing to hold."""
        storage = self.storages[position]
        return self.cost(storage)

    def cost(self, storage: int) -> int:
        """Bytes that holding a storage adds to the base; zero where others hold it to the end."""
        s = self.graph.step.storages[storage]
        return 0 if s.held_until >= self.stage.last or s.category.is_static else self.graph.nbytes[storage]

    def evaluate(
        self, held: frozenset[int], outer: frozenset[int], partition: tuple[tuple[int, int], ...]
    ) -> Option | None:
        """Price an option; None where a recipe does not exist.

        Args:
            held: positions of own storages that are held from forward.
            outer: positions of own storages that one replay at the start retains.
            partition: node ranges [first, last] of the leaf windows, in order, covering all nodes.
        """
        graph, stage = self.graph, self.stage
        at_hand = set(self.at_hand) | {self.storages[i] for i in held}
        # Storage at hand -> last moment that needs it.
        needed = dict.fromkeys(stage.shared, stage.last)
        profile = self.base.copy()
        peak = 0
        seconds = 0.0
        replay_highs: list[tuple[int, int, bool]] = []

        def note(storages: set[int], moment: int) -> None:
            for s in storages:
                needed[s] = max(needed.get(s, -1), moment)

        outer_ids = {self.storages[i] for i in outer}
        inner_hand = at_hand | outer_ids
        leaves: list[Replay] = []
        states: list[tuple[int, int]] = []  # (moment, bytes set aside in forward until then)
        retained: list[tuple[int, int, int]] = []
        for a, b in partition:
            wanted: dict[int, int] = {}
            start = -1
            for node in stage.nodes[a : b + 1]:
                for s in node.storages:
                    if s in inner_hand:
                        needed[s] = max(needed.get(s, -1), node.last)
                    else:
                        wanted[s] = node.last
                        if start < 0:
                            start = node.first
            if not wanted:
                continue
            ops = self.recipe(wanted, inner_hand)
            if ops is None:
                return None
            seconds += graph.seconds(ops)
            note(graph.read_by(ops, inner_hand), start)
            states.append((start, graph.carried_bytes(ops)))
            replay_highs.append((start, graph.replay_peak(ops, inner_hand, wanted), True))
            retained.extend((graph.nbytes[s], start, last) for s, last in wanted.items())
            leaves.append(
                Replay(
                    start=start - stage.first,
                    stop=stage.nodes[b].last - stage.first,
                    ops=self._to_positions(ops),
                    retain=tuple(sorted(self.position[s] for s in wanted)),
                )
            )
        outer_replay: Replay | None = None
        outer_start = stage.first
        if outer_ids:
            ops = self.recipe(outer_ids, at_hand)
            if ops is None:
                return None
            seconds += graph.seconds(ops)
            served = [n.first for n in stage.nodes if outer_ids.intersection(n.storages)]
            outer_start = min([stage.first + leaf.start for leaf in leaves] + served)
            note(graph.read_by(ops, at_hand), outer_start)
            states.append((outer_start, graph.carried_bytes(ops)))
            replay_highs.append((outer_start, graph.replay_peak(ops, at_hand, outer_ids), False))
            outer_replay = Replay(
                start=outer_start - stage.first,
                stop=stage.nodes[-1].last - stage.first,
                ops=self._to_positions(ops),
                retain=tuple(sorted(outer)),
            )
        before = self.between.copy()
        for size, start, last in retained:
            profile[start - stage.first : last + 1 - stage.first] += size
            before[start + 1 - stage.first : last + 1 - stage.first] += size
        for s in (*self.inputs, *(self.storages[i] for i in held)):
            end = needed.get(s, stage.first - 1)
            profile[: end + 1 - stage.first] += self.cost(s)
            before[: end + 1 - stage.first] += self.cost(s)
        for s in outer_ids:
            end = needed.get(s, stage.first - 1)
            profile[outer_start - stage.first : end + 1 - stage.first] += graph.nbytes[s]
            before[outer_start + 1 - stage.first : end + 1 - stage.first] += graph.nbytes[s]
        for start, size in states:
            profile[: start + 1 - stage.first] += size
            before[: start + 1 - stage.first] += size
        peak = int(profile.max()) if len(profile) else 0
        outer_bytes = sum(graph.nbytes[s] for s in outer_ids)
        for start, high, inner in replay_highs:
            beside = outer_bytes if inner and start == outer_start else 0
            peak = max(peak, int(before[start - stage.first]) + beside + high)
        outputs = set(stage.outputs)
        held_bytes = sum(self.bytes_of(i) for i in held if self.storages[i] not in outputs) + sum(n for _, n in states)
        return Option(
            held=held,
            outer=outer_replay,
            leaves=tuple(leaves),
            seconds=seconds,
            held_bytes=held_bytes,
            peak_bytes=peak,
            forward_bytes=self.forward_peak(held),
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

    def _to_positions(self, ops: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(self._op_position[o] for o in ops)


def _held_elsewhere(graph: Graph, stage: Stage, always_held: frozenset[int]) -> frozenset[int]:
    """Storages that are alive all through the stage's backward whatever the stage does: free to read."""
    step = graph.step
    found: set[int] = set()
    for op in stage.ops:
        for need in graph.needs(op):
            s = step.storages[need.storage]
            if need.storage in always_held:
                found.add(need.storage)
            if need.storage not in graph.droppable and s.death >= stage.last:
                found.add(need.storage)
        for s in graph.made_by[op]:
            if s not in graph.droppable and step.storages[s].death >= stage.last:
                found.add(s)
    return frozenset(found)
