"""What one device sends in one step, by reason."""

from __future__ import annotations

from collections.abc import Sequence

from keepwise.estimator.answer import Traffic
from keepwise.estimator.costs import Rates
from keepwise.estimator.graph import Collective
from keepwise.estimator.precision import precision_of
from keepwise.estimator.setup import Setup
from keepwise.estimator.states import States
from keepwise.estimator.timeline import Entry

AGAIN = ", again for recomputation"
"""How the reason of repeated collectives ends."""

_GROUPS = {"tensor": "tensor parallel", "expert": "expert parallel", "context": "context parallel"}


def traffic(entries: Sequence[Entry], setup: Setup, base: States, kept_bytes: int, rates: Rates) -> tuple[Traffic, ...]:
    """All of it for one rank, a whole step."""
    steps = setup.accumulation
    passes: dict[str, list[Collective]] = {}
    for entry in entries:
        for piece in entry.pieces:
            for c in piece.graph.collectives:
                passes.setdefault(f"{_GROUPS[c.group]}, {c.phase}", []).append(c)
        for c in entry.treatment.rebuilt_collectives:
            passes.setdefault(f"{_GROUPS[c.group]}{AGAIN}", []).append(c)
    result = [
        Traffic(
            reason=reason,
            count=len(moves) * steps,
            num_bytes=steps * sum(c.wire_bytes for c in moves),
            seconds=steps * rates.collective_seconds(moves),
        )
        for reason, moves in passes.items()
    ]
    result += _replicas(setup, base, rates)
    result += _pipeline(entries, setup, rates)
    result += _host(setup, base, kept_bytes, rates)
    return tuple(result)


def _replicas(setup: Setup, base: States, rates: Rates) -> list[Traffic]:
    """Gradient reduction and, under sharding, gathering of parameters."""
    ranks = setup.shards
    if ranks == 1:
        return []
    share = (ranks - 1) / ranks
    gradients = base.gradients * (ranks if setup.zero >= 2 else 1)
    weights = base.parameters * (ranks if setup.zero >= 3 else 1) * precision_of(setup.precision).compute
    weights /= precision_of(setup.precision).weight
    parts: list[tuple[str, int, float]] = []
    if setup.zero == 0:
        parts.append(("data parallel, gradients all-reduced", 1, 2 * share * gradients))
    elif setup.zero < 3:
        parts.append(("data parallel, gradients reduce-scattered", 1, share * gradients))
        parts.append(("data parallel, parameters gathered after the step", 1, share * weights))
    else:
        steps = setup.accumulation
        parts.append(("sharded parameters gathered, forward and backward", 2 * steps, 2 * steps * share * weights))
        parts.append(("sharded gradients reduce-scattered", steps, steps * share * gradients))
    return [
        Traffic(reason=reason, count=count, num_bytes=num_bytes, seconds=num_bytes / rates.network)
        for reason, count, num_bytes in parts
    ]


def _pipeline(entries: Sequence[Entry], setup: Setup, rates: Rates) -> list[Traffic]:
    """Hidden states to the next stage and their gradients back."""
    if setup.pipeline_parallel == 1:
        return []
    blocks = [p.graph for e in entries for p in e.pieces if p.kind == "block"]
    chunks = setup.virtual_stages if setup.schedule == "interleaved" else 1
    size = blocks[0].values[blocks[0].entry].num_bytes if blocks else 0
    num_bytes = 2.0 * size * setup.accumulation * chunks
    count = 2 * setup.accumulation * chunks
    return [
        Traffic(
            reason="pipeline, states and gradients", count=count, num_bytes=num_bytes, seconds=num_bytes / rates.network
        )
    ]


def _host(setup: Setup, base: States, host_activations: int, rates: Rates) -> list[Traffic]:
    """What offload moves to the host and back."""
    parts: list[tuple[str, float]] = []
    if "activations" in setup.offload:
        parts.append(("offload of activations, out and in", 2.0 * host_activations * setup.accumulation))
    if "optimizer" in setup.offload:
        parts.append(
            ("offload of the optimizer, gradients out and weights in", float(base.gradients + base.parameters))
        )
    if "parameters" in setup.offload:
        parts.append(("offload of parameters, in twice", 2.0 * base.host * setup.accumulation))
    return [
        Traffic(reason=reason, count=0, num_bytes=num_bytes, seconds=num_bytes / rates.host)
        for reason, num_bytes in parts
    ]
