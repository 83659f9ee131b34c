"""A strategy for random steps."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from keepwise.ir import NO_OP, Step
from tests.steps.builder import StepBuilder, Tensor, check_step

_SIZES = st.integers(1, 12)
_KINDS = st.sampled_from(["op"] * 6 + ["view", "write", "write", "norm", "random", "opaque", "hold", "keep"])


@st.composite
def random_steps(draw: st.DrawFn, *, max_ops: int = 12, copied: bool = False) -> Step:
    """A random small step: views, in-place writes, moving buffers, random and unrepeatable ops, holders, optimizer.

    Some have two micro-batches, some read their graph twice. Where wanted, replays read copies of some leaves.
    """
    b = StepBuilder(grads=draw(st.sampled_from(["held", "fresh"])))
    weights = [b.parameter(draw(_SIZES)) for _ in range(draw(st.integers(0, 2)))]
    passes = draw(st.sampled_from(["one"] * 4 + ["accumulated", "twice"]))
    if passes == "accumulated":
        b.backward(_forward(draw, b, weights, max_ops // 2))
        loss = _forward(draw, b, weights, max_ops // 2)
    else:
        loss = _forward(draw, b, weights, max_ops)
        if passes == "twice":
            b.backward(loss, retain=True)
    for storage in b.storages if copied else ():
        if storage.birth == NO_OP and storage.category.is_static:
            storage.copied = draw(st.booleans())
    return check_step(b.build(loss, optimizer=draw(st.booleans()), tail=draw(st.integers(0, 1))))


def _forward(draw: st.DrawFn, b: StepBuilder, weights: list[Tensor], max_ops: int) -> Tensor:
    """A random forward pass; returns its loss."""
    pool = [b.input(draw(_SIZES))]
    pool.append(b.one(pool[0], *weights[:1], size=draw(_SIZES), save=weights[:1]))
    for i in range(draw(st.integers(1, max_ops))):
        _extend(draw, b, weights, pool, {"seconds": float(draw(st.integers(0, 5))), "path": f"m.{i // 3}"})
    return b.one(*pool[-3:], size=4, save=pool[-2:-1])


def _extend(draw: st.DrawFn, b: StepBuilder, weights: list[Tensor], pool: list[Tensor], rest: dict[str, Any]) -> None:
    """One more random thing on tensors of the pool."""
    recent = st.sampled_from(pool[-4:] if draw(st.booleans()) else pool)
    kind = draw(_KINDS)
    x = draw(recent)
    if kind == "view":
        pool.append(b.view(x))
    elif kind == "write":
        # Autograd forbids overwriting what an earlier node saved; the builder's nodes are always read.
        other = draw(recent)
        if not b.is_saved(x) and other.storage != x.storage:
            b.write(x, other, save_result=draw(st.booleans()), save=[other] if draw(st.booleans()) else [], **rest)
    elif kind == "norm":
        mean = b.buffer(4)
        pool.append(b.batch_norm(x, mean, size=draw(_SIZES), reads_mean=draw(st.booleans()), **rest))
    elif kind == "hold":
        b.hold(x, draw(st.sampled_from(["end", "forward"])))
    elif kind == "keep":
        b.keep(x)
    else:
        inputs = [x, *draw(st.lists(recent, max_size=1)), *(draw(st.sampled_from(weights)) for _ in weights[:1])]
        sizes = draw(st.lists(_SIZES, min_size=1, max_size=2))
        save = [t for t in dict.fromkeys(inputs) if draw(st.booleans())]
        outs = [k for k in range(len(sizes)) if draw(st.integers(0, 3)) == 0]
        if kind == "random":
            rest |= {"random": "cpu", "rng_bytes": draw(_SIZES)}
        workspace = draw(st.integers(0, 6))
        replayable = kind != "opaque"
        pool.extend(
            b.op(*inputs, sizes=sizes, save=save, save_outputs=outs, workspace=workspace, replayable=replayable, **rest)
        )
