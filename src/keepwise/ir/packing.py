"""Making again from a packed form: a step in which random masks are expanded from their bits instead of drawn again.

To a planner, packing is one more way to make a tensor: an op that reads nothing in backward and takes the seconds of packing and
unpacking, and for whose replay a few bytes are captured in forward, as a generator's state is captured for a draw. So the op
that finishes such a tensor is replaced by one with `Op.unpacks`; nothing else in the pipeline needs to know.
"""

from __future__ import annotations

import math
import statistics
from typing import TypeVar

import msgspec

from keepwise.ir.step import NO_OP, Category, Op, Phase, Step, Storage, Value

_PACKING_BYTES = 2
"""Bytes an element that packing takes while it runs: which elements differ from the one value, which equal the other."""

T = TypeVar("T", Op, Step, Storage, Value)


def with_packing(step: Step, *, but: frozenset[int] = frozenset()) -> Step:
    """The same step with the cheaper recipe for every mask that has one; the step itself if none has.

    Args:
        step: a recorded step; its storages say which have a packed form (`Storage.packed_bytes`).
        but: storages to leave as they are.
    """
    finishers = {s.id: k for s in step.storages if s.id not in but and (k := _finisher(step, s)) is not None}
    prices = _prices(step, finishers)
    found = {s: k for s, k in finishers.items() if _drawing_seconds(step, s) > prices[s]}
    return _rewritten(step, found, prices) if found else step


def _prices(step: Step, finishers: dict[int, int]) -> dict[int, float]:
    """Storage -> seconds of packing and unpacking: the median of equal ones, so that equal blocks stay equal."""
    seen: dict[tuple[str, int], list[float]] = {}
    keys = {s: (step.ops[k].signature or step.ops[k].target, step.storages[s].nbytes) for s, k in finishers.items()}
    for s, key in keys.items():
        seen.setdefault(key, []).append(step.storages[s].pack_seconds)
    return {s: statistics.median(seen[key]) for s, key in keys.items()}


def _drawing_seconds(step: Step, storage: int) -> float:
    """Seconds of making it as the step did."""
    makers = {step.writers[storage, v] for v in range(step.storages[storage].versions)}
    return sum(step.ops[o].seconds for o in makers)


def _finisher(step: Step, s: Storage) -> int | None:
    """The op after which a storage is packed; None where packing is not possible."""
    if not s.packed_bytes or s.category is not Category.ACTIVATION or s.keep_reason or s.birth == NO_OP:
        return None
    final = s.versions - 1
    k = step.writers[s.id, final]
    makers = [step.ops[o] for o in {step.writers[s.id, v] for v in range(s.versions)}]
    op = step.ops[k]
    saves = step.saved_storages.get(s.id, ())
    if (
        op.phase is not Phase.FORWARD
        or len(op.outputs) != 1
        or step.values[op.outputs[0]].storage != s.id
        or any(w != s.id for w in op.writes)
        or not any(o.random for o in makers)
        or any(step.values[save.value].version != final or save.at <= k for save in saves)
    ):
        return None
    result = step.values[op.outputs[0]]
    # Objects that show the finished tensor: the op's result, and views of it that were made afterwards.
    for v in step.values:
        if v.storage == s.id and v.version == final and v.view != result.view and step.values[v.view].version != final:
            return None
    return k


def _rewritten(step: Step, finishers: dict[int, int], prices: dict[int, float]) -> Step:
    ops, values, storages = list(step.ops), list(step.values), list(step.storages)
    for s, k in finishers.items():
        old, op = storages[s], ops[k]
        final = old.versions - 1
        target = s
        if (
            old.birth != k
        ):  # written in place: what it was before is a temporary that ends where the finished tensor begins
            target = len(storages)
            storages[s] = _replace(old, held_until=k - 1, saved_until=NO_OP, versions=final, packed_bytes=0)
            storages.append(_replace(old, id=target, birth=k, held_until=max(old.held_until, k), versions=1))
            first: dict[int, int] = {}
            for v in step.values:
                if v.storage == s and v.version == final:
                    view = first.setdefault(v.view, v.id)
                    values[v.id] = _replace(v, storage=target, version=0, view=view)
        ops[k] = _replace(
            op,
            inputs=(),
            writes=(),
            is_view=False,
            unpacks=True,
            random="packed",
            rng_bytes=old.packed_bytes,
            replayable=True,
            why_not="",
            seconds=prices[s],
            workspace_bytes=max(op.workspace_bytes, _PACKING_BYTES * math.prod(values[op.outputs[0]].shape)),
            signature=f"unpack {op.signature}",
        )
    return _replace(step, ops=tuple(ops), values=tuple(values), storages=tuple(storages))


def _replace(struct: T, **changes: object) -> T:
    return msgspec.structs.replace(struct, **changes)
