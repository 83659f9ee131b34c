"""What an architecture is, as far as memory and cost are concerned. Plain data; `families` fills it from configurations."""

from __future__ import annotations

from typing import Literal

import msgspec

NormKind = Literal["layer", "rms", "rms_wide", "rms_one_plus", "rms_promote"]
"""`rms_wide` scales in fp32 (OLMo 2, gpt-oss), `rms_one_plus` by 1 + weight too (Gemma); `rms_promote` multiplies the 16-bit
input by an fp32 factor (T5)."""

Placement = Literal["pre", "post", "sandwich", "inner_post", "parallel", "parallel_two"]
"""Where a block's norms stand: before each branch, after each residual sum, both, on each branch's result, or before
parallel branches."""


class Latent(msgspec.Struct, frozen=True, kw_only=True):
    """Compressed queries and keys of multi-head latent attention (DeepSeek-V2, section 2.1)."""

    query_rank: int | None
    """width of the compressed query; None: queries are projected directly."""
    key_rank: int
    """width of the compressed keys and values."""
    rope_dim: int
    """width a head of the part that carries positions (shared by all heads in keys)."""


class Attention(msgspec.Struct, frozen=True, kw_only=True):
    """One attention layer."""

    heads: int
    """query heads."""
    kv_heads: int
    """key and value heads; fewer than `heads` under grouped-query attention."""
    head_dim: int
    """width of a query or key head."""
    value_dim: int
    """width of a value head."""
    bias: tuple[bool, bool, bool, bool] = (False, False, False, False)
    """whether the query, key, value and output projections have a bias."""
    fused_qkv: bool = False
    """one projection whose views are used as queries, keys and values (GPT-2, GPT-NeoX, Phi-3)."""
    rotary: bool = False
    """queries and keys are rotated, which makes new tensors of both."""
    copied_result: bool = False
    """the queries' layout makes CPU kernels return a layout that the output projection copies."""
    query_norm: NormKind | None = None
    """norm of queries and keys before the kernel."""
    query_norm_width: Literal["head", "all"] = "head"
    """whether that norm runs over one head or over all of them."""
    causal: bool = True
    """each token attends to itself and those before it."""
    window: int | None = None
    """tokens in a sliding window, or None."""
    softcap: bool = False
    """scores go through tanh, which no common fused kernel does."""
    softmax_wide: bool = False
    """the Python form of the kernel takes the softmax in fp32."""
    relative_bias: bool = False
    """a learned bias is added to the scores (T5)."""
    zero_bias: bool = False
    """a bias of zeros, shared by all layers, is passed to the kernel (T5's cross-attention)."""
    sinks: bool = False
    """one learned logit a head joins the softmax (gpt-oss)."""
    dropout: float = 0.0
    """probability that a weight of the attention matrix is dropped."""
    latent: Latent | None = None
    """multi-head latent attention, or None."""


class Mlp(msgspec.Struct, frozen=True, kw_only=True):
    """One feed-forward layer."""

    inner: int
    """inner width."""
    activation: str
    """name as in Hugging Face configurations ("silu", "gelu_new", ...)."""
    gated: bool = False
    """act(gate) * up instead of act(up)."""
    fused_gate: bool = False
    """gate and up are one projection."""
    bias: bool = False
    """whether the projections have biases."""
    dropout: float = 0.0
    """probability that an inner unit is dropped."""
    widens_inner: bool = False
    """the inner states are cast to the type of the stored weights before the last projection (T5)."""


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """A mixture of expert feed-forward layers."""

    num: int
    """experts in all."""
    active: int
    """experts a token."""
    expert: Mlp
    """one expert."""
    shared: Mlp | None = None
    """an expert that every token visits."""
    shared_gate: bool = False
    """whether the shared expert's result is scaled by a learned gate."""
    renormalised: bool = True
    """whether the chosen weights are divided by their sum."""
    wide_router: bool = False
    """whether the router works on an fp32 copy of the states."""
    wide_weights: bool = False
    """whether the chosen weights stay fp32, which widens the experts' weighted results."""
    router_bias: bool = False
    """whether the router has a trained bias."""


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """One transformer block."""

    norm: NormKind
    """kind of all its norms."""
    attention: Attention
    """self-attention."""
    feed_forward: Mlp | Experts
    """dense or mixture-of-experts feed-forward."""
    placement: Placement = "pre"
    """where the norms stand."""
    cross: Attention | None = None
    """attention to the encoder's output, or None."""
    dropout: float = 0.0
    """probability that a unit of a branch's result is dropped before the residual sum."""
    norm_bias: bool = True
    """whether layer norms have a bias."""


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """A run of blocks over one sequence."""

    name: str
    """"decoder" or "encoder"."""
    blocks: tuple[Block, ...]
    """one entry a layer, in order; equal layers are the same object or compare equal."""
    length: Literal["sequence", "source", "fixed"] = "sequence"
    """which length its sequence has: the text's, the source text's, or `fixed_length`."""
    fixed_length: int = 0
    """tokens, where the architecture fixes them (image patches, audio frames)."""
    prelude: Literal["tokens", "patches", "audio"] = "tokens"
    """what makes the first hidden states."""
    positions: int = 0
    """rows of a learned position table, 0 without one."""
    trained_positions: bool = True
    """whether that table is trained (Whisper's encoder has fixed ones)."""
    token_types: int = 0
    """rows of a token-type table (BERT)."""
    embedding_norm: bool = False
    """a layer norm follows the embeddings (BERT)."""
    embedding_dropout: float = 0.0
    """probability that a unit of the embeddings is dropped."""
    final_norm: NormKind | None = None
    """norm after the last block."""
    final_dropout: float = 0.0
    """dropout after that norm (T5)."""
    extra_parameters: int = 0
    """parameters of the prelude that nothing else counts (patch projection, convolutions, class token)."""
    audio_channels: int = 0
    """rows of a mel spectrogram."""
    image_values: int = 0
    """values of one image."""


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What stands behind the last stack."""

    kind: Literal["lm", "mlm", "classifier", "none"] = "lm"
    """next-token prediction, masked tokens with a transform, one label a sequence, or nothing."""
    outputs: int = 0
    """vocabulary or labels."""
    tied: bool = False
    """whether the output projection is the token table."""
    bias: bool = False
    """whether the output projection has a bias."""
    upcast: bool = True
    """whether logits are cast to fp32 before the loss."""
    shifted: bool = True
    """whether labels are shifted inside (a copy of the labels)."""
    softcap: bool = False
    """whether logits go through tanh (Gemma 2)."""
    activation: str = "gelu"
    """activation of the masked-token transform."""


class Architecture(msgspec.Struct, frozen=True, kw_only=True):
    """A whole model."""

    family: str
    """`model_type` of the configuration."""
    width: int
    """hidden size."""
    vocab: int
    """rows of the token table, 0 without one."""
    stacks: tuple[Stack, ...]
    """in the order in which they run."""
    head: Head
    """what follows the last stack."""
    max_positions: int | None = None
    """longest sequence that the configuration allows, or None."""
    notes: tuple[str, ...] = ()
    """what was assumed or left out when the configuration was read."""

    @property
    def num_layers(self) -> int:
        """Blocks in all stacks."""
        return sum(len(stack.blocks) for stack in self.stacks)
