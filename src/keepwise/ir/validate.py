"""`validate`: is a `Step` consistent with itself?

It is asked of every step that comes from a file, and by the tests of traced and synthetic ones. Each finding is one sentence; an
empty list means that the invariants stated in `step.py` hold. Linear in the size of the step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from keepwise.ir.step import NO_OP, Phase, Step


def validate(step: Step) -> list[str]:
    """Findings against the invariants of `Step`, one sentence each, in the order of the document.

    Identifiers must be positions before anything else can be judged: if they are not, only that is reported.
    """
    found = list(_identifiers(step))
    if found:
        return found
    return [*_storages(step), *_values(step), *_ops(step), *_saves(step)]


def _identifiers(step: Step) -> Iterator[str]:
    for i, storage in enumerate(step.storages):
        if storage.id != i:
            yield f"storage at position {i} has id {storage.id}"
    for i, value in enumerate(step.values):
        if value.id != i:
            yield f"value at position {i} has id {value.id}"
        elif not 0 <= value.storage < len(step.storages):
            yield f"value {i} lies on unknown storage {value.storage}"
        elif not 0 <= value.view < len(step.values):
            yield f"value {i} names unknown object {value.view}"
        elif not NO_OP <= value.producer < len(step.ops):
            yield f"value {i} has unknown producer {value.producer}"
    for i, op in enumerate(step.ops):
        if op.index != i:
            yield f"op at position {i} has index {op.index}"
        for value in (*op.inputs, *op.outputs):
            if not 0 <= value < len(step.values):
                yield f"op {i} names unknown value {value}"
        for storage in op.writes:
            if not 0 <= storage < len(step.storages):
                yield f"op {i} writes unknown storage {storage}"
    for i, save in enumerate(step.saves):
        if save.index != i:
            yield f"save at position {i} has index {save.index}"
        if not 0 <= save.value < len(step.values):
            yield f"save {i} names unknown value {save.value}"


def _storages(step: Step) -> Iterator[str]:
    last = len(step.ops) - 1
    writes = [0] * len(step.storages)
    for op in step.ops:
        for s in op.writes:
            writes[s] += 1
    for s in step.storages:
        if s.nbytes < 0:
            yield f"storage {s.id} has {s.nbytes} bytes"
        if not NO_OP <= s.birth <= last:
            yield f"storage {s.id} is born at unknown op {s.birth}"
        if not s.birth <= s.held_until <= max(last, NO_OP):
            yield f"storage {s.id} is born at {s.birth} but held until {s.held_until} (last op {last})"
        if s.copied and s.birth != NO_OP:
            yield f"storage {s.id} is said to be copied, but op {s.birth} makes it: only leaves are"
        if s.saved_until > last:
            yield f"storage {s.id} is saved until {s.saved_until}, after the last op {last}"
        if s.versions != 1 + writes[s.id]:
            yield f"storage {s.id} says {s.versions} versions, {writes[s.id]} ops write it after its birth"
        if s.saved_until != NO_OP and s.id not in step.saved_storages:
            yield f"storage {s.id} says saved until {s.saved_until}, no save holds it"


def _values(step: Step) -> Iterator[str]:
    outputs = [frozenset(op.outputs) for op in step.ops]
    for v in step.values:
        storage = step.storages[v.storage]
        first = step.values[v.view]
        if not 0 <= v.version < storage.versions:
            yield f"value {v.id} is at version {v.version} of storage {v.storage}, which has {storage.versions}"
        if v.view > v.id or first.view != v.view:
            yield f"value {v.id} names object {v.view}, which is not the first value of an object"
        if first.storage != v.storage:
            yield f"value {v.id} lies on storage {v.storage}, its object {v.view} on storage {first.storage}"
        if first.version > v.version:
            yield f"value {v.id} is at version {v.version}, its object begins at version {first.version}"
        if v.producer == NO_OP:
            continue
        wrote = step.writers.get((v.storage, v.version)) == v.producer
        if v.id not in outputs[v.producer] and not wrote:
            yield f"value {v.id} names producer {v.producer}, which neither returns it nor writes its version"


def _ops(step: Step) -> Iterator[str]:
    version = [0] * len(step.storages)
    for op in step.ops:
        t = op.index
        for i in op.inputs:
            v = step.values[i]
            s = step.storages[v.storage]
            if s.birth >= t:
                yield f"op {t} reads value {i} of storage {s.id}, born at {s.birth}"
            if s.death < t:
                yield f"op {t} reads value {i} of storage {s.id}, dead after {s.death}"
            if v.producer >= t:
                yield f"op {t} reads value {i}, produced at {v.producer}"
            if v.version != version[v.storage]:
                yield f"op {t} reads version {v.version} of storage {s.id}, which is at {version[v.storage]}"
        for s in op.writes:
            if step.storages[s].birth >= t:
                yield f"op {t} lists its own fresh output, storage {s}, as written"
            version[s] += 1
        if len(set(op.writes)) != len(op.writes):
            yield f"op {t} lists a written storage twice"
        for o in op.outputs:
            v = step.values[o]
            s = step.storages[v.storage]
            if not s.birth <= t <= s.death:
                yield f"op {t} returns value {o} of storage {s.id}, which lives from {s.birth} to {s.death}"
            if v.version != version[v.storage]:
                yield f"op {t} returns version {v.version} of storage {s.id}, which is at {version[v.storage]}"
        if op.is_view:
            read = {step.values[i].storage for i in op.inputs}
            if op.writes or any(step.values[o].storage not in read for o in op.outputs):
                yield f"op {t} is called a view but writes or returns other storages than it reads"
        if op.seconds < 0 or op.workspace_bytes < 0 or op.rng_bytes < 0:
            yield f"op {t} has negative seconds or bytes"
        if not op.replayable and not op.why_not:
            yield f"op {t} is not replayable and does not say why"


def _saves(step: Step) -> Iterator[str]:
    written: dict[int, list[int]] = {}
    for op in step.ops:
        for s in op.writes:
            written.setdefault(s, []).append(op.index)
    for save in step.saves:
        v = step.values[save.value]
        s = step.storages[v.storage]
        if not 0 <= save.at <= len(step.ops):
            yield f"save {save.index} is packed at {save.at} of {len(step.ops)} ops"
        if s.birth >= save.at:
            yield f"save {save.index} is packed before op {save.at}, its storage {s.id} is born at {s.birth}"
        # The value may be named at any version that shows the saved bytes: from the one at which it was packed (an op saves
        # its inputs before it runs and may overwrite them at once) to the one at which it is read.
        until = max(save.at + 1, save.reads[0].first if save.reads else 0)
        moments = written.get(s.id, [])
        if not bisect_left(moments, save.at) <= v.version <= bisect_left(moments, until):
            yield f"save {save.index} holds version {v.version} of storage {s.id}, which it is at neither then nor when read"
        if s.saved_until == NO_OP:
            yield f"save {save.index} holds storage {s.id}, which says that autograd never saves it"
        previous = save.at - 1
        for read in save.reads:
            if not previous < read.first <= read.last < len(step.ops):
                yield f"save {save.index} is read from {read.first} to {read.last}, after {previous}"
                break
            if step.ops[read.first].phase != Phase.BACKWARD:
                yield f"save {save.index} is read at {read.first}, in phase {step.ops[read.first].phase}"
            if read.last > s.saved_until:
                yield f"save {save.index} is read until {read.last}, its storage {s.id} is saved until {s.saved_until}"
            previous = read.last
