"""What a plan does with each saved tensor, in types that people and programs can read."""

from __future__ import annotations

from dataclasses import dataclass

from keepwise.ir import Phase, Schedule, Step


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one storage that autograd saves."""

    storage: int
    """Index in the step's storages."""
    nbytes: int
    """Bytes that it holds when kept; counted once however many saved tensors are views of it."""
    seconds: float
    """Time that the decision adds to a step, in seconds."""
    path: str
    """Module that made it."""
    op: str
    """Op that made it."""
    source: str
    """Source line of that op."""
    saved_by: str
    """Autograd nodes that read it."""
    why: str
    """One sentence."""

    @property
    def kind(self) -> str:
        """`keep`, `recompute`, `pack` or `offload`."""
        return type(self).__name__.lower()


class Keep(Decision):
    """Held from forward to its last read, as in the plain step."""

    __slots__ = ()


class Recompute(Decision):
    """Dropped in forward, replayed in backward."""

    __slots__ = ()


class Pack(Decision):
    """Held in a smaller lossless form."""

    __slots__ = ()


class Offload(Decision):
    """Held in host memory."""

    __slots__ = ()


def decisions_of(step: Step, schedule: Schedule) -> tuple[Decision, ...]:
    """One decision for each activation that autograd saves, in the order in which they are made.

    Parameters, buffers and inputs that autograd saves are not listed: they exist anyway.
    """
    held, packed, offloaded = set(schedule.held), set(schedule.packed), set(schedule.offloaded)
    retained = {s for w in schedule.windows for s in w.retain}
    replays: dict[int, int] = {}
    for w in schedule.windows:
        for o in w.ops:
            replays[o] = replays.get(o, 0) + 1
    found: list[Decision] = []
    for s, saves in step.saved_storages.items():
        storage = step.storages[s]
        if storage.category.is_static:
            continue
        maker = step.ops[storage.birth] if storage.birth >= 0 else None
        writers = [op for (sid, _), op in step.writers.items() if sid == s] if maker is not None else []
        seconds = sum(replays.get(o, 0) * step.ops[o].seconds for o in writers)
        fields = {
            "storage": s,
            "nbytes": storage.nbytes,
            "path": maker.path if maker else "",
            "op": maker.target if maker else "",
            "source": maker.source if maker else "",
            "saved_by": ", ".join(sorted({save.node for save in saves if save.node})),
        }
        if s in retained and s not in held:
            times = max((replays.get(o, 0) for o in writers), default=0)
            why = f"replayed {'once' if times == 1 else f'{times} times'} in backward, {seconds * 1e3:.2f} ms"
            found.append(Recompute(seconds=seconds, why=why, **fields))
        elif s in packed:
            found.append(Pack(seconds=0.0, why="held in a smaller lossless form", **fields))
        elif s in offloaded:
            found.append(Offload(seconds=0.0, why="held in host memory", **fields))
        else:
            found.append(Keep(seconds=0.0, why=_why_kept(step, s, s in held), **fields))
    found.sort(key=lambda d: step.storages[d.storage].birth)
    return tuple(found)


def _why_kept(step: Step, s: int, is_held: bool) -> str:
    storage = step.storages[s]
    if storage.keep_reason:
        return storage.keep_reason
    if storage.held_until >= storage.saved_until:
        who = storage.holder or "a Python object outside the plan"
        return f"stays alive anyway: held by {who} until {_when(step, storage.held_until)}"
    if is_held:
        return "keeping it is cheaper than any replay that would free its bytes within this budget"
    return "its recipe is not replayable or is not worth it; kept as in the plain step"


def _when(step: Step, moment: int) -> str:
    if moment >= len(step.ops) - 1:
        return "the end of the step"
    phase = step.ops[moment].phase
    return "the end of forward" if phase == Phase.FORWARD else f"the middle of {phase}"
