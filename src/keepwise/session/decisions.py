"""What a plan does with each saved tensor, and its two prices, in types that people and programs can read.

The prices are the bytes that it holds until backward reads it, and the seconds to make it again from what the plan holds. They are
compared with the *price of memory* at the budget: how many seconds one more byte would save (`plan.optimal.memory_price`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keepwise._units import show_bytes
from keepwise.ir import Phase, Schedule, Step, Storage
from keepwise.plan.shares import Remaking, shares_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What happens to one storage that autograd saves."""

    storage: int
    """Index in the step's storages."""
    nbytes: int
    """Bytes that it holds when kept; counted once however many saved tensors are views of it."""
    seconds: float
    """Time that the decision adds to a step: its share of the replays that serve it. Those of all decisions sum to the plan's."""
    again_seconds: float | None = None
    """Time to make this one alone again, from what the plan holds beside it, in seconds; None where that cannot be."""
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
    is_forced: bool = False
    """Whether no plan could do otherwise: it must be kept."""

    @property
    def seconds_per_gib(self) -> float | None:
        """Seconds a GiB that dropping it saves: the second price by the first; None where it cannot be made again."""
        return None if self.again_seconds is None else self.again_seconds / max(self.nbytes, 1) * 2**30

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
    """Held in host memory. No planner decides so yet."""

    __slots__ = ()


def decisions_of(step: Step, schedule: Schedule) -> tuple[Decision, ...]:
    """One decision for each activation that autograd saves, in the order in which they are made.

    Parameters, buffers and inputs that autograd saves are not listed: they exist anyway.
    """
    held = set(schedule.held)
    retained = {s for w in schedule.windows for s in w.retain}
    times = replays_of(step, schedule)
    shares = shares_of(step, schedule)
    remaking = Remaking(step, schedule)
    found: list[Decision] = []
    for s, saves in step.saved_storages.items():
        storage = step.storages[s]
        if storage.category.is_static:
            continue
        maker = step.ops[storage.birth] if storage.birth >= 0 else None
        fields = {
            "storage": s,
            "nbytes": storage.nbytes,
            "path": maker.path if maker else "",
            "op": maker.target if maker else "",
            "source": maker.source if maker else "",
            "saved_by": ", ".join(sorted({save.node for save in saves if save.node})),
            "seconds": shares.get(s, 0.0),
            "again_seconds": remaking.seconds(s),
        }
        if s in retained and s not in held:
            count = times.get(s, 0)
            seconds = fields["seconds"]
            if storage.birth >= 0 and step.ops[storage.birth].unpacks:
                bits = show_bytes(step.ops[storage.birth].rng_bytes)
                found.append(
                    Pack(why=f"held as {bits} of bits, expanded in backward, {seconds * 1e3:.2f} ms", **fields)
                )
                continue
            why = f"replayed {'once' if count == 1 else f'{count} times'} in backward, {seconds * 1e3:.2f} ms"
            found.append(Recompute(why=why, **fields))
        else:
            found.append(Keep(why=_why_kept(step, s, s in held), is_forced=_is_forced(storage), **fields))
    found.sort(key=lambda d: step.storages[d.storage].birth)
    return tuple(found)


def replays_of(step: Step, schedule: Schedule) -> dict[int, int]:
    """Storage -> how often the op that makes it is replayed, where it is."""
    times: dict[int, int] = {}
    for w in schedule.windows:
        for o in w.ops:
            for s in {
                step.values[v].storage for v in step.ops[o].outputs if step.storages[step.values[v].storage].birth == o
            }:
                times[s] = times.get(s, 0) + 1
    return times


def explained(decisions: Sequence[Decision], price: float | None) -> str:
    """Two or three lines a decision: what and where, why, and its prices beside that of memory.

    Args:
        decisions: what to explain.
        price: seconds that one more GiB would save at the plan's budget; None where that is not known.
    """
    lines: list[str] = []
    if price is not None:
        lines.append(
            f"memory at this budget: {price:.3g} s a GiB (one more MiB would save {price / 1.024:.3g} ms of a step)"
            if price > 0
            else "memory at this budget: free (the plain step fits)"
        )
    for d in decisions:
        lines.append(f"{d.kind:9s} {show_bytes(d.nbytes):>9s}  {d.path or '(model)'}  {d.op}  {d.source}")
        reader = f"; read by {d.saved_by}" if d.saved_by else ""
        lines.append(f"{'':21s}{d.why}{reader}")
        lines.append(f"{'':21s}{_prices(d, price)}")
    return "\n".join(lines)


def _prices(d: Decision, price: float | None) -> str:
    own = d.seconds_per_gib
    if d.again_seconds is None or own is None:
        return f"prices: {show_bytes(d.nbytes)} held; it cannot be made again"
    text = f"prices: {show_bytes(d.nbytes)} held, or {d.again_seconds * 1e3:.3g} ms to make it again alone: {own:.3g} s a GiB"
    if price is None or price <= 0:
        return text
    dearer = own > price
    word = "dearer" if dearer else "cheaper"
    if isinstance(d, Keep) == dearer:
        return f"{text}, {word} than memory"
    other = (
        "not needed at the peak, or what would be replayed with it is dearer"
        if isinstance(d, Keep)
        else "it shares its replay with others, or the peak cannot do without its bytes"
    )
    return f"{text}, {word} than memory ({other})"


def _is_forced(storage: Storage) -> bool:
    return bool(storage.keep_reason) or storage.held_until >= storage.saved_until


def _why_kept(step: Step, s: int, is_held: bool) -> str:
    storage = step.storages[s]
    if storage.keep_reason:
        return storage.keep_reason
    if storage.held_until >= storage.saved_until:
        who = storage.holder or "a Python object outside the plan"
        return f"stays alive anyway: held by {who} until {_when(step, storage.held_until)}"
    if is_held:
        return "keeping it is cheaper than any replay that would free its bytes within this budget"
    if not any(save.reads for save in step.saved_storages[s]):
        return "nothing in backward reads it: it is let go of with the graph that it belongs to"
    return "its recipe is not replayable or is not worth it; kept as in the plain step"


def _when(step: Step, moment: int) -> str:
    if moment >= len(step.ops) - 1:
        return "the end of the step"
    phase = step.ops[moment].phase
    return "the end of forward" if phase == Phase.FORWARD else f"the middle of {phase}"
