"""From drafts to the document."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

import torch

from keepwise.ir import NO_OP, Category, Op, Phase, Read, Save, Step, Storage
from keepwise.ir.settle import settle_saves
from keepwise.runtime.geometry import SMALL_BYTES

if TYPE_CHECKING:
    from keepwise.trace.drafts import OpDraft, SaveDraft, Visit
    from keepwise.trace.recorder import Recorder


def assemble(recorder: Recorder, *, device: str, seconds: float) -> Step:
    """The `Step` that a recorder saw, checked against nothing: `ir.validate` does that."""
    saves = _saves(recorder)
    _judge_storages(recorder)
    _extend_lives(recorder, saves)
    step = Step(
        torch_version=str(torch.__version__),
        device=device,
        ops=_ops(recorder),
        values=tuple(recorder.table.values),
        storages=_storages(recorder),
        saves=saves,
        hooks=tuple(recorder.saved.pairs.items()),
        seconds=seconds,
        notes=_notes(recorder),
    )
    return settle_saves(step)


def _saves(recorder: Recorder) -> tuple[Save, ...]:
    last = len(recorder.ops) - 1
    done: list[Save] = []
    for i, draft in enumerate(recorder.saved.saves):
        reads: list[Read] = []
        after = draft.at - 1
        for visit in draft.visits:
            read = _read(recorder, visit)
            if recorder.ops[read.first].phase is not Phase.BACKWARD:
                draft.in_forward = True
                continue
            if read.first > after:
                reads.append(read)
                after = read.last
        if draft.in_forward:
            draft.storage.keep("read while forward was running, or by a backward that builds a graph")
        # Autograd holds it to the end if it never let go.
        released = draft.released if draft.released is not None else last
        draft.storage.saved_until = max(draft.storage.saved_until, released, *(r.last for r in reads), NO_OP)
        node = draft.visits[0].name if draft.visits else ""
        done.append(Save(index=i, value=draft.value, at=draft.at, node=node, reads=tuple(reads)))
    return tuple(done)


def _read(recorder: Recorder, visit: Visit) -> Read:
    """Moments of a node; a node that runs no op is at the clock, which must lie in backward."""
    if visit.first != NO_OP:
        return Read(first=visit.first, last=max(visit.last, visit.first))
    ops = recorder.ops
    at = max(visit.began, 0)
    if ops[at].phase is not Phase.BACKWARD and at + 1 < len(ops):
        at += 1
    return Read(first=at, last=at)


def _judge_storages(recorder: Recorder) -> None:
    """Why a storage must not be dropped, from the ops that made and wrote it."""
    table = recorder.table
    constants = _constants(recorder)
    _date_temporaries(recorder)
    for draft in table.storages:
        if draft.is_leaf and not draft.category.is_static:
            draft.keep("a constant" if draft.id in constants else "made by code that shows no ops")
    for index, op in enumerate(recorder.ops):
        why_not = op.why_not or (op.effects.why_not if op.effects is not None and not op.effects.replayable else "")
        if not why_not:
            continue
        for v in op.outputs:
            draft = table.storages[table.values[v].storage]
            if draft.birth == index:
                draft.keep(f"{op.target}: {why_not}")
        for s in op.writes:
            table.storages[s].keep(f"{op.target}: {why_not}")


def _date_temporaries(recorder: Recorder) -> None:
    """What opaque code makes in backward cannot have been there much before its first use.

    Such code's results in forward count from the beginning instead: their birth is named as an op that makes them, and a replay
    could believe that.
    """
    table = recorder.table
    seen: set[int] = set()
    for index, op in enumerate(recorder.ops):
        for v in op.inputs:
            draft = table.storages[table.values[v].storage]
            if draft.id in seen:
                continue
            seen.add(draft.id)
            if draft.is_leaf and draft.category is Category.ACTIVATION and op.phase is Phase.BACKWARD:
                draft.category, draft.birth = Category.TEMPORARY, index - 1


def _constants(recorder: Recorder) -> set[int]:
    """Storages of tensors made out of Python numbers: `torch.tensor(1.0)` shows as one op on a tensor that comes from nowhere."""
    values = recorder.table.values
    return {
        values[op.inputs[0]].storage for op in recorder.ops if op.target.startswith("aten.lift_fresh") and op.inputs
    }


def _extend_lives(recorder: Recorder, saves: tuple[Save, ...]) -> None:
    """Who outlives the step, copies that somebody took, and reads that a release came before."""
    table = recorder.table
    last = len(recorder.ops) - 1
    for draft in table.storages:
        if draft.held_until is None or draft.category.is_static:
            draft.held_until = last
        draft.held_until = max(draft.held_until, draft.birth)
    for draft, moment in table.late_copies:
        if moment > draft.saved_until:
            assert draft.held_until is not None
            draft.held_until = max(draft.held_until, moment)
    for draft in table.copies_alive():
        draft.held_until = last
    for index, op in enumerate(recorder.ops):
        for v in (*op.inputs, *op.outputs):
            draft = table.storages[table.values[v].storage]
            assert draft.held_until is not None
            if index > max(draft.held_until, draft.saved_until):
                draft.held_until = index


def _ops(recorder: Recorder) -> tuple[Op, ...]:
    here: dict[tuple[str, Phase], list[float]] = {}
    for op in recorder.ops:
        here.setdefault((op.signature, op.phase), []).append(op.seconds)
    typical = {key: statistics.median(found) for key, found in here.items()}
    done: list[Op] = []
    for index, op in enumerate(recorder.ops):
        effects = recorder.effects_of(op)
        path, source = _origin(recorder.saved.saves, op)
        seconds = effects.seconds if effects is not None and effects.seconds is not None else None
        done.append(
            Op(
                index=index,
                target=op.target,
                inputs=tuple(op.inputs),
                outputs=tuple(op.outputs),
                phase=op.phase,
                writes=tuple(op.writes),
                is_view=op.is_view,
                random=effects.random if effects is not None else "",
                rng_bytes=effects.rng_bytes if effects is not None else 0,
                replayable=not op.why_not and (effects is None or effects.replayable),
                why_not=op.why_not or (effects.why_not if effects is not None else ""),
                seconds=seconds if seconds is not None else typical[op.signature, op.phase],
                flops=effects.flops if effects is not None else 0,
                workspace_bytes=effects.workspace_bytes if effects is not None else 0,
                overwrites=op.overwrites,
                path=path,
                source=source,
                signature=op.signature,
            )
        )
    return tuple(done)


def _origin(saves: list[SaveDraft], op: OpDraft) -> tuple[str, str]:
    """Module path and line of an op; one of backward has those of the forward op whose saved tensor its node reads."""
    if op.path or op.visit is None or not op.visit.saves:
        return op.path, op.source
    save = saves[op.visit.saves[0]]
    return save.path, save.source


def _storages(recorder: Recorder) -> tuple[Storage, ...]:
    done: list[Storage] = []
    saved = {recorder.table.values[draft.value].storage for draft in recorder.saved.saves}
    for draft in recorder.table.storages:
        assert draft.held_until is not None
        done.append(
            Storage(
                id=draft.id,
                nbytes=draft.nbytes,
                device=draft.device,
                category=draft.category,
                birth=draft.birth,
                held_until=draft.held_until,
                saved_until=draft.saved_until,
                versions=1 + len(draft.writers),
                name=draft.name,
                holder=draft.holder,
                keep_reason="" if draft.category.is_static else draft.keep_reason,
                packed_bytes=draft.packed[0] if draft.packed else 0,
                pack_seconds=draft.packed[1] if draft.packed else 0.0,
                copied=draft.birth == NO_OP and draft.id not in saved and draft.nbytes <= SMALL_BYTES,
            )
        )
    return tuple(done)


def _notes(recorder: Recorder) -> tuple[str, ...]:
    known = ("a constant", "made before the step")
    opaque = sum(
        s.nbytes
        for s in recorder.table.storages
        if s.is_leaf and not s.category.is_static and s.keep_reason not in known
    )
    if not opaque:
        return ()
    return (
        f"{opaque} bytes of tensors come from code that shows no ops (compiled regions, extensions, other threads): kept.",
    )
