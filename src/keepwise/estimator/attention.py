"""Attention layers as operators: projections, positions, kernel, output projection."""

from __future__ import annotations

from typing import Literal

from keepwise.estimator.context import Context
from keepwise.estimator.graph import Collective
from keepwise.estimator.operators import Builder
from keepwise.estimator.spec import Attention


def attention(
    b: Builder, x: int, spec: Attention, width: int, *, memory: int | None = None, prefix: str = "attention"
) -> int:
    """One attention layer on normed states `x`; with `memory` (the encoder's output) keys and values come from there."""
    gathered = b.boundary(x, f"{prefix}.enter", prefix, leave=False)
    read = None if gathered == x else gathered
    if spec.latent is not None:
        query, key, value = _latent_projections(b, x, read, spec, width, prefix)
    else:
        query, key, value = _projections(b, x, read, spec, width, prefix, memory)
        query, key = _query_norms(b, query, key, spec, prefix)
        if spec.rotary:
            query = _rotate(b, query, spec, f"{prefix}.rotary_query", prefix)
            key = _rotate(b, key, spec, f"{prefix}.rotary_key", prefix)
    if b.context.autocast:
        query = b.cast(query, b.context.itemsize, f"{prefix}.query_cast", prefix)
        key = b.cast(key, b.context.itemsize, f"{prefix}.key_cast", prefix)
    if spec.sinks:
        b.parameter(f"{prefix}.sinks", spec.heads, split="tensor")
    result = _kernel(b, query, key, value, spec, prefix, cross=memory is not None)
    y = b.linear(
        result,
        spec.heads * spec.value_dim,
        width,
        f"{prefix}.output",
        prefix,
        bias=spec.bias[3],
        parallel="row",
        targets=("o",),
    )
    return b.boundary(y, f"{prefix}.leave", prefix, leave=True)


def _projections(
    b: Builder, x: int, gathered: int | None, spec: Attention, width: int, prefix: str, memory: int | None
) -> tuple[int, int, int]:
    queries, keys, values = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.value_dim
    if spec.fused_qkv:
        fused = b.linear(
            x,
            width,
            queries + keys + values,
            f"{prefix}.qkv",
            prefix,
            bias=spec.bias[0],
            targets=("q", "k", "v"),
            gathered=gathered,
        )
        names = (f"{prefix}.query", f"{prefix}.key", f"{prefix}.value")
        query, key, value = b.views(fused, [b.context.rows * n for n in (queries, keys, values)], names, prefix)
        return query, key, value
    source, read = (x, gathered) if memory is None else (memory, None)
    query = b.linear(x, width, queries, f"{prefix}.query", prefix, bias=spec.bias[0], targets=("q",), gathered=gathered)
    key = b.linear(
        source,
        width,
        keys,
        f"{prefix}.key",
        prefix,
        bias=spec.bias[1],
        parallel="kv_column",
        targets=("k",),
        gathered=read,
    )
    value = b.linear(
        source,
        width,
        values,
        f"{prefix}.value",
        prefix,
        bias=spec.bias[2],
        parallel="kv_column",
        targets=("v",),
        gathered=read,
    )
    return query, key, value


def _query_norms(b: Builder, query: int, key: int, spec: Attention, prefix: str) -> tuple[int, int]:
    if spec.query_norm is None:
        return query, key
    per_head = spec.query_norm_width == "head"
    query_width = spec.head_dim if per_head else spec.heads * spec.head_dim
    key_width = spec.head_dim if per_head else spec.kv_heads * spec.head_dim
    return (
        b.norm(query, spec.query_norm, query_width, f"{prefix}.query_norm", prefix),
        b.norm(key, spec.query_norm, key_width, f"{prefix}.key_norm", prefix),
    )


def _rotate(b: Builder, x: int, spec: Attention, name: str, module: str) -> int:
    """Rotary positions: a new tensor; the angles are shared by all layers."""
    context = b.context
    angles = _angles(b, spec)
    itemsize = max(b.itemsize(x), 4) if context.autocast else b.itemsize(x)
    y = b.like(x, name, itemsize=itemsize)
    extra = 0 if context.fused_kernels else 2 * b.graph.values[y].num_bytes
    b.op(name, f"{module}.rotary", [x], [y], [angles], forward_extra=extra, backward_extra=extra)
    return y


