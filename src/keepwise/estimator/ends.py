"""What stands before the first block of a stack and behind the last one: embeddings, final norm, logits and loss."""

from __future__ import annotations

from typing import Literal

from keepwise.estimator.context import Context
from keepwise.estimator.graph import Graph
from keepwise.estimator.operators import Builder
from keepwise.estimator.spec import Architecture, Head, Stack

Loss = Literal["eager", "chunked", "fused"]
"""`eager`: logits in full; `chunked`: one chunk of tokens at a time, rebuilt in backward; `fused`: no logits at all."""

LOSS_CHUNKS = 8
"""chunks of the chunked loss."""


def prelude_graph(architecture: Architecture, stack: Stack, context: Context, *, first: bool) -> Graph:
    """Embeddings of a stack: token, position and type tables, or patches, or convolutions over a spectrogram."""
    b = Builder(f"{stack.name}.embeddings", context)
    width, rows = architecture.width, context.rows
    wide = 4 if context.autocast else context.itemsize
    if stack.prelude == "tokens":
        b.graph.input_bytes = 8 * rows
        index = b.enter("tokens", rows, 8, kind="index")
        if first and architecture.vocab:
            b.parameter("embeddings.tokens", architecture.vocab, width, split="tensor", role="table")
        saves = [] if first else [index]  # the caller holds the model's own inputs; shifted labels are a copy
        if stack.extra_parameters:
            b.parameter("embeddings.position_buckets", stack.extra_parameters)
        if stack.token_types:
            types = b.value("embeddings.types", rows, 8, kind="index")
            b.op("embeddings.types", "embeddings", [], [types], [types])
        x = b.value("embeddings.sum", rows * width, wide)
        b.op("embeddings.sum", "embeddings", [index], [x], saves)
    elif stack.prelude == "patches":
        b.graph.input_bytes = stack.image_values * context.batch * context.weight_itemsize
        b.parameter("embeddings.patches", 1, stack.extra_parameters)
        x = b.value("embeddings.patches", rows * width, context.itemsize)
        casts = _prelude_casts(b, stack, stack.image_values * context.batch)
        flops = 2.0 * stack.image_values * context.batch * width
        b.op("embeddings.patches", "embeddings", [], [*casts, x], casts, kind="matmul", flops=flops)
    else:
        x = _audio(b, stack, width)
    if stack.positions:
        fixed = not stack.trained_positions
        b.parameter("embeddings.positions", stack.positions, width, role="table", fixed=fixed)
    if stack.token_types:
        b.parameter("embeddings.types", stack.token_types, width, role="table")
    if stack.embedding_norm:
        x = b.norm(x, "layer", width, "embeddings.norm", "embeddings")
    x = b.dropout(x, stack.embedding_dropout, "embeddings.dropout", "embeddings")
    b.graph.exit = x
    return b.graph


def _prelude_casts(b: Builder, stack: Stack, num_inputs: int) -> list[int]:
    """Under autocast a convolution keeps narrow copies of its input and its weight."""
    if not b.context.autocast:
        return []
    size = b.context.itemsize
    return [
        b.value("embeddings.input_cast", num_inputs, size, kind="mask"),
        b.value("embeddings.weight_cast", stack.extra_parameters, size, split="whole", kind="weight cast"),
    ]


