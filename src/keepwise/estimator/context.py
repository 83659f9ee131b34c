"""The numbers that every operator needs: sizes of the sequence, bytes of each type, degrees of parallelism, kernels."""

from __future__ import annotations

from typing import Literal

import msgspec

AttentionKernel = Literal["eager", "sdpa", "flash"]
"""Matrix products and a softmax in Python; `scaled_dot_product_attention`; FlashAttention called directly."""


class Context(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and choices that hold for all operators of one stack on one rank."""

    batch: int
    """sequences in a micro-batch on one rank."""
    rows: int
    """tokens in a micro-batch on one rank (context parallelism already taken off)."""
    length: int
    """tokens in one whole sequence."""
    source_rows: int
    """tokens of the encoder's output on one rank (0 without an encoder)."""
    source_length: int
    """tokens in one encoder sequence."""
    itemsize: int
    """bytes of a value that a matrix product makes."""
    weight_itemsize: int
    """bytes of a stored weight."""
    autocast: bool
    """weights and norms stay fp32 and matrix products cast their inputs."""
    fp8: bool
    """matrix products keep their inputs in 8 bit."""
    fused_kernels: bool
    """norms, activations and rotations are single kernels that keep only their inputs."""
    attention: AttentionKernel
    """kernel that was asked for; `sdpa` and `flash` never store the attention matrix where they can run."""
    cpu: bool
    """CPU kernels: dropout keeps its noise in full width, fused attention has no dropout."""
    tensor_parallel: int
    """ranks that share each matrix."""
    sequence_parallel: bool
    """norms, dropouts and residuals are divided among these ranks too."""
    context_parallel: int
    """ranks that share each sequence."""
    expert_parallel: int
    """ranks that share the experts."""
    train_base: bool
    """whether the base weights are trained."""
    lora_rank: int
    """rank of the adapters, 0 without."""
    lora_targets: frozenset[str]
    """projections that have adapters ("q", "k", "v", "o", "gate", "up", "down")."""
    lora_dropout: float
    """dropout before the adapters."""
    quantised: bool
    """base matrices are stored in few bits and expanded when used."""
    checkpointed: bool
    """blocks are rebuilt: transformers then gives T5's cross-attention a bias with gradients, which rules out fused CPU kernels."""
    held_gradients: bool
    """gradient buffers exist all the time, so that each new one is added to them."""