def _angles(b: Builder, spec: Attention) -> int:
    for value in b.graph.values:
        if value.name == "angles":
            return value.index
    context = b.context
    width = spec.latent.rope_dim if spec.latent else spec.head_dim
    itemsize = 4 if context.autocast else context.itemsize
    return b.enter("angles", 2 * context.length * width, itemsize, shared=True, kind="constant")


def _latent_projections(
    b: Builder, x: int, gathered: int | None, spec: Attention, width: int, prefix: str
) -> tuple[int, int, int]:
    """Compressed queries and keys: two narrow projections, norms, two wide ones, and the concatenation with the rotated part."""
    latent = spec.latent
    assert latent is not None
    rows, heads = b.context.rows, spec.heads
    queries = heads * spec.head_dim
    if latent.query_rank is None:
        query = b.linear(x, width, queries, f"{prefix}.query", prefix, targets=("q",), gathered=gathered)
    else:
        narrow = b.linear(
            x,
            width,
            latent.query_rank,
            f"{prefix}.query_down",
            prefix,
            bias=spec.bias[0],
            parallel="none",
            targets=("q",),
        )
        narrow = b.norm(narrow, "rms", latent.query_rank, f"{prefix}.query_down_norm", prefix)
        query = b.linear(narrow, latent.query_rank, queries, f"{prefix}.query", f"{prefix}.latent_up", targets=("q",))
    both = b.linear(
        x,
        width,
        latent.key_rank + latent.rope_dim,
        f"{prefix}.key_down",
        prefix,
        bias=spec.bias[1],
        parallel="none",
        targets=("k",),
    )
    names = (f"{prefix}.key_compressed", f"{prefix}.key_rotated")
    compressed, rotated = b.views(both, (rows * latent.key_rank, rows * latent.rope_dim), names, prefix)
    normed = b.norm(compressed, "rms", latent.key_rank, f"{prefix}.key_norm", prefix)
    nope = spec.head_dim - latent.rope_dim
    key_value = b.linear(
        normed,
        latent.key_rank,
        heads * (nope + spec.value_dim),
        f"{prefix}.key_value_up",
        f"{prefix}.latent_up",
        targets=("k", "v"),
    )
    angles = _angles(b, spec)
    key = b.value(f"{prefix}.key_joined", rows * queries, b.itemsize(key_value), split="tensor")
    b.op(f"{prefix}.key_joined", f"{prefix}.latent_up", [key_value, rotated], [key], [angles])
    joined = b.value(f"{prefix}.query_joined", rows * queries, b.itemsize(query), split="tensor")
    b.op(f"{prefix}.query_joined", f"{prefix}.latent_up", [query], [joined], [angles])
    return joined, key, key_value


def _kernel(b: Builder, query: int, key: int, value: int, spec: Attention, prefix: str, *, cross: bool) -> int:
    context = b.context
    rows, heads = context.rows, spec.heads
    keys = context.source_length if cross else context.length
    seen = min(keys, spec.window) if spec.window else keys
    # A causal kernel skips half of the scores when it is fused; the matrix form computes all of them.
    fused = _can_fuse(spec, context)
    share = 0.5 if spec.causal and not cross and seen == keys and fused == "fused" else 1.0
    products = 2.0 * rows * (seen if fused == "fused" else keys) * heads * (spec.head_dim + spec.value_dim)
    products *= share / context.tensor_parallel
    if fused == "fused":
        return _fused_kernel(b, query, key, value, spec, prefix, products, keys, cross=cross)
    return _matrix_kernel(
        b, query, key, value, spec, prefix, products, keys, inside_sdpa=fused == "fallback", cross=cross
    )


