"""What the bytes at the two peaks are, and which of them checkpointing can reduce."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from keepwise.ir import Category as Role
from keepwise.ir import Step
from keepwise.report.folding import ROOT, pattern_of
from keepwise.report.inputs import DecisionLike, LiveLike, TimelineLike
from keepwise.report.model import Category, Tensor
from keepwise.report.words import short_op

_AGAIN = ("replay", "retained")
"""Kinds of live things that exist because a replay runs or has run."""

_ROWS = (
    ("parameters", "no", "what is trained"),
    ("gradients", "no", "one for each parameter that is trained"),
    ("optimizer state", "no", "moments and master weights; needs `optimizer=` to count"),
    ("buffers and inputs", "no", "running statistics, the batch"),
    ("other static", "no", "exists throughout the step"),
    ("activations kept", "yes", "held from forward until backward reads them: what is planned"),
    ("activations replayed", "its price", "made again in backward, alive for a part of it"),
    ("copies and generator states", "its price", "taken in forward so that replays are exact"),
    ("temporaries", "not directly", "gradients of activations, what an op makes on its way"),
    ("kernel workspaces", "not directly", "inside single ops"),
)
"""Name, whether checkpointing reduces it, and what it is."""

_STATIC = {
    str(Role.PARAMETER): "parameters",
    str(Role.GRADIENT): "gradients",
    str(Role.OPTIMIZER): "optimizer state",
    str(Role.BUFFER): "buffers and inputs",
    str(Role.INPUT): "buffers and inputs",
}


def row_of(live: LiveLike) -> str:
    """The row that something live belongs to."""
    kind, category = str(live.kind), str(live.category)
    if kind == "outside":
        return "other static"
    if kind == "workspace":
        return "kernel workspaces"
    if kind in ("copy", "rng"):
        return "copies and generator states"
    if category in _STATIC:
        return _STATIC[category]
    if kind in _AGAIN:
        return "activations replayed"
    return "activations kept" if category == str(Role.ACTIVATION) else "temporaries"


def categories(plain: TimelineLike, planned: TimelineLike) -> tuple[Category, ...]:
    """Rows with any bytes; the columns sum to the two peaks."""
    before, after = _sums(plain), _sums(planned)
    return tuple(
        Category(name=name, plain_bytes=before[name], plan_bytes=after[name], reduced=reduced, note=note)
        for name, reduced, note in _ROWS
        if before[name] or after[name]
    )


def _sums(timeline: TimelineLike) -> Counter[str]:
    sums: Counter[str] = Counter()
    for live in timeline.at_peak:
        sums[row_of(live)] += live.nbytes
    return sums


def moment_in_words(step: Step, timeline: TimelineLike) -> str:
    """`the backward of transformer.h.3.mlp.act (mul), modeling_gpt2.py:77`."""
    moment = timeline.peak_moment
    if not 0 <= moment < len(step.ops):
        return "a step without ops"
    op = step.ops[moment]
    source = f", {op.source}" if op.source else ""
    where = f"{op.phase} of {op.path or 'the model itself'} ({short_op(op.target)}{source})"
    return f"a replay just before the {where}" if timeline.peak_window >= 0 else f"the {where}"


def largest_saved(step: Step, decisions: Sequence[DecisionLike], limit: int = 12) -> tuple[Tensor, ...]:
    """The saved activations that take most, equal ones of equal modules folded, by their total."""
    found: Counter[tuple[str, str, tuple[int, ...], str, int, str]] = Counter()
    for d in decisions:
        value = step.values[step.saved_storages[d.storage][0].value]
        found[pattern_of(d.path), short_op(d.op), value.shape, value.dtype, d.nbytes, d.kind] += 1
    return _tensors(found, limit)


def largest_at_peak(step: Step, timeline: TimelineLike, limit: int = 12) -> tuple[Tensor, ...]:
    """What takes most at the peak, folded likewise."""
    shapes = {v.storage: v for v in reversed(step.values)}
    found: Counter[tuple[str, str, tuple[int, ...], str, int, str]] = Counter()
    for live in timeline.at_peak:
        row = row_of(live)
        if row in ("other static", "kernel workspaces", "copies and generator states"):
            key = (ROOT if row == "other static" else "", row, (), "", live.nbytes, row)
        else:
            storage = step.storages[live.id]
            maker = step.ops[storage.birth] if storage.birth >= 0 else None
            path = storage.name or (maker.path if maker else "")
            value = shapes.get(live.id)
            key = (
                pattern_of(path),
                short_op(maker.target) if maker else "",
                value.shape if value else (),
                value.dtype if value else "",
                live.nbytes,
                row,
            )
        found[key] += 1
    return _tensors(found, limit)


def _tensors(found: Counter[tuple[str, str, tuple[int, ...], str, int, str]], limit: int) -> tuple[Tensor, ...]:
    ordered = sorted(found.items(), key=lambda item: -item[0][4] * item[1])
    return tuple(
        Tensor(name=name, op=op, shape=shape, dtype=dtype, nbytes=nbytes, count=count, kind=kind)
        for (name, op, shape, dtype, nbytes, kind), count in ordered[:limit]
    )
