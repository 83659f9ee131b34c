"""`settle_saves`: name saved values by the version that is there when they are read.

A storage counts one version for every write, also for writes through views that do not overlap: `unsafe_split` of an LSTM's gates,
each part then overwritten in place. A part that was saved after its own write is intact at every later version, and naming it by
the last one tells planners that holding, or rebuilding, the storage is enough.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

from keepwise.ir.step import Op, Save, Step, Value


def settle_saves(step: Step) -> Step:
    """The same step; where later writes leave a saved value intact, its save and its readers name the version before they read.

    Values whose bytes are overwritten, or may be, keep their names. Returns `step` itself if nothing changes.
    """
    return _Settler(step).run()


class _Settler:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.values = list(step.values)
        self.known = {(v.view, v.version): v.id for v in step.values}
        self.moments: dict[int, list[int]] = {}
        for op in step.ops:
            for s in op.writes:
                self.moments.setdefault(s, []).append(op.index)

    def run(self) -> Step:
        saves = tuple(self._save(save) for save in self.step.saves)
        ops = tuple(self._op(op) for op in self.step.ops)
        if saves == self.step.saves and ops == self.step.ops:
            return self.step
        return msgspec.structs.replace(self.step, saves=saves, ops=ops, values=tuple(self.values))

    def _save(self, save: Save) -> Save:
        if not save.reads:
            return save
        value = self._at(save.value, save.reads[0].first)
        return save if value == save.value else msgspec.structs.replace(save, value=value)

    def _op(self, op: Op) -> Op:
        inputs = tuple(self._at(v, op.index) for v in op.inputs)
        return op if inputs == op.inputs else msgspec.structs.replace(op, inputs=inputs)

    def _at(self, value: int, moment: int) -> int:
        """The name of an intact value just before `moment`; its old name if it is not known to be intact."""
        v = self.values[value]
        moments = self.moments.get(v.storage)
        if not moments:
            return value
        version = bisect_left(moments, moment)
        if version <= v.version or not all(self._spares(moments[i], v) for i in range(v.version, version)):
            return value
        key = (v.view, version)
        if key not in self.known:
            self.known[key] = len(self.values)
            writer = moments[version - 1]
            self.values.append(msgspec.structs.replace(v, id=len(self.values), version=version, producer=writer))
        return self.known[key]

    def _spares(self, op: int, v: Value) -> bool:
        """Whether an op that writes the storage of `v` writes beside `v`."""
        written = [w for o in self.step.ops[op].outputs if (w := self.values[o]).storage == v.storage]
        return bool(written) and all(are_disjoint(v, w) for w in written)


def are_disjoint(a: Value, b: Value) -> bool:
    """Whether two views of one storage are known to share no element.

    Known if their elements lie in ranges apart, or if both are boxes in one row-major grid (equal strides) that lie apart along
    some axis. O(dimensions); never says so of views that overlap.
    """
    if a.dtype != b.dtype:
        return False
    if 0 in a.shape or 0 in b.shape or _last(a) < b.offset or _last(b) < a.offset:
        return True
    if a.stride != b.stride or len(a.shape) != len(b.shape) or any(s <= 0 for s in a.stride):
        return False
    rest_a, rest_b, room = a.offset, b.offset, 0
    apart = False
    for axis in sorted(range(len(a.stride)), key=lambda i: -a.stride[i]):
        stride = a.stride[axis]
        first_a, rest_a = divmod(rest_a, stride)
        first_b, rest_b = divmod(rest_b, stride)
        end_a, end_b = first_a + a.shape[axis], first_b + b.shape[axis]
        # A box that runs over the end of its row lies in no grid.
        if room and max(end_a, end_b) * stride > room:
            return False
        apart = apart or end_a <= first_b or end_b <= first_a
        room = stride
    return apart


def _last(v: Value) -> int:
    """Storage offset of the last element."""
    return v.offset + sum((n - 1) * s for n, s in zip(v.shape, v.stride, strict=True))
