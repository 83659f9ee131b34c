"""A `Step` seen by the optimal planner: bytes that no plan changes, and recipes by storage.

Everything here follows the four rules of `keepwise.ir.schedule`. Three kinds of storages:

- *fixed*: leaves, what user code holds, what has a `keep_reason`, what lives on another device. Their bytes are in `base`.
- *droppable*: what the plan decides about. `base` charges them from birth to `held_until` only.
- the rest (temporaries): charged as in the plain step; a plan may hold them for its windows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from keepwise.ir import NO_OP, Phase, Step
from keepwise.plan.droppable import formally_droppable

Bytes = npt.NDArray[np.int64]

MAX_COPY_BYTES = 1 << 20
"""Leaves that are written between forward and backward (running statistics) are copied up to this size, larger ones kept out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """One tensor argument of an op, as a replay sees it."""

    value: int
    storage: int
    reference: bool
    """Whether holding the storage is enough: nothing writes it any more when backward reads."""
    makers: tuple[int, ...]
    """Ops that a replay must run where the storage is not at hand; empty where it comes from no op."""
    copy: bool = False
    """Whether it is a leaf that is written later: a small copy taken in forward serves it."""


class Graph:
    """Tables over one `Step`.

    Attributes:
        step: the step.
        nbytes: bytes of each storage on the budget's device (0 for storages elsewhere).
        formal: storages that `Schedule` counts as dropped unless they are listed.
        droppable: storages that a plan may drop: those of them that cost bytes here and whose ops can be replayed.
        passes: forward ops of each forward pass that has something to drop.
        base: bytes at each moment that no plan changes: everything but droppable storages after their `held_until`; with workspace.
        between: bytes of the same just before each moment.
        leaves: forward op -> leaves of which its replays read a copy that all windows share.
        leaf_readers: the same by leaf.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.num_moments = len(step.ops)
        self.nbytes = [s.nbytes if s.device == step.device else 0 for s in step.storages]
        self.last_read = [NO_OP] * len(step.storages)
        self.reads: list[list[tuple[int, int]]] = [[] for _ in step.storages]
        for save in step.saves:
            storage = step.values[save.value].storage
            for read in save.reads:
                self.reads[storage].append((read.first, read.last))
                self.last_read[storage] = max(self.last_read[storage], read.last)
        self._needs: list[tuple[Need, ...] | None] = [None] * len(step.ops)
        self._copying: set[int] = set()
        self._drawing = {op.index: op.rng_bytes for op in step.ops if op.random}
        self._seconds = [op.seconds for op in step.ops]
        self._replayable = [op.replayable for op in step.ops]
        self._workspace = [op.workspace_bytes for op in step.ops]
        self._writes = [op.writes for op in step.ops]
        self._makers: dict[int, tuple[int, ...] | None] = {}
        self._horizon = max((m for m in self.last_read), default=0)
        self.writes: list[list[int]] = [[] for _ in step.storages]
        for op in step.ops:
            for storage in op.writes:
                self.writes[storage].append(op.index)
        self.made_by: list[tuple[int, ...]] = [() for _ in step.ops]
        born: list[list[int]] = [[] for _ in step.ops]
        for s in step.storages:
            if s.birth != NO_OP:
                born[s.birth].append(s.id)
        self.made_by = [tuple(b) for b in born]
        self.formal = formally_droppable(step)
        self.droppable = frozenset(s for s in self.formal if self.nbytes[s] > 0 and self.makers(s) is not None)
        self.base, self.between = self._base(frozenset())
        self.passes = _passes(self)
        self._latest = self._latest_replays()
        self.leaves = _leaves(self)
        self.leaf_readers: dict[int, set[int]] = {}
        for op, leaves in self.leaves.items():
            for s in leaves:
                self.leaf_readers.setdefault(s, set()).add(op)

    def hold(self, storages: frozenset[int]) -> None:
        """Charge droppable storages that every plan holds in the base."""
        self.base, self.between = self._base(storages)

    def is_leaf(self, storage: int) -> bool:
        """Whether a replay finds it without our help (parameters, buffers, inputs)."""
        s = self.step.storages[storage]
        return s.category.is_static and s.birth == NO_OP

    def outlives_reads(self, storage: int) -> bool:
        """Whether holding it costs bytes beyond its last read: autograd also saves it for a node that never reads."""
        return storage in self.formal and self.step.storages[storage].saved_until > self.last_read[storage]

    def _latest_replays(self) -> dict[int, int]:
        """Forward op -> last moment at which a replay of it may begin: the last read of what its pass makes from it on.

        Parameters that the optimizer writes during backward are as in forward until then.
        """
        found: dict[int, int] = {}
        for forward in self.passes:
            latest = NO_OP
            for op in reversed(forward):
                latest = max([latest, *(self.last_read[s] for s in self.made_by[op])])
                found[op] = latest
        return found

    def settled(self, value: int, op: int) -> bool:
        """Whether nothing writes the value's storage from it to the last moment at which a replay of its reader `op` may begin."""
        v = self.step.values[value]
        return v.version == bisect_left(self.writes[v.storage], self._latest.get(op, self._horizon) + 1)

    def _base(self, held: frozenset[int]) -> tuple[Bytes, Bytes]:
        change = np.zeros(self.num_moments + 1, dtype=np.int64)
        change[0] = self.step.outside_bytes
        before = change.copy()
        for s in self.step.storages:
            size = self.nbytes[s.id]
            if not size:
                continue
            end = s.held_until if s.id in self.droppable and s.id not in held else s.death
            change[max(s.birth, 0)] += size
            change[min(end, self.num_moments - 1) + 1] -= size
            if s.birth < end:  # live between moments birth+1 .. end
                before[max(s.birth + 1, 0)] += size
                before[min(end, self.num_moments - 1) + 1] -= size
        base = np.cumsum(change)[: self.num_moments]
        base += np.array([op.workspace_bytes for op in self.step.ops], dtype=np.int64)
        return base, np.cumsum(before)[: self.num_moments]

    def needs(self, op: int) -> tuple[Need, ...]:
        """Tensor arguments of an op, without those that are always at hand."""
        found = self._needs[op]
        if found is None:
            needs: list[Need] = []
            for value in dict.fromkeys(self.step.ops[op].inputs):
                storage = self.step.values[value].storage
                settled, leaf = self.settled(value, op), self.is_leaf(storage)
                if leaf and settled:
                    continue
                copy = leaf and self.nbytes[storage] <= MAX_COPY_BYTES
                if copy:
                    self._copying.add(op)
                makers = () if leaf else self.step.dependencies(value)
                needs.append(Need(value=value, storage=storage, reference=settled, makers=makers, copy=copy))
            found = self._needs[op] = tuple(needs)
        return found

    def makers(self, storage: int) -> tuple[int, ...] | None:
        """Ops that make the storage and the tensor objects over it that autograd saves; None where one cannot be replayed."""
        if storage not in self._makers:
            written = [o for o in self.writes[storage] if o <= self._horizon]
            objects = [
                o for save in self.step.saved_storages.get(storage, ()) for o in self.step.dependencies(save.value)
            ]
            ops = sorted({self.step.storages[storage].birth, *written, *objects} - {NO_OP})
            good = bool(ops) and all(self.step.ops[o].replayable for o in ops)
            self._makers[storage] = tuple(ops) if good else None
        return self._makers[storage]

    def recipe(self, targets: Iterable[int], at_hand: Collection[int]) -> tuple[int, ...] | None:
        """Smallest list of ops that leads from the storages `at_hand` to `targets`, ascending; None if there is none."""
        ops: set[int] = set()
        stack: list[int] = []
        for target in targets:
            makers = self.makers(target)
            if makers is None:
                return None
            stack.extend(makers)
        while stack:
            op = stack.pop()
            if op in ops:
                continue
            ops.add(op)
            if not self._replayable[op]:
                return None
            for need in self._needs[op] or self.needs(op):
                if need.reference and need.storage in at_hand:
                    continue
                if not need.makers and not need.copy:
                    return None
                stack.extend(need.makers)
        return tuple(sorted(ops))

    def seconds(self, ops: Iterable[int]) -> float:
        """Time of one run of `ops`."""
        return sum(map(self._seconds.__getitem__, ops))

    def read_by(self, ops: Collection[int], at_hand: Collection[int]) -> set[int]:
        """Storages at hand that a replay of `ops` reads from outside."""
        return {n.storage for o in ops for n in self.needs(o) if n.reference and n.storage in at_hand}

    def replay_peak(self, ops: Iterable[int], at_hand: Collection[int], retain: Collection[int]) -> int:
        """High water of a replay's own storages, in bytes, those in `retain` included."""
        ops = tuple(ops)
        inside = set(ops)
        last: dict[int, int] = {}
        for op in ops:
            for need in self._needs[op] or self.needs(op):
                if need.makers and inside.issuperset(need.makers):
                    last[need.storage] = op
            for storage in self._writes[op]:
                last[storage] = op
        live = peak = 0
        dying: dict[int, int] = {}
        for op in ops:
            for storage in self.made_by[op]:
                live += self.nbytes[storage]
                if storage not in retain:
                    end = max(last.get(storage, op), op)
                    dying[end] = dying.get(end, 0) + self.nbytes[storage]
            high = live + self._workspace[op]
            if high > peak:
                peak = high
            live -= dying.pop(op, 0)
        return peak

    def copies(self, ops: Iterable[int]) -> tuple[int, ...]:
        """Values that a replay of `ops` must find copied: one a version of a leaf that is written later."""
        inside = set(ops)
        found: dict[tuple[int, int], int] = {}
        for op in sorted(self._copying & inside):
            for need in self.needs(op):
                v = self.step.values[need.value]
                writer = self.step.writers.get((v.storage, v.version), NO_OP)
                if need.copy and writer not in inside:
                    found.setdefault((v.storage, v.version), need.value)
        return tuple(sorted(found.values()))

    def drawn_bytes(self, op: int) -> int:
        """Bytes that forward sets aside to replay an op: a generator's state, or a packed form."""
        return self._drawing.get(op, 0)

    def copied_bytes(self, ops: Collection[int]) -> int:
        """Bytes of the copies of leaves that forward makes for a replay of `ops`."""
        return sum(self.nbytes[self.step.values[v].storage] for v in self.copies(ops))