def _can_fuse(spec: Attention, context: Context) -> Literal["fused", "fallback", "eager"]:
    """Whether the kernel that was asked for can run: fused, as the matrix form inside SDPA, or as written in Python."""
    if context.attention == "eager" or (context.attention == "sdpa" and (spec.softcap or spec.sinks)):
        return "eager"  # transformers refuses SDPA for these
    if context.attention == "flash" and spec.relative_bias:
        return "eager"
    trained_bias = spec.relative_bias or (spec.zero_bias and context.checkpointed)
    if context.cpu and (spec.dropout > 0 or trained_bias or spec.head_dim != spec.value_dim):
        return "fallback"
    return "fused"


def _ring(b: Builder, key: int, value: int) -> list[Collective]:
    """Context parallelism sends keys and values around the ring, and their gradients back."""
    context = b.context
    if context.context_parallel == 1:
        return []
    size = int(sum(b.graph.values[v].gradient_bytes for v in (key, value))) * (context.context_parallel - 1)
    ranks = context.context_parallel
    return [
        Collective(group="context", kind="ring", num_bytes=size, phase=p, ranks=ranks) for p in ("forward", "backward")
    ]


def _fused_kernel(
    b: Builder, query: int, key: int, value: int, spec: Attention, prefix: str, flops: float, keys: int, *, cross: bool
) -> int:
    """FlashAttention and its like: saves its inputs, its result and one number a row and head."""
    context, module = b.context, f"{prefix}.core"
    rows, heads = context.rows, spec.heads
    masked = context.attention == "sdpa" and spec.window is not None and spec.window < keys
    if masked and spec.heads != spec.kv_heads:
        key_rows = context.source_rows if cross else rows
        key = _expanded(b, key, key_rows * heads * spec.head_dim, f"{prefix}.key_expanded", module)
        value = _expanded(b, value, key_rows * heads * spec.value_dim, f"{prefix}.value_expanded", module)
    saves = [query, key, value]
    if masked:  # a bool mask is made additive once a layer
        mask = b.value(f"{prefix}.mask", rows * keys, context.itemsize, split="whole", kind="mask")
        b.op(f"{prefix}.mask", module, [_shared_mask(b, spec, rows * keys, 1)], [mask])
        saves.append(mask)
    if spec.zero_bias and context.attention == "sdpa":
        saves.append(
            b.enter("zero_bias", heads * context.length * keys, context.itemsize, shared=True, kind="constant")
        )
    if spec.relative_bias:
        bias = b.value(
            f"{prefix}.bias", heads * context.length * keys, context.itemsize, split="tensor", kind="statistic"
        )
        b.op(f"{prefix}.bias", module, [], [bias])
        saves.append(bias)
    statistics = b.value(f"{prefix}.log_sum", rows * heads, 4, split="tensor", kind="statistic")
    out = b.value(f"{prefix}.result", rows * heads * spec.value_dim, context.itemsize, split="tensor")
    accumulator = 0 if context.cpu else rows * heads * spec.head_dim * 4 // context.tensor_parallel
    key_value_bytes = sum(b.graph.values[v].gradient_bytes for v in (key, value))
    ring_buffer = 2 * key_value_bytes if context.context_parallel > 1 else 0
    b.op(
        f"{prefix}.kernel",
        module,
        dict.fromkeys((query, key, value)),
        [statistics, out],
        [*dict.fromkeys(saves), out, statistics],
        kind="attention",
        flops=flops,
        backward_flops=2.5 * flops,  # the kernel rebuilds the scores itself
        forward_extra=ring_buffer,
        backward_extra=accumulator + ring_buffer,
        collectives=_ring(b, key, value),
    )
    if spec.copied_result and context.cpu:
        copy = b.like(out, f"{prefix}.result_copy")
        b.op(f"{prefix}.result_copy", module, [out], [copy])
        return copy
    return out


def _shared_mask(b: Builder, spec: Attention, numel: int, itemsize: float) -> int:
    """The mask that all layers with this window share; autograd does not save it, but blocks that run again read it."""
    name = f"mask of {spec.window} tokens" if spec.window else "mask"
    for value in b.graph.values:
        if value.name == name:
            return value.index
    return b.enter(name, numel, itemsize, shared=True, kind="constant")


