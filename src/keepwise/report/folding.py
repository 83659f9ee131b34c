"""One row for all blocks that are alike.

A block is what stands under the first number of a module path (`transformer.h.3` of `transformer.h.3.mlp.c_fc`). Blocks of one
list fold into one row where they save the same tensors (module, op, bytes) and the same is decided about each of them. What
stands under no number is put together by the shortest beginning of its path under which no such list lies.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from keepwise.ir import Schedule, Step
from keepwise.report.inputs import DecisionLike
from keepwise.report.model import KINDS, Group, Item
from keepwise.report.words import plain_reason, ranges, short_op

ROOT = "(the model itself)"

VIEWS = "views"
"""Name of all replayed ops that only make another view: they move no bytes."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a module path lies."""

    container: str
    """`transformer.h`, or the whole group's path where there is no number."""
    number: int
    """3; -1 where there is none."""
    rest: str
    """`mlp.c_fc`"""

    @property
    def block(self) -> tuple[str, int]:
        """The block that it belongs to."""
        return self.container, self.number


class Places:
    """Splits module paths; knows where a model's lists of blocks lie."""

    def __init__(self, paths: Iterable[str]) -> None:
        """`paths`: all module paths of the model that matter."""
        self.above: set[str] = set()
        """Proper beginnings of the paths of lists."""
        for path in set(paths):
            parts = path.split(".")
            number = next((i for i, part in enumerate(parts) if part.isdecimal()), 0)
            self.above.update(".".join(parts[:i]) for i in range(1, number))

    def __call__(self, path: str) -> Place:
        """Split a path at its first number, or where its group ends."""
        parts = path.split(".") if path else []
        for i, part in enumerate(parts):
            if part.isdecimal():
                return Place(".".join(parts[:i]), int(part), ".".join(parts[i + 1 :]))
        length = 1
        while length < len(parts) and ".".join(parts[:length]) in self.above:
            length += 1
        return Place(".".join(parts[:length]), -1, ".".join(parts[length:]))


def pattern_of(path: str) -> str:
    """The path with its first number replaced by a star."""
    parts = path.split(".") if path else [ROOT]
    number = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    if number is not None:
        parts[number] = "*"
    return ".".join(parts)


@dataclass(slots=True)
class _Block:
    decisions: list[DecisionLike] = field(default_factory=list)
    again: dict[str, list[float]] = field(default_factory=dict)
    """Op name -> seconds of each replayed one."""

    def signature(self, place: Places) -> tuple[object, ...]:
        return tuple((place(d.path).rest, d.op, d.nbytes, d.kind) for d in self.decisions)


def fold(step: Step, schedule: Schedule, decisions: Sequence[DecisionLike]) -> tuple[Group, ...]:
    """Groups in the order in which their first tensors are made.

    Every decision and every replayed op is in exactly one group: bytes and seconds sum to those of the plan.
    """
    replays = [step.ops[i] for window in schedule.windows for i in window.ops]
    place = Places((*(d.path for d in decisions), *(op.path for op in replays)))
    blocks: dict[tuple[str, int], _Block] = {}
    for d in decisions:
        blocks.setdefault(place(d.path).block, _Block()).decisions.append(d)
    for op in replays:
        name = VIEWS if op.is_view else short_op(op.target)
        blocks.setdefault(place(op.path).block, _Block()).again.setdefault(name, []).append(op.seconds)
    alike: dict[tuple[object, ...], list[tuple[str, int]]] = {}
    for key, block in blocks.items():
        alike.setdefault((key[0], key[1] >= 0, block.signature(place)), []).append(key)
    return tuple(_group(step, place, [(key, blocks[key]) for key in keys]) for keys in alike.values())


def _group(step: Step, place: Places, members: list[tuple[tuple[str, int], _Block]]) -> Group:
    container, number = members[0][0]
    name = container or ROOT
    if number >= 0:
        numbers = ranges(number for (_, number), _ in members)
        name = f"{container}.{numbers}" if container else numbers
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    again: dict[str, list[float]] = {}
    for _, block in members:
        for d in block.decisions:
            tensors[d.kind] += 1
            nbytes[d.kind] += d.nbytes
            if d.kind == "keep":
                reasons[plain_reason(d.why)] += d.nbytes
        for op, seconds in block.again.items():
            again.setdefault(op, []).extend(seconds)
    replayed = sorted(((op, len(s), sum(s)) for op, s in again.items()), key=lambda r: (r[0] == VIEWS, -r[2], r[0]))
    return Group(
        name=name,
        count=len(members),
        num_tensors={k: tensors[k] for k in KINDS},
        nbytes={k: nbytes[k] for k in KINDS},
        replay_seconds=sum(r[2] for r in replayed),
        replayed=tuple(replayed),
        reasons=tuple(reasons.most_common()),
        items=tuple(_item(step, place, d) for d in members[0][1].decisions),
    )


def _item(step: Step, place: Places, d: DecisionLike) -> Item:
    value = step.values[step.saved_storages[d.storage][0].value]
    return Item(
        path=place(d.path).rest,
        op=short_op(d.op),
        source=d.source,
        shape=value.shape,
        dtype=value.dtype,
        nbytes=d.nbytes,
        kind=d.kind,
        saved_by=d.saved_by.replace("Backward0", ""),
        why=d.why,
    )
