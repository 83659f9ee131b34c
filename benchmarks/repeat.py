"""A deeper step from a recorded one: its repeated block repeated more often, ops, tensors and moments alike.

`deepen(step, 96)` finds the longest repetition in the forward ops and the one in the backward ops (by targets and shapes, never by
names), and writes as many more periods into the middle of both. Nothing is run: a step of any depth is made from one that fits here.

What the ops of one period touch corresponds, position by position, to what those of the next one touch. Such tensors form
*orbits* (the residual stream, the weights of the first layer of each block, ...): an orbit gets as many more members as there are
new periods, the middle one's copies, with all moments moved along. What is the same in every period (masks, tables) stays one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from keepwise.ir import NO_OP, Op, Phase, Read, Save, Step, Storage, Value
from keepwise.ir.validate import validate

ALONE = -1
"""Place of a tensor that belongs to no orbit."""

_Copies = dict[int, tuple[int | None, int]]
"""Place in the orbit -> (periods that it is moved by, number in the new step)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """A repetition: ops `start <= i < start + period * count`."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(kw_only=True, slots=True)
class _Orbits:
    """Which tensors follow one another from period to period."""

    after: dict[int, int] = field(default_factory=dict)
    place: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tensor -> (number of its orbit, position in it)."""
    members: list[list[int]] = field(default_factory=list)

    def link(self, a: int, b: int) -> None:
        if a == b:
            return
        if self.after.setdefault(a, b) != b:
            raise ValueError(f"{a} is followed by {self.after[a]} and by {b}: the periods differ")

    def close(self) -> None:
        for first in sorted(set(self.after) - set(self.after.values())):
            members = [first]
            while members[-1] in self.after:
                members.append(self.after[members[-1]])
            for position, member in enumerate(members):
                self.place[member] = (len(self.members), position)
            self.members.append(members)


def deepen(step: Step, periods: int) -> Step:
    """The step with `periods` repetitions of its block where it has fewer.

    Raises:
        ValueError: nothing repeats, or not in the same way in forward and backward.
    """
    return _Deeper(step, periods).run()


def periods_of(step: Step) -> int:
    """How often the block of a step repeats; a first or last block that differs (no gradient of its input) does not count."""
    return _Deeper(step, None).count