def _leaves(graph: Graph) -> dict[int, tuple[int, ...]]:
    """Leaves that forward copies once for all windows, by op; not where the step writes them before: `copies` are of one window."""
    step = graph.step
    found: dict[int, tuple[int, ...]] = {}
    for forward in graph.passes:
        for op in forward:
            leaves = {
                s
                for v in step.ops[op].inputs
                if step.storages[s := step.values[v].storage].copied and graph.nbytes[s] and graph.settled(v, op)
            }
            if leaves:
                found[op] = tuple(sorted(leaves))
    return found


def _passes(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """The forward passes: forward ops that hang together by what they make, each up to where autograd saves last.

    Micro-batches are passes of their own. What follows the last saved tensor (a `detach` after backward) belongs to none.
    """
    step = graph.step
    end = max((save.at for save in step.saves), default=0)
    while end < len(step.ops) and step.ops[end].phase is Phase.FORWARD:
        end += 1
    forward = [op.index for op in step.ops[:end] if op.phase is Phase.FORWARD]
    root: dict[int, int] = {}

    def find(op: int) -> int:
        while root.setdefault(op, op) != op:
            root[op] = root[root[op]]
            op = root[op]
        return op

    for op in forward:
        for value in step.ops[op].inputs:
            birth = step.storages[step.values[value].storage].birth
            if birth != NO_OP and step.ops[birth].phase is Phase.FORWARD and birth < end:
                root[find(op)] = find(birth)
    members: dict[int, list[int]] = {}
    for op in forward:
        members.setdefault(find(op), []).append(op)
    saves = {op for op in forward if any(s in graph.droppable for s in graph.made_by[op])}
    return tuple(tuple(m) for m in members.values() if not saves.isdisjoint(m))
