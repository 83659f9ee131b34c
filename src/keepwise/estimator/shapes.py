"""The answer for plain shapes (L, d, T) by the rule of thumb, in the same form as any other."""

from __future__ import annotations

from keepwise._errors import UsageError
from keepwise.estimator.answer import Categories, Estimate, Moment, Rank
from keepwise.estimator.compute import fits
from keepwise.estimator.graph import Parameter
from keepwise.estimator.policy import segment_length
from keepwise.estimator.precision import optimizer_bytes, precision_of
from keepwise.estimator.rule import activation_memory, best_segments, compute_units
from keepwise.estimator.setup import Setup
from keepwise.estimator.units import format_count

_NEEDS_OPERATORS = {
    "tensor_parallel": 1,
    "context_parallel": 1,
    "pipeline_parallel": 1,
    "expert_parallel": 1,
    "lora_rank": 0,
    "quantised": None,
}


def by_rule(
    *,
    layers: int,
    width: int,
    tokens: int,
    layer_bytes: float,
    input_bytes: float,
    parameters: int | None,
    setup: Setup,
) -> Estimate:
    """L*A*T*d without checkpointing, ceil(L/k)*b*T*d + min(k, L)*A*T*d with it, and the copies of `parameters` if given.

    Raises:
        UsageError: when the setup asks for what the rule cannot answer.
    """
    for name, neutral in _NEEDS_OPERATORS.items():
        if getattr(setup, name) != neutral:
            raise UsageError(f"{name} needs the operator model: give heads (and inner, vocab) too, or a configuration")
    policy = setup.checkpointing
    if policy.kind not in ("none", "full", "every", "sqrt"):
        raise UsageError(f"checkpointing {policy} needs the operator model: give heads too, or a configuration")
    segment = None if policy.kind == "none" else segment_length(policy, layers)
    memory = activation_memory(
        layers=layers, tokens=tokens, width=width, layer_bytes=layer_bytes, input_bytes=input_bytes, segment=segment
    )
    weights, gradients, optimizer = _static(parameters, setup)
    kept, rebuilt = (memory.segment_bytes, 0) if segment is None else (memory.stored_inputs_bytes, memory.segment_bytes)
    peak = Moment(
        name="backward of a segment" if segment else "end of forward",
        categories=Categories(
            parameters=weights,
            gradients=gradients,
            optimizer=optimizer,
            kept_activations=kept,
            rebuilt_activations=rebuilt,
        ),
    )
    # The weights of a GPT block are 12*d^2; the shares below do not depend on it.
    forward = 2.0 * 12 * width**2 * layers * tokens
    again = forward * (compute_units(layers=layers, segment=segment) - 3)
    rank = Rank(
        name="every rank", stages=(0,), layers=layers, in_flight=1.0, kept_bytes=kept, peak=peak, moments=(peak,), host_bytes=0,
        forward_flops=forward, backward_flops=2 * forward, rebuilt_flops=again,
        forward_seconds=forward, backward_seconds=2 * forward, rebuilt_seconds=again,
    )  # fmt: skip
    best = best_segments(layers=layers, layer_bytes=layer_bytes, input_bytes=input_bytes)
    unit = tokens * width
    known = f", {format_count(parameters)} parameters" if parameters else ""
    return Estimate(
        model=f"rule of thumb, {layers} layers, width {width}, {layer_bytes:g} bytes a token and unit{known}",
        checkpointing=str(policy),
        num_parameters=parameters or 0,
        num_trained=parameters or 0,
        ranks=(rank,),
        traffic=(),
        fits=fits(peak.categories.total),
        num_devices=setup.num_devices,
        tokens=tokens * setup.accumulation * setup.data_parallel,
        bubble=0.0,
        notes=("the rule counts stored activations only: no logits, gradients of activations or workspaces",),
        rule={
            "layers": layers,
            "tokens": tokens,
            "width": width,
            "layer_bytes": layer_bytes,
            "input_bytes": input_bytes,
            "stored_inputs_bytes": memory.stored_inputs_bytes,
            "segment_bytes": memory.segment_bytes,
            "total_bytes": memory.total_bytes,
            "units": memory.total_bytes / unit,
            "none_bytes": round(layers * layer_bytes * unit),
            "best_segment": best[0],
            "best_segment_last": best[-1],
            "compute_units": compute_units(layers=layers, segment=segment),
            "compute_units_skipping_last": compute_units(layers=layers, segment=segment, skips_last_segment=True),
        },
    )


def _static(parameters: int | None, setup: Setup) -> tuple[int, int, int]:
    """Weights, gradients, optimizer state of that many parameters, taken as one matrix."""
    if parameters is None:
        return 0, 0, 0
    precision, shards = precision_of(setup.precision), setup.shards
    side = max(1, round(parameters**0.5))
    whole = Parameter(
        name="all", rows=parameters // side, columns=side, count=1, divisor=1, expert=False, adapter=False, trained=True,
        role="matrix", quantised=False,
    )  # fmt: skip
    state = optimizer_bytes(whole, setup.optimizer, precision.state) * parameters / whole.numel
    master = precision.master * parameters if setup.optimizer != "none" else 0
    return (
        round(parameters * precision.weight / (shards if setup.zero >= 3 else 1)),
        round(parameters * precision.gradient / (shards if setup.zero >= 2 else 1)),
        0 if "optimizer" in setup.offload else round((state + master) / (shards if setup.zero >= 1 else 1)),
    )