def _longest_run(tokens: Sequence[object], begin: int) -> _Run:
    """The repetition that covers most; of nearly equal ones that with the shortest period."""
    best = _Run(start=begin, period=1, count=0)
    covered = 0
    for period in range(2, len(tokens) // 3 + 1):
        run = 0
        for i in range(len(tokens) - period):
            run = run + 1 if tokens[i] == tokens[i + period] else 0
            count = (run + period) // period
            if count >= 3 and count * period > 1.05 * covered:
                covered = count * period
                first = i + period + 1 - (run + period)
                best = _Run(start=begin + first, period=period, count=count)
    if not best.count:
        raise ValueError("nothing repeats at least three times")
    return best


def _count_versions(ops: list[Op], values: list[Value], storages: list[Storage], saves: list[Save]) -> None:
    """Versions of storages that several periods write (a gradient that is summed in place): counted again."""
    writes: dict[int, list[int]] = {}
    for op in ops:
        for s in op.writes:
            writes.setdefault(s, []).append(op.index)
    wrong = {s for s, at in writes.items() if storages[s].versions != len(at) + 1}
    for s in wrong:
        storages[s] = msgspec.structs.replace(storages[s], versions=len(writes[s]) + 1)
    version: dict[int, int] = {}
    for op in ops:
        for v in op.inputs:
            version.setdefault(v, bisect_left(writes.get(values[v].storage, ()), op.index))
        for v in op.outputs:
            version.setdefault(v, bisect_right(writes.get(values[v].storage, ()), op.index))
    for save in saves:
        version.setdefault(save.value, bisect_left(writes.get(values[save.value].storage, ()), save.at))
    for v in values:
        if v.storage in wrong and v.id in version:
            values[v.id] = msgspec.structs.replace(v, version=version[v.id])


class _Deeper:
    def __init__(self, step: Step, periods: int | None) -> None:
        self.step = step
        shapes = [
            (op.target, op.signature, tuple((step.values[v].shape, step.values[v].dtype) for v in op.outputs))
            for op in step.ops
        ]
        phases = [op.phase for op in step.ops]
        split = phases.index(Phase.BACKWARD)
        end = next((i for i in range(split, len(phases)) if phases[i] == Phase.OPTIMIZER), len(phases))
        forward = _longest_run(shapes[:split], 0)
        backward = _longest_run(shapes[split:end], split)
        count = min(forward.count, backward.count)
        # Backward undoes the last period first: both lose what is too much at the end of the model where they begin.
        self.forward = _Run(start=forward.start, period=forward.period, count=count)
        self.backward = _Run(start=backward.start, period=backward.period, count=count)
        self.more = 0 if periods is None else periods - count
        if self.more < 0:
            raise ValueError(f"the step has {count} periods already")
        self.count = count
        self.values, self.storages = _Orbits(), _Orbits()
        self._find_orbits()

    def _find_orbits(self) -> None:
        step = self.step
        for run, sign in ((self.forward, 1), (self.backward, -1)):
            for i in range(run.start, run.stop - run.period):
                a, b = step.ops[i], step.ops[i + run.period]
                if sign < 0:
                    a, b = b, a
                for x, y in zip((*a.inputs, *a.outputs), (*b.inputs, *b.outputs), strict=True):
                    self._link(x, y)
                for x, y in zip(a.writes, b.writes, strict=True):
                    self.storages.link(x, y)
        self.values.close()
        self.storages.close()

    def _link(self, x: int, y: int) -> None:
        if x == y or self.values.after.get(x) == y:
            return
        self.values.link(x, y)
        a, b = self.step.values[x], self.step.values[y]
        self.storages.link(a.storage, b.storage)
        if a.view != x:
            self._link(a.view, b.view)

    # Where things go.

    def moment(self, t: int, shift: int | None = None) -> int:
        """A moment of the old step in the new one; `shift` periods on if it lies in one, else by the half it lies in."""
        f, b = self.forward, self.backward
        if t < f.start:
            return t
        if t < f.stop:
            period, rest = divmod(t - f.start, f.period)
            by = shift if shift is not None else (self.more if period > self.count // 2 else 0)
            return f.start + (period + by) * f.period + rest
        grown = self.more * f.period
        if t < b.start:
            return t + grown
        if t < b.stop:
            period, rest = divmod(t - b.start, b.period)
            own = self.count - 1 - period  # counted from the model's beginning
            by = shift if shift is not None else (self.more if own > self.count // 2 else 0)
            return b.start + grown + (self.count - 1 + self.more - own - by) * b.period + rest
        return t + grown + self.more * b.period

    def _targets(self, orbits: _Orbits, item: int) -> list[tuple[int, int | None]]:
        """(position in the orbit, shift) of each new tensor that an old one stands for."""
        _, position = orbits.place[item]
        members = orbits.members[orbits.place[item][0]]
        middle = len(members) // 2
        if position < middle:
            return [(position, 0)]
        if position > middle:
            return [(position + self.more, self.more)]
        return [(position + i, i) for i in range(self.more + 1)]

    def run(self) -> Step:
        step = self.step
        self.new_values = self._number(self.values, len(step.values))
        self.new_storages = self._number(self.storages, len(step.storages))
        last = len(step.ops) - 1
        storages = list(step.storages[:1]) * sum(len(x) for x in self.new_storages)
        for s in step.storages:
            for shift, new in self.new_storages[s.id].values():
                storages[new] = msgspec.structs.replace(
                    s,
                    id=new,
                    birth=self.moment(s.birth, shift) if s.birth != NO_OP else NO_OP,
                    held_until=self.moment(s.held_until, None if s.held_until == last else shift),
                    saved_until=self.moment(s.saved_until, shift) if s.saved_until != NO_OP else NO_OP,
                )
        values = list(step.values[:1]) * sum(len(x) for x in self.new_values)
        for v in step.values:
            for shift, new in self.new_values[v.id].values():
                values[new] = msgspec.structs.replace(
                    v,
                    id=new,
                    storage=self._of(self.new_storages, self.storages, v.storage, shift),
                    view=self._of(self.new_values, self.values, v.view, None if self._same_object(v.id) else shift),
                    producer=self.moment(v.producer, shift) if v.producer != NO_OP else NO_OP,
                )
        ops = self._ops()
        saves = self._saves()
        _count_versions(ops, values, storages, saves)
        seconds = sum(op.seconds for op in ops) / max(sum(op.seconds for op in step.ops), 1e-12)
        deeper = msgspec.structs.replace(
            step,
            ops=tuple(ops),
            values=tuple(values),
            storages=tuple(storages),
            saves=tuple(saves),
            seconds=step.seconds * seconds,
        )
        found = validate(deeper)
        if found:
            raise ValueError(f"the deeper step is not consistent: {found[:3]}")
        return deeper

    def _same_object(self, value: int) -> bool:
        """Whether the value's orbit is one object that is written in each period."""
        if value not in self.values.place:
            return False
        members = self.values.members[self.values.place[value][0]]
        return len({self.step.values[m].view for m in members}) == 1

    def _number(self, orbits: _Orbits, size: int) -> list[_Copies]:
        """Old tensor -> its copies, numbered in the old order."""
        found: list[_Copies] = []
        number = 0
        for item in range(size):
            copies: _Copies = {}
            for place, shift in self._targets(orbits, item) if item in orbits.place else [(ALONE, None)]:
                copies[place] = (shift, number)
                number += 1
            found.append(copies)
        return found

    def _of(self, numbers: list[_Copies], orbits: _Orbits, item: int, shift: int | None) -> int:
        """The new tensor that stands for an old one, seen from something that was moved `shift` periods."""
        if item not in orbits.place:
            return numbers[item][ALONE][1]
        orbit, position = orbits.place[item]
        members = orbits.members[orbit]
        middle = len(members) // 2
        if shift is None:
            position += self.more if position > middle else 0
        else:
            position += shift
        old = min(position, middle) if position <= middle + self.more else position - self.more
        return numbers[members[old]][position][1]

    def _shifts(self, t: int) -> list[int | None]:
        """How far the copies of what happens at a moment are moved: several times for the middle period."""
        for run, backward in ((self.forward, False), (self.backward, True)):
            if run.start <= t < run.stop:
                period = (t - run.start) // run.period
                own = self.count - 1 - period if backward else period
                middle = self.count // 2
                if own == middle:
                    return list(range(self.more + 1))
                return [self.more if own > middle else 0]
        return [None]

    def _ops(self) -> list[Op]:
        ops: list[Op] = []
        for op in self.step.ops:
            for shift in self._shifts(op.index):
                ops.append(
                    msgspec.structs.replace(
                        op,
                        index=self.moment(op.index, shift),
                        inputs=tuple(self._of(self.new_values, self.values, v, shift) for v in op.inputs),
                        outputs=tuple(self._of(self.new_values, self.values, v, shift) for v in op.outputs),
                        writes=tuple(self._of(self.new_storages, self.storages, s, shift) for s in op.writes),
                    )
                )
        return sorted(ops, key=lambda op: op.index)

    def _saves(self) -> list[Save]:
        found: list[tuple[int, int, Save]] = []
        for save in self.step.saves:
            for shift in self._shifts(min(save.at, len(self.step.ops) - 1)):
                reads = tuple(
                    Read(first=self.moment(r.first, shift), last=self.moment(r.last, shift)) for r in save.reads
                )
                at = self.moment(save.at, shift) if save.at < len(self.step.ops) else save.at
                value = self._of(self.new_values, self.values, save.value, shift)
                found.append((at, save.index, msgspec.structs.replace(save, value=value, at=at, reads=reads)))
        found.sort(key=lambda x: x[:2])
        return [msgspec.structs.replace(save, index=i) for i, (_, _, save) in enumerate(found)]
