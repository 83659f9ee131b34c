"""What planners ask of a step again and again, computed once for each `Step` object."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

from keepwise.ir import NO_OP, Phase, Save, Step

_KEY = "_plan_tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedRead:
    """One read of one save."""

    save: int
    """Index in `Step.saves`."""
    position: int
    """Index in `Save.reads`."""
    storage: int
    value: int
    at: int
    """`Save.at`: the forward moment at which it was saved."""
    first: int
    """Moment from which it is needed."""
    last: int


class Tables:
    """Lookup tables over one step."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.is_leaf = [s.birth == NO_OP and s.category.is_static for s in step.storages]
        self.nbytes = [s.nbytes if s.device == step.device else 0 for s in step.storages]
        self.write_moments: dict[int, list[int]] = {}
        for op in step.ops:
            for s in op.writes:
                self.write_moments.setdefault(s, []).append(op.index)

    def version_before(self, storage: int, moment: int) -> int:
        """Version that a reference to the storage shows just before `moment`."""
        return bisect_left(self.write_moments.get(storage, ()), moment)

    @cached_property
    def reads(self) -> tuple[SavedRead, ...]:
        """Every read of every save, in order of time."""
        found = [self._read(save, i) for save in self.step.saves for i in range(len(save.reads))]
        return tuple(sorted(found, key=lambda r: (r.first, r.save)))

    def _read(self, save: Save, position: int) -> SavedRead:
        read = save.reads[position]
        storage = self.step.values[save.value].storage
        return SavedRead(
            save=save.index,
            position=position,
            storage=storage,
            value=save.value,
            at=save.at,
            first=read.first,
            last=read.last,
        )

    @cached_property
    def reads_of(self) -> dict[int, tuple[SavedRead, ...]]:
        """Storage -> the reads of its saves, in order of time."""
        table: dict[int, list[SavedRead]] = {}
        for r in self.reads:
            table.setdefault(r.storage, []).append(r)
        return {s: tuple(found) for s, found in table.items()}

    @cached_property
    def last_forward_read(self) -> list[int]:
        """Storage -> last forward op that reads or writes it (`NO_OP` if none)."""
        last = [NO_OP] * len(self.step.storages)
        for op in self.step.ops:
            if op.phase == Phase.FORWARD:
                for v in op.inputs:
                    last[self.step.values[v].storage] = op.index
                for s in op.writes:
                    last[s] = op.index
        return last

    @cached_property
    def passes(self) -> tuple[range, ...]:
        """The forward passes: maximal runs of forward ops, in order."""
        found: list[range] = []
        begin = NO_OP
        for op in self.step.ops:
            if op.phase == Phase.FORWARD and begin == NO_OP:
                begin = op.index
            elif op.phase != Phase.FORWARD and begin != NO_OP:
                found.append(range(begin, op.index))
                begin = NO_OP
        if begin != NO_OP:
            found.append(range(begin, len(self.step.ops)))
        return tuple(found)


def tables_of(step: Step) -> Tables:
    """The tables of `step`, computed at the first call."""
    table = vars(step)
    if _KEY not in table:
        table[_KEY] = Tables(step)
    return table[_KEY]
