"""Feed-forward layers, mixtures of experts and whole blocks as operators."""

from __future__ import annotations

from keepwise.estimator.attention import attention
from keepwise.estimator.context import Context
from keepwise.estimator.graph import Collective, Graph, Split
from keepwise.estimator.operators import Builder
from keepwise.estimator.spec import Block, Experts, Mlp


def block_graph(block: Block, width: int, context: Context, name: str) -> Graph:
    """One transformer block."""
    b = Builder(name, context, kv_heads=block.attention.kv_heads)
    residual = 4 if context.autocast else context.itemsize
    x = b.enter("hidden", context.rows * width, residual)
    b.graph.entry = x
    memory = None
    if block.cross is not None:
        memory = b.enter("memory", context.source_rows * width, residual, shared=True)
    b.graph.exit = _PLACEMENTS[block.placement](b, x, block, width, memory)
    return b.graph


def _norm(b: Builder, x: int, block: Block, width: int, name: str) -> int:
    return b.norm(x, block.norm, width, name, "", bias=block.norm_bias)


def _branch(b: Builder, x: int, block: Block, width: int, kind: str, memory: int | None = None) -> int:
    """Attention or feed-forward on normed states, with its dropout."""
    if kind == "attention":
        y = attention(b, x, block.attention, width)
    elif kind == "cross":
        assert block.cross is not None
        y = attention(b, x, block.cross, width, memory=memory, prefix="cross_attention")
    elif isinstance(block.feed_forward, Experts):
        y = experts(b, x, block.feed_forward, width)
    else:
        y = mlp(b, x, block.feed_forward, width)
    return b.dropout(y, block.dropout, f"{kind}.dropout", "dropout")


def _branches(block: Block) -> list[str]:
    return ["attention", *(["cross"] if block.cross is not None else []), "mlp"]


def _pre(b: Builder, x: int, block: Block, width: int, memory: int | None) -> int:
    for kind in _branches(block):
        y = _branch(b, _norm(b, x, block, width, f"{kind}_norm"), block, width, kind, memory)
        x = b.add(x, y, f"{kind}.residual", "residual")
    return x


def _post(b: Builder, x: int, block: Block, width: int, memory: int | None) -> int:
    for kind in _branches(block):
        y = b.add(x, _branch(b, x, block, width, kind, memory), f"{kind}.residual", "residual")
        x = _norm(b, y, block, width, f"{kind}_norm")
    return x


def _sandwich(b: Builder, x: int, block: Block, width: int, memory: int | None) -> int:
    for kind in _branches(block):
        y = _branch(b, _norm(b, x, block, width, f"{kind}_norm"), block, width, kind, memory)
        x = b.add(x, _norm(b, y, block, width, f"{kind}_post_norm"), f"{kind}.residual", "residual")
    return x


def _inner_post(b: Builder, x: int, block: Block, width: int, memory: int | None) -> int:
    for kind in _branches(block):
        y = _norm(b, _branch(b, x, block, width, kind, memory), block, width, f"{kind}_post_norm")
        x = b.add(x, y, f"{kind}.residual", "residual")
    return x


def _parallel(b: Builder, x: int, block: Block, width: int, memory: int | None) -> int:
    normed = _norm(b, x, block, width, "attention_norm")
    first = _branch(b, normed, block, width, "attention")
    other = normed if block.placement == "parallel" else _norm(b, x, block, width, "mlp_norm")
    second = _branch(b, other, block, width, "mlp")
    return b.add(b.add(second, first, "branches", "residual"), x, "residual", "residual")


_PLACEMENTS = {
    "pre": _pre,
    "post": _post,
    "sandwich": _sandwich,
    "inner_post": _inner_post,
    "parallel": _parallel,
    "parallel_two": _parallel,
}


def mlp(b: Builder, x: int, spec: Mlp, width: int, *, prefix: str = "mlp") -> int:
    """A dense feed-forward layer."""
    gathered = b.boundary(x, f"{prefix}.enter", prefix, leave=False)
    read = None if gathered == x else gathered
    hidden = _inner(b, x, spec, width, prefix, read)
    hidden = b.dropout(hidden, spec.dropout, f"{prefix}.inner_dropout", prefix)
    if spec.widens_inner:
        hidden = b.cast(hidden, b.context.weight_itemsize, f"{prefix}.inner_widened", prefix)
    y = b.linear(hidden, spec.inner, width, f"{prefix}.down", prefix, bias=spec.bias, parallel="row", targets=("down",))
    return b.boundary(y, f"{prefix}.leave", prefix, leave=True)