def _expanded(b: Builder, x: int, numel: int, name: str, module: str) -> int:
    y = b.value(name, numel, b.itemsize(x), split="tensor")
    b.op(name, module, [x], [y])
    return y


def _matrix_kernel(
    b: Builder,
    query: int,
    key: int,
    value: int,
    spec: Attention,
    prefix: str,
    flops: float,
    keys: int,
    *,
    inside_sdpa: bool,
    cross: bool,
) -> int:
    """Scores, softmax, dropout and product as separate operators: the a*s^2 term.

    Batched products save copies of queries, keys and values (their heads are not contiguous), as does the fallback inside
    `scaled_dot_product_attention`, which works in fp32.
    """
    context, module = b.context, f"{prefix}.core"
    rows, heads = context.rows, spec.heads
    key_rows = context.source_rows if cross else rows
    wide = 4 if inside_sdpa else b.itemsize(query)
    layout = context.fused_kernels and not inside_sdpa  # Megatron keeps the projections' own layout
    q, k, v = query, key, value
    if not layout or spec.heads != spec.kv_heads:
        q = b.value(f"{prefix}.query_copy", rows * heads * spec.head_dim, wide, split="tensor")
        b.op(f"{prefix}.query_copy", module, [query], [q])
        k = b.value(f"{prefix}.key_copy", key_rows * heads * spec.head_dim, wide, split="tensor")
        b.op(f"{prefix}.key_copy", module, [key], [k])
        v = b.value(f"{prefix}.value_copy", key_rows * heads * spec.value_dim, wide, split="tensor")
        b.op(f"{prefix}.value_copy", module, [value], [v])
    size = rows * (keys + spec.sinks) * heads
    scores = b.value(f"{prefix}.scores", size, wide, split="tensor")
    first = flops * spec.head_dim / (spec.head_dim + spec.value_dim)
    b.op(
        f"{prefix}.scores",
        module,
        dict.fromkeys((q, k)),
        [scores],
        dict.fromkeys((q, k)),
        kind="attention",
        flops=first,
    )
    x = b.pointwise(scores, f"{prefix}.scaled", module) if not layout else scores
    if spec.relative_bias or spec.zero_bias:
        bias = b.enter("position_bias", heads * context.length * keys, wide, shared=True)
        x = b.add(x, bias, f"{prefix}.biased", module)
    if spec.softcap:
        x = b.pointwise(b.pointwise(x, f"{prefix}.softcap", module, saves="result"), f"{prefix}.capped", module)
    if spec.sinks:  # the largest score of each row is taken off, and its place is saved
        place = b.value(f"{prefix}.largest", rows * heads, 8, split="tensor", kind="index")
        y = b.like(x, f"{prefix}.shifted")
        b.op(f"{prefix}.shifted", module, [x], [place, y], [place])
        x = y
    # A fused scale-mask-softmax works in the storage type; the Python form widens, keeps the wide result and narrows a copy.
    wide_softmax = spec.softmax_wide or (context.autocast and (spec.causal or not context.cpu))
    widened = b.cast(x, 4, f"{prefix}.scores_wide", module) if wide_softmax and not layout and not inside_sdpa else x
    weights = b.like(widened, f"{prefix}.weights")
    causal = spec.causal and not (cross or inside_sdpa or layout or spec.relative_bias)
    masks = [_shared_mask(b, spec, rows * keys, wide)] if causal else []
    b.op(f"{prefix}.weights", module, [widened, *masks], [weights], [weights])
    weights = b.cast(weights, wide, f"{prefix}.weights_narrow", module)
    weights = b.dropout(weights, spec.dropout, f"{prefix}.weights_dropout", module)
    out = b.value(f"{prefix}.product", rows * heads * spec.value_dim, wide, split="tensor")
    b.op(
        f"{prefix}.product",
        module,
        dict.fromkeys((weights, v)),
        [out],
        dict.fromkeys((weights, v)),
        kind="attention",
        flops=flops - first,
    )
    if layout:
        return out
    copy = b.value(f"{prefix}.result", rows * heads * spec.value_dim, context.itemsize, split="tensor")
    b.op(f"{prefix}.result", module, [out], [copy])
    return copy
