"""Rules of thumb: a whole layer as one number of bytes.

Symbols, as in the literature: L layers, T tokens (micro-batch x sequence), d hidden size, A bytes kept for each token and
hidden unit in one layer, b bytes for each value of a layer's input, k layers in a segment.

Sources: Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost" (segments, sqrt(L)); Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models", section 4 (equations 1-6) and appendix A (FLOPs).
The rule counts what is stored, not gradients of activations, logits or workspaces; `timeline` goes on from there.
"""

from __future__ import annotations

import math

import msgspec

from keepwise._errors import UsageError

FUSED_BYTES = 34
"""A of a GPT layer in 16 bit with dropout, nothing of size T^2 stored (Korthikanti et al., equation 1 without its a*s/h term)."""
INPUT_BYTES = 2
"""b in 16 bit."""


class RuleMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Activation memory of a uniform stack of layers by the rule of thumb."""

    stored_inputs_bytes: int
    """bytes: the segments' inputs that are held through the whole step; 0 without checkpointing."""
    segment_bytes: int
    """bytes: everything inside one segment while it is rebuilt; all layers without checkpointing."""

    @property
    def total_bytes(self) -> int:
        """Bytes: both together."""
        return self.stored_inputs_bytes + self.segment_bytes


def activation_memory(
    *,
    layers: int,
    tokens: int,
    width: int,
    layer_bytes: float = FUSED_BYTES,
    input_bytes: float = INPUT_BYTES,
    segment: int | None,
) -> RuleMemory:
    """Activation bytes of `layers` equal layers; `segment` layers are rebuilt together (None: no checkpointing).

    Without checkpointing L*A*T*d; with it ceil(L/k)*b*T*d + min(k, L)*A*T*d.

    Args:
        layers: L.
        tokens: T, micro-batch times sequence.
        width: d.
        layer_bytes: A, bytes a token and hidden unit in one layer.
        input_bytes: b, bytes a value of a layer's input.
        segment: k, layers in a segment, or None.

    Raises:
        UsageError: when a size is below 1.
    """
    for name, value in (
        ("layers", layers),
        ("tokens", tokens),
        ("width", width),
        ("segment", 1 if segment is None else segment),
    ):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}")
    for name, amount in (("layer_bytes", layer_bytes), ("input_bytes", input_bytes)):
        if amount <= 0:
            raise UsageError(f"{name} must be above 0, not {amount}")
    unit = tokens * width
    if segment is None:
        return RuleMemory(stored_inputs_bytes=0, segment_bytes=round(layers * layer_bytes * unit))
    return RuleMemory(
        stored_inputs_bytes=round(math.ceil(layers / segment) * input_bytes * unit),
        segment_bytes=round(min(segment, layers) * layer_bytes * unit),
    )


def best_segments(
    *, layers: int, layer_bytes: float = FUSED_BYTES, input_bytes: float = INPUT_BYTES
) -> tuple[int, ...]:
    """All segment lengths k that reach the least total, in increasing order (ties happen because of the ceiling)."""
    totals = {k: math.ceil(layers / k) * input_bytes + k * layer_bytes for k in range(1, layers + 1)}
    least = min(totals.values())
    return tuple(k for k, total in totals.items() if total == least)


def compute_units(*, layers: int, segment: int | None, skips_last_segment: bool = False) -> float:
    """Compute of a step in units of one forward pass: 3 without checkpointing, 4 with full recomputation, for every k.

    Args:
        layers: L.
        segment: k, or None for no checkpointing.
        skips_last_segment: the framework leaves the last segment as it was after forward: saves min(k, L)/L of the overhead.
    """
    if segment is None:
        return 3.0
    return 4.0 - (min(segment, layers) / layers if skips_last_segment else 0.0)


def layer_bytes_per_unit(
    *,
    heads: int,
    sequence: int,
    width: int,
    fused_attention: bool,
    tensor_parallel: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """A of one GPT layer in 16 bit with dropout, on each rank (Korthikanti et al., equations 1, 2 and 4).

    34 + 5*a*s/h without parallelism; 10 + 24/t + 5*a*s/(h*t) under tensor parallelism; (34 + 5*a*s/h)/t with sequence parallelism
    too. A fused attention kernel (or selective recomputation of the core attention) drops the a*s/h term.
    """
    quadratic = 0.0 if fused_attention else 5.0 * heads * sequence / width
    if sequence_parallel:
        return (34.0 + quadratic) / tensor_parallel
    return 10.0 + (24.0 + quadratic) / tensor_parallel


def gpt_model_flops(*, layers: int, width: int, sequence: int, batch: int, vocab: int) -> float:
    """Floating-point operations of one step of a GPT without recomputation (Korthikanti et al., equation 7)."""
    return (
        72.0 * batch * layers * sequence * width**2 * (1 + sequence / (6.0 * width) + vocab / (12.0 * layers * width))
    )


def selective_overhead(*, width: int, sequence: int) -> float:
    """Added share of FLOPs when only the core attention is rebuilt, by the paper's approximation s/(6h)."""
    return sequence / (6.0 * width)