def _inner(b: Builder, x: int, spec: Mlp, width: int, prefix: str, read: int | None) -> int:
    """Up projection, gate and activation: the inner states."""
    if not spec.gated:
        up = b.linear(x, width, spec.inner, f"{prefix}.up", prefix, bias=spec.bias, targets=("up",), gathered=read)
        return b.activation(up, spec.activation, f"{prefix}.activation", prefix)
    if spec.fused_gate:
        both = b.linear(
            x, width, 2 * spec.inner, f"{prefix}.gate_up", prefix, bias=spec.bias, targets=("gate", "up"), gathered=read
        )
        return _gate(b, both, both, spec, prefix)
    gate = b.linear(x, width, spec.inner, f"{prefix}.gate", prefix, bias=spec.bias, targets=("gate",), gathered=read)
    up = b.linear(x, width, spec.inner, f"{prefix}.up", prefix, bias=spec.bias, targets=("up",), gathered=read)
    return _gate(b, gate, up, spec, prefix)


def _gate(b: Builder, gate: int, up: int, spec: Mlp, prefix: str) -> int:
    """act(gate) * up. `gate` and `up` may be one fused projection, whose halves are views."""
    module = f"{prefix}.activation"
    if spec.activation == "clamped_swiglu" and not b.context.fused_kernels:
        return _clamped_gate(b, gate, b.numel(gate) // 2, prefix)
    fused = gate == up
    if fused:
        half = b.numel(gate) // 2
        gate, up = b.views(gate, (half, half), (f"{prefix}.gate_half", f"{prefix}.up_half"), module)
    if b.context.fused_kernels:
        y = b.like(gate, f"{prefix}.gated")
        b.op(f"{prefix}.gated", module, [gate, up], [y], [gate, up])
        return y
    active = b.activation(gate, spec.activation, f"{prefix}.gate_active", prefix)
    return b.multiply(active, up, f"{prefix}.gated", module)


def _clamped_gate(b: Builder, both: int, numel: int, prefix: str) -> int:
    """(clamp(up) + 1) * clamp(gate) * sigmoid(alpha * clamp(gate)), the gate of gpt-oss."""
    module, size, split = f"{prefix}.activation", b.itemsize(both), b.split(both)
    gate_half, up_half = b.views(both, (numel, numel), (f"{prefix}.gate_half", f"{prefix}.up_half"), module)

    def make(name: str) -> int:
        return b.value(f"{prefix}.{name}", numel, size, split=split)

    gate = make("gate_clamped")
    b.op(f"{prefix}.gate_clamped", module, [gate_half], [gate], [both])
    up = make("up_clamped")
    b.op(f"{prefix}.up_clamped", module, [up_half], [up], [both])
    sigmoid = make("sigmoid")
    b.op(f"{prefix}.sigmoid", module, [gate], [sigmoid], [sigmoid])
    active = b.multiply(gate, sigmoid, f"{prefix}.gate_active", module)
    return b.multiply(b.pointwise(up, f"{prefix}.up_plus_one", module), active, f"{prefix}.gated", module)


def experts(b: Builder, x: int, spec: Experts, width: int) -> int:
    """A mixture of experts: router, permuted copies of the tokens, two grouped products, weighted sum.

    Tokens are taken to be routed evenly. Under expert parallelism each rank sends its tokens away and works on as many of others.
    """
    context, prefix, module = b.context, "moe", "moe.experts"
    # A gated shared expert runs first, so that it is still alive when the routed ones are in backward.
    shared = _shared_expert(b, x, spec, width, prefix) if spec.shared is not None and spec.shared_gate else None
    rows, chosen = context.rows, context.rows * spec.active
    states = b.cast(x, 4, "moe.router_states", "moe.router") if spec.wide_router else x
    logits = b.linear(states, width, spec.num, "moe.router", "moe.router", bias=spec.router_bias, parallel="none")
    logits = b.cast(logits, 4, "moe.router_logits", "moe.router")
    scores = b.pointwise(logits, "moe.router_scores", "moe.router", saves="result")
    index = b.value("moe.chosen", chosen, 8, kind="index")
    weights = b.value("moe.weights", chosen, 4)
    extra_saves = [index]
    if spec.renormalised:
        total = b.value("moe.total", rows, 4, kind="statistic")
        b.op("moe.choose", "moe.router", [scores], [index, weights, total], [index, weights, total])
    else:
        b.op("moe.choose", "moe.router", [scores], [index, weights], extra_saves)
    order = b.value("moe.order", chosen * (1 if context.fused_kernels else 3), 8, kind="index")
    size = b.itemsize(x)
    tokens = b.value("moe.tokens", chosen * width, size)
    ranks = context.expert_parallel
    exchange: list[Collective] = [
        Collective(group="expert", kind="all_to_all", num_bytes=int(chosen * width * size), phase=p, ranks=ranks)
        for p in ("forward", "backward")
        if context.expert_parallel > 1
    ]
    b.op("moe.dispatch", module, [x, index], [order, tokens], [order], collectives=exchange)
    result = _grouped(b, tokens, spec, width, module)
    if context.fused_kernels:
        merged = b.value("moe.result", rows * width, size)
        b.op("moe.combine", module, [result, weights], [merged], [weights], collectives=exchange)
    else:
        wide = max(b.itemsize(result), 4) if spec.wide_weights else b.itemsize(result)
        scaled = b.value("moe.scaled", chosen * width, wide)
        spread = b.value("moe.spread_weights", chosen, 4)
        # The weights' gradient is a product of full size that is summed over the width.
        extra = b.graph.values[scaled].num_bytes * (1 if wide == b.itemsize(result) else 2)
        b.op("moe.scale", module, [result, weights], [scaled, spread], [result, spread], backward_extra=extra)
        merged = b.value("moe.result", rows * width, size)
        b.op("moe.combine", module, [scaled], [merged], collectives=exchange)
    if spec.shared is None:
        return merged
    shared = _shared_expert(b, x, spec, width, prefix) if shared is None else shared
    if spec.shared_gate:
        shared = _gate_shared(b, x, shared, width, prefix)
    return b.add(merged, shared, "moe.sum", "moe")


def _grouped(b: Builder, tokens: int, spec: Experts, width: int, module: str) -> int:
    """The experts' products, grouped. They are not cast by autocast, and a frozen base saves no input."""
    context, inner = b.context, spec.expert.inner
    rows = b.numel(tokens) // width
    size, train = b.itemsize(tokens), context.train_base
    up_width = inner * (2 if spec.expert.gated else 1)
    biases = [("up", up_width), ("down", width)] if spec.expert.bias else []
    b.parameter("moe.experts.up", up_width, width, count=spec.num, split="expert", role="matrix")
    b.parameter("moe.experts.down", width, inner, count=spec.num, split="expert", role="matrix")
    for name, length in biases:
        b.parameter(f"moe.experts.{name}_bias", length, count=spec.num, split="expert")
    local = spec.num / context.expert_parallel
    share = 1.0 / context.tensor_parallel

    def product(x: int, inputs: int, outputs: int, name: str, split: Split) -> int:
        source = x
        saves: list[int] = []
        extra: list[int] = []
        if train and context.fp8:
            narrow = b.value(f"{name}.fp8_input", b.numel(x), 1, split=b.split(x), kind="mask")
            extra, saves = [narrow], [narrow]
        elif train:
            saves = [source]
        y = b.value(name, rows * outputs, size, split=split)
        flops = 2.0 * rows * inputs * outputs * share
        gradient = int(local * inputs * outputs * context.itemsize * share) if train and context.held_gradients else 0
        b.op(
            name, module, [source], [*extra, y], saves, kind="matmul", flops=flops,
            backward_flops=flops * (2 if train else 1), backward_extra=gradient,
        )  # fmt: skip
        return y

    up = product(tokens, width, up_width, "moe.experts.up", "tensor")
    hidden = (
        _gate(b, up, up, spec.expert, "moe.experts")
        if spec.expert.gated
        else b.activation(up, spec.expert.activation, "moe.experts.activation", "moe.experts")
    )
    return product(hidden, inner, width, "moe.experts.down", "sequence")


def _shared_expert(b: Builder, x: int, spec: Experts, width: int, prefix: str) -> int:
    assert spec.shared is not None
    return mlp(b, x, spec.shared, width, prefix=f"{prefix}.shared")


def _gate_shared(b: Builder, x: int, y: int, width: int, prefix: str) -> int:
    """The shared expert's result times a sigmoid of the token's state."""
    logit = b.linear(x, width, 1, f"{prefix}.shared_gate", f"{prefix}.router", parallel="none")
    gate = b.pointwise(logit, f"{prefix}.shared_gate_value", f"{prefix}.router", saves="result")
    scaled = b.like(y, f"{prefix}.shared_scaled")
    b.op(f"{prefix}.shared_scaled", f"{prefix}.shared", [y, gate], [scaled], [y, gate])
    return scaled
