"""Mixture-of-experts families."""

from __future__ import annotations

from msgspec.structs import replace

from keepwise.estimator.families.decoders import base_attention, decoder, four, language_head, llama_like
from keepwise.estimator.families.reader import Config
from keepwise.estimator.spec import Architecture, Attention, Block, Experts, Latent, Mlp


def mixtral(config: Config) -> Architecture:
    """Mixtral: a Mistral whose feed-forward layers are mixtures."""
    width = config.size("hidden_size", default=4096)
    layers = config.size("num_hidden_layers", default=32)
    heads = config.size("num_attention_heads", default=32)
    vocab = config.size("vocab_size", default=32000)
    attention = replace(
        base_attention(config, heads=heads, width=width, kv_heads=8),
        rotary=True,
    )
    expert = Mlp(
        inner=config.size("intermediate_size", default=14336),
        activation=config.text("hidden_act", default="silu"),
        gated=True,
        fused_gate=True,
    )
    mixture = Experts(
        num=config.size("num_local_experts", "num_experts", default=8),
        active=config.size("num_experts_per_tok", default=2),
        expert=expert,
        wide_weights=True,
    )
    block = Block(norm="rms", attention=attention, feed_forward=mixture)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))


def qwen_moe(config: Config) -> Architecture:
    """Qwen2-MoE (with a shared, gated expert) and Qwen3-MoE (with query norms)."""
    third = config.family == "qwen3_moe"
    width = config.size("hidden_size", default=2048)
    layers = config.size("num_hidden_layers", default=24)
    heads = config.size("num_attention_heads", default=32 if third else 16)
    vocab = config.size("vocab_size", default=151936)
    qkv_bias = config.flag("qkv_bias", default=not third)
    everywhere = config.flag("attention_bias", default=False)
    attention = replace(
        base_attention(config, heads=heads, width=width, kv_heads=4 if third else 16),
        bias=(qkv_bias or everywhere, qkv_bias or everywhere, qkv_bias or everywhere, everywhere),
        rotary=True,
        query_norm="rms" if third else None,
    )
    activation = config.text("hidden_act", default="silu")
    dense = Mlp(
        inner=config.size("intermediate_size", default=6144 if third else 5632), activation=activation, gated=True
    )
    shared = None if third else replace(dense, inner=config.size("shared_expert_intermediate_size", default=5632))
    mixture = Experts(
        num=config.size("num_experts", "num_local_experts", default=128 if third else 60),
        active=config.size("num_experts_per_tok", default=8 if third else 4),
        expert=replace(
            dense, inner=config.size("moe_intermediate_size", default=768 if third else 1408), fused_gate=True
        ),
        shared=shared,
        shared_gate=shared is not None,
        renormalised=config.flag("norm_topk_prob", default=False),
    )
    step = config.size("decoder_sparse_step", default=1)
    dense_layers = set(config.values.get("mlp_only_layers") or ())
    blocks = tuple(
        Block(
            norm="rms",
            attention=attention,
            feed_forward=mixture if layer not in dense_layers and (layer + 1) % step == 0 else dense,
        )
        for layer in range(layers)
    )
    return decoder(config, blocks, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))


EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys under which configurations say how many experts there are."""


def like_llama(config: Config) -> Architecture:
    """A mixture that is not known by name: a Llama's attention, and experts under the keys that most families share.

    Read are the number of experts and those a token visits, their inner width, shared experts, and which layers are dense.
    """
    base = llama_like(config)
    stack = base.stacks[0]
    inner = config.size("moe_intermediate_size", "intermediate_size")
    plain = stack.blocks[0].feed_forward
    assert isinstance(plain, Mlp)
    dense = replace(plain, inner=config.size("intermediate_size_mlp", "intermediate_size"))
    shared_inner = config.optional("shared_expert_intermediate_size", "shared_intermediate_size")
    if shared_inner is None:
        num_shared = config.optional("n_shared_experts", "num_shared_experts")
        num_shared = num_shared or int(config.family.startswith("llama4"))  # one, which no key of theirs names
        shared_inner = inner * num_shared or None
    mixture = Experts(
        num=config.size(*EXPERT_COUNTS),
        active=config.size("num_experts_per_tok", "moe_top_k", "top_k", default=1),
        expert=replace(plain, inner=inner, fused_gate=True),
        shared=None if shared_inner is None else replace(plain, inner=shared_inner),
        renormalised=config.flag("norm_topk_prob", default=True),
    )
    sparse = _sparse_layers(config, len(stack.blocks))
    blocks = tuple(
        replace(block, feed_forward=mixture if layer in sparse else dense) for layer, block in enumerate(stack.blocks)
    )
    return replace(base, stacks=(replace(stack, blocks=blocks),))


def _sparse_layers(config: Config, layers: int) -> set[int]:
    """The layers that are mixtures."""
    listed = config.values.get("moe_layers")
    if isinstance(listed, (list, tuple)):
        return {int(layer) for layer in listed}
    first = int(config.values.get("first_k_dense_replace") or 0)
    step = config.size("expert_layer_period", "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    offset = int(config.values.get("expert_layer_offset", step - 1))
    return {layer for layer in range(first, layers) if layer % step == offset % step}


def olmoe(config: Config) -> Architecture:
    """OLMoE: every layer a mixture, norms over whole queries and keys."""
    width = config.size("hidden_size", default=2048)
    layers = config.size("num_hidden_layers", default=16)
    heads = config.size("num_attention_heads", default=16)
    vocab = config.size("vocab_size", default=50304)
    attention = replace(
        base_attention(config, heads=heads, width=width),
        bias=four(config.flag("attention_bias", default=False)),
        rotary=True,
        query_norm="rms",
        query_norm_width="all",
    )
    inner = config.size("intermediate_size", default=2048)
    expert = Mlp(inner=inner, activation=config.text("hidden_act", default="silu"), gated=True, fused_gate=True)
    mixture = Experts(
        num=config.size("num_experts", "num_local_experts", default=64),
        active=config.size("num_experts_per_tok", default=8),
        expert=expert,
        renormalised=config.flag("norm_topk_prob", default=False),
    )
    block = Block(norm="rms", attention=attention, feed_forward=mixture)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))


def deepseek(config: Config) -> Architecture:
    """DeepSeek V2 and V3: latent attention, a few dense layers, then mixtures with shared experts.

    Modules that predict further tokens are left out.
    """
    third = config.family == "deepseek_v3"
    width = config.size("hidden_size", default=7168 if third else 4096)
    layers = config.size("num_hidden_layers", default=61 if third else 32)
    heads = config.size("num_attention_heads", default=128 if third else 32)
    vocab = config.size("vocab_size", default=129280 if third else 32000)
    rope = config.size("qk_rope_head_dim", default=64)
    query_rank = config.optional("q_lora_rank") if "q_lora_rank" in config.values else 1536
    attention = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=config.size("qk_nope_head_dim", default=128) + rope,
        value_dim=config.size("v_head_dim", default=128),
        bias=four(config.flag("attention_bias", default=False)),
        rotary=True,
        copied_result=True,
        softmax_wide=True,
        dropout=config.rate("attention_dropout"),
        latent=Latent(query_rank=query_rank, key_rank=config.size("kv_lora_rank", default=512), rope_dim=rope),
    )
    activation = config.text("hidden_act", default="silu")
    dense = Mlp(
        inner=config.size("intermediate_size", default=18432 if third else 11008), activation=activation, gated=True
    )
    inner = config.size("moe_intermediate_size", default=2048 if third else 1407)
    num_shared = config.optional("n_shared_experts") or (1 if third and "n_shared_experts" not in config.values else 0)
    mixture = Experts(
        num=config.size("n_routed_experts", "num_local_experts", default=256 if third else 64),
        active=config.size("num_experts_per_tok", default=8),
        expert=replace(dense, inner=inner, fused_gate=True),
        shared=replace(dense, inner=inner * num_shared) if num_shared else None,
        renormalised=third and config.flag("norm_topk_prob", default=True),
        wide_router=third,
        wide_weights=True,
    )
    first = int(config.values.get("first_k_dense_replace", 3 if third else 0) or 0)
    blocks = tuple(
        Block(norm="rms", attention=attention, feed_forward=dense if layer < first else mixture)
        for layer in range(layers)
    )
    return decoder(config, blocks, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))


def gpt_oss(config: Config) -> Architecture:
    """gpt-oss: every layer a mixture with biases and a clamped gate, alternating windows, attention sinks."""
    width = config.size("hidden_size", default=2880)
    layers = config.size("num_hidden_layers", default=36)
    heads = config.size("num_attention_heads", default=64)
    vocab = config.size("vocab_size", default=201088)
    attention = replace(
        base_attention(config, heads=heads, width=width, kv_heads=8, head_dim=64),
        bias=four(config.flag("attention_bias", default=True)),
        rotary=True,
        sinks=True,
        softmax_wide=False,
    )
    expert = Mlp(
        inner=config.size("intermediate_size", default=2880),
        activation="clamped_swiglu",
        gated=True,
        fused_gate=True,
        bias=True,
    )
    mixture = Experts(
        num=config.size("num_local_experts", default=128),
        active=config.size("num_experts_per_tok", "experts_per_token", default=4),
        expert=expert,
        renormalised=False,
        router_bias=True,
    )
    window = config.size("sliding_window", default=128)
    types = config.layer_types(layers) or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(layers)
    ]
    blocks = tuple(
        Block(
            norm="rms_wide",
            attention=replace(attention, window=window if kind == "sliding_attention" else None),
            feed_forward=mixture,
        )
        for kind in types
    )
    return decoder(config, blocks, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))