def _audio(b: Builder, stack: Stack, width: int) -> int:
    """Two convolutions with GELU over a mel spectrogram of twice the length (Whisper)."""
    frames = 2 * b.context.rows
    itemsize = b.context.itemsize
    b.graph.input_bytes = frames * stack.audio_channels * b.context.weight_itemsize
    b.parameter("embeddings.convolutions", 1, stack.extra_parameters)
    first = b.value("embeddings.first", frames * width, itemsize)
    flops = 2.0 * frames * width * 3 * stack.audio_channels
    casts = _prelude_casts(b, stack, frames * stack.audio_channels)
    b.op("embeddings.first", "embeddings", [], [*casts, first], casts, kind="matmul", flops=flops)
    active = b.activation(first, "gelu", "embeddings.first_active", "embeddings")
    second = b.value("embeddings.second", frames // 2 * width, itemsize)
    b.op(
        "embeddings.second",
        "embeddings",
        [active],
        [second],
        [active],
        kind="matmul",
        flops=frames * width * width * 3.0,
    )
    return b.activation(second, "gelu", "embeddings.second_active", "embeddings")


def end_graph(architecture: Architecture, stack: Stack, context: Context) -> Graph | None:
    """Final norm of a stack that is not the last one."""
    if stack.final_norm is None:
        return None
    b = Builder(f"{stack.name}.end", context)
    residual = 4 if context.autocast else context.itemsize
    b.graph.entry = b.enter("hidden", context.rows * architecture.width, residual)
    x = b.norm(b.graph.entry, stack.final_norm, architecture.width, "final_norm", "")
    b.graph.exit = b.dropout(x, stack.final_dropout, "final_dropout", "")
    return b.graph


def head_graph(architecture: Architecture, stack: Stack, context: Context, loss: Loss) -> Graph:
    """Final norm, output projection and loss."""
    head, width = architecture.head, architecture.width
    b = Builder("head", context)
    residual = 4 if context.autocast else context.itemsize
    x = b.graph.entry = b.enter("hidden", context.rows * width, residual)
    if stack.final_norm is not None:
        x = b.norm(x, stack.final_norm, width, "final_norm", "")
        x = b.dropout(x, stack.final_dropout, "final_dropout", "")
    if head.kind == "none":
        b.graph.exit = x
        return b.graph
    b.graph.in_hand.add(x)
    b.graph.input_bytes = 8 * (context.batch if head.kind == "classifier" else context.rows)
    if head.kind == "classifier":
        return _classifier(b, x, head, width)
    if head.kind == "mlm":
        x = b.linear(x, width, width, "head.transform", "head", bias=True, parallel="none")
        x = b.activation(x, head.activation, "head.transform_active", "head")
        x = b.norm(x, "layer", width, "head.transform_norm", "head")
    return _language_head(b, x, head, width, loss)


def _classifier(b: Builder, x: int, head: Head, width: int) -> Graph:
    """One label a sequence from one token's state, which is copied out."""
    batch = b.context.batch
    picked = b.value("head.picked", batch * width, b.itemsize(x))
    # One token's state is a view: what is saved for the projection is the whole normed sequence.
    b.op("head.picked", "head", [x], [picked], [x] if not b.context.autocast else [])
    logits = b.linear(picked, width, head.outputs, "head.logits", "head", bias=head.bias, parallel="none")
    probabilities = b.pointwise(logits, "head.log_probabilities", "loss", saves="result")
    loss = b.value("loss", 1, 4, split="whole")
    b.op("loss", "loss", [probabilities], [loss], [probabilities])
    b.graph.exit = loss
    b.graph.output = logits
    return b.graph


def _language_head(b: Builder, x: int, head: Head, width: int, loss: Loss) -> Graph:
    """Logits over the vocabulary and cross entropy: log-softmax keeps its result in fp32."""
    context, rows = b.context, b.context.rows
    b.parameter("head.logits.weight", head.outputs, width, split="tensor", role="table")
    if head.tied:
        b.graph.tied = b.graph.parameters.pop()
    if head.bias:
        b.parameter("head.logits.bias", head.outputs, split="tensor")
    gathered = b.boundary(x, "head.enter", "head", leave=False)
    read = None if gathered == x else gathered
    flops = 2.0 * rows * width * head.outputs / context.tensor_parallel
    if loss != "eager":
        return _logits_free(b, x, gathered, flops, head, loss)
    # The output projection is trained like a table; adapters seldom touch it.
    logits = b.linear(x, width, head.outputs, "head.logits", "head", count_parameters=False, gathered=read)
    if head.softcap:
        scaled = b.pointwise(logits, "head.softcap_input", "head")
        logits = b.pointwise(b.pointwise(scaled, "head.softcap", "head", saves="result"), "head.logits_capped", "head")
    b.graph.output = logits
    wide = b.cast(logits, 4, "head.logits_wide", "loss") if head.upcast or context.autocast else logits
    probabilities = b.pointwise(wide, "loss.log_probabilities", "loss", saves="result")
    value = b.value("loss", 1, 4, split="whole")
    saves = [probabilities]
    outputs = [value]
    if head.shifted:
        labels = b.value("loss.labels", rows, 8, kind="index")
        outputs.append(labels)
        saves.append(labels)
    b.op("loss", "loss", [probabilities], outputs, saves)
    b.graph.exit = value
    return b.graph


def _logits_free(b: Builder, x: int, gathered: int, flops: float, head: Head, loss: Loss) -> Graph:
    """Chunked or fused losses: the logits of one chunk only, once more in backward when chunked."""
    context = b.context
    whole = context.rows * head.outputs // context.tensor_parallel
    chunk = whole // LOSS_CHUNKS * (context.itemsize + 8) if loss == "chunked" else 0
    value = b.value("loss", 1, 4, split="whole")
    weight_gradient = head.outputs * b.numel(x) // context.rows * context.itemsize // context.tensor_parallel
    b.op(
        "loss", "loss", [gathered], [value], [x], kind="matmul", flops=flops, backward_flops=3 * flops,
        forward_extra=chunk, backward_extra=chunk + (weight_gradient if context.train_base else 0),
    )  # fmt: skip
    b.graph.exit = value
    return b.graph
