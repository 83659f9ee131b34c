"""Dense decoder-only families."""

from __future__ import annotations

from msgspec.structs import replace

from keepwise.estimator.families.reader import Config
from keepwise.estimator.spec import Architecture, Attention, Block, Head, Mlp, Stack

_DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"vocab": 32000, "width": 4096, "layers": 32, "heads": 32, "inner": 11008},
    "mistral": {"vocab": 32000, "width": 4096, "layers": 32, "heads": 32, "inner": 14336, "kv_heads": 8},
    "qwen2": {"vocab": 151936, "width": 4096, "layers": 32, "heads": 32, "inner": 22016, "kv_heads": 32},
    "qwen3": {
        "vocab": 151936,
        "width": 4096,
        "layers": 32,
        "heads": 32,
        "inner": 22016,
        "kv_heads": 32,
        "head_dim": 128,
    },
    "gemma": {
        "vocab": 256000,
        "width": 3072,
        "layers": 28,
        "heads": 16,
        "inner": 24576,
        "kv_heads": 16,
        "head_dim": 256,
    },
    "gemma2": {"vocab": 256000, "width": 2304, "layers": 26, "heads": 8, "inner": 9216, "kv_heads": 4, "head_dim": 256},
    "gemma3_text": {
        "vocab": 262208,
        "width": 2304,
        "layers": 26,
        "heads": 8,
        "inner": 9216,
        "kv_heads": 4,
        "head_dim": 256,
    },
}


def four(flag: bool) -> tuple[bool, bool, bool, bool]:
    """The same choice for the query, key, value and output projections."""
    return flag, flag, flag, flag


def base_attention(
    config: Config, *, heads: int, width: int, kv_heads: int | None = None, head_dim: int | None = None
) -> Attention:
    """Attention with heads, key heads and head widths under their usual names."""
    head = config.size("head_dim", default=head_dim or width // heads)
    grouped = config.optional("num_key_value_heads") or kv_heads or heads
    return Attention(
        heads=heads,
        kv_heads=grouped,
        head_dim=head,
        value_dim=head,
        softmax_wide=True,
        dropout=config.rate("attention_dropout"),
    )


def language_head(config: Config, vocab: int, *, tied: bool, bias: bool = False, softcap: bool = False) -> Head:
    """Next-token head."""
    return Head(
        kind="lm", outputs=vocab, tied=config.flag("tie_word_embeddings", default=tied), bias=bias, softcap=softcap
    )


def decoder(
    config: Config, blocks: tuple[Block, ...], *, width: int, vocab: int, head: Head, stack: Stack | None = None
) -> Architecture:
    """A decoder-only architecture around its blocks."""
    base = stack or Stack(name="decoder", blocks=(), final_norm=blocks[0].norm)
    return Architecture(
        family=config.family,
        width=width,
        vocab=vocab,
        stacks=(replace(base, blocks=blocks),),
        head=head,
        max_positions=config.optional("max_position_embeddings", "n_positions"),
        notes=tuple(config.notes),
    )


def llama_like(config: Config) -> Architecture:
    """Llama, Mistral, Qwen2, Qwen3, SmolLM3, Granite: RMS norms, rotary positions, grouped queries, gated feed-forward."""
    defaults = _DEFAULTS.get(config.family, _DEFAULTS["llama"])
    width = config.size("hidden_size", default=defaults["width"])
    layers = config.size("num_hidden_layers", default=defaults["layers"])
    heads = config.size("num_attention_heads", default=defaults["heads"])
    vocab = config.size("vocab_size", default=defaults["vocab"])
    biased = config.flag("attention_bias", default=False)
    bias = (True, True, True, False) if config.family == "qwen2" else four(biased)
    attention = replace(
        base_attention(
            config, heads=heads, width=width, kv_heads=defaults.get("kv_heads"), head_dim=defaults.get("head_dim")
        ),
        bias=bias,
        rotary=True,
        query_norm="rms" if config.family == "qwen3" else None,
    )
    inner = config.size("intermediate_size", default=defaults["inner"])
    mlp = Mlp(
        inner=inner,
        activation=config.text("hidden_act", default="silu"),
        gated=True,
        bias=config.flag("mlp_bias", default=False),
    )
    block = Block(norm="rms", attention=attention, feed_forward=mlp)
    blocks = windowed(block, _windows(config, layers))
    return decoder(config, blocks, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))


def windowed(block: Block, windows: list[int | None]) -> tuple[Block, ...]:
    """The block once a layer, with each layer's window; equal layers are one object."""
    made = {
        window: replace(block, attention=replace(block.attention, window=window)) for window in dict.fromkeys(windows)
    }
    return tuple(made[window] for window in windows)


def _windows(config: Config, layers: int) -> list[int | None]:
    """The sliding window of each layer, or None."""
    window = config.optional("sliding_window")
    types = config.layer_types(layers)
    if types is not None:
        return [window if kind == "sliding_attention" else None for kind in types]
    used = config.flag("use_sliding_window", default=config.family in ("mistral", "phi3", "starcoder2"))
    if window is None or not used:
        return [None] * layers
    first = config.values.get("max_window_layers", 0) if config.family.startswith("qwen") else 0
    return [window if layer >= int(first or 0) else None for layer in range(layers)]


def phi3(config: Config) -> Architecture:
    """Phi-3: as Llama, with fused projections."""
    width = config.size("hidden_size", default=3072)
    layers = config.size("num_hidden_layers", default=32)
    heads = config.size("num_attention_heads", default=32)
    vocab = config.size("vocab_size", default=32064)
    attention = replace(
        base_attention(config, heads=heads, width=width),
        fused_qkv=True,
        rotary=True,
        copied_result=True,
    )
    inner = config.size("intermediate_size", default=8192)
    mlp = Mlp(inner=inner, activation=config.text("hidden_act", default="silu"), gated=True, fused_gate=True)
    block = Block(norm="rms", attention=attention, feed_forward=mlp, dropout=config.rate("resid_pdrop"))
    blocks = windowed(block, _windows(config, layers))
    head = language_head(config, vocab, tied=False)
    return decoder(config, blocks, width=width, vocab=vocab, head=head)


def gemma(config: Config) -> Architecture:
    """Gemma 1 to 3 (text): norms scale by 1 + weight in fp32; from 2 on norms on both sides of each branch."""
    defaults = _DEFAULTS[config.family]
    width = config.size("hidden_size", default=defaults["width"])
    layers = config.size("num_hidden_layers", default=defaults["layers"])
    heads = config.size("num_attention_heads", default=defaults["heads"])
    vocab = config.size("vocab_size", default=defaults["vocab"])
    second = config.family != "gemma"
    attention = replace(
        base_attention(config, heads=heads, width=width, kv_heads=defaults["kv_heads"], head_dim=defaults["head_dim"]),
        bias=four(config.flag("attention_bias", default=False)),
        rotary=True,
        query_norm="rms_one_plus" if config.family == "gemma3_text" else None,
        softcap=config.family == "gemma2" and config.values.get("attn_logit_softcapping", 50.0) is not None,
    )
    activation = config.text("hidden_activation", *([] if second else ["hidden_act"]), default="gelu_pytorch_tanh")
    if activation == "gelu" and not second:
        activation = "gelu_pytorch_tanh"  # the first Gemma files say "gelu" and mean the tanh form
    inner = config.size("intermediate_size", default=defaults["inner"])
    mlp = Mlp(inner=inner, activation=activation, gated=True)
    block = Block(norm="rms_one_plus", attention=attention, feed_forward=mlp, placement="sandwich" if second else "pre")
    blocks = windowed(block, _gemma_windows(config, layers))
    softcap = config.family == "gemma2" and config.values.get("final_logit_softcapping", 30.0) is not None
    return decoder(
        config, blocks, width=width, vocab=vocab, head=language_head(config, vocab, tied=True, softcap=softcap)
    )


def _gemma_windows(config: Config, layers: int) -> list[int | None]:
    """Gemma 2 slides in every other layer, Gemma 3 in five of six."""
    if config.family == "gemma":
        return [None] * layers
    window = config.size("sliding_window", default=4096)
    types = config.layer_types(layers)
    if types is None:
        pattern = config.size("sliding_window_pattern", default=2 if config.family == "gemma2" else 6)
        types = ["sliding_attention" if (layer + 1) % pattern else "full_attention" for layer in range(layers)]
    return [window if kind == "sliding_attention" else None for kind in types]


def olmo2(config: Config) -> Architecture:
    """OLMo 2: norms on each branch's result and on whole queries and keys."""
    base = llama_like(config)
    stack = base.stacks[0]
    blocks = tuple(
        replace(
            block,
            norm="rms_wide",
            placement="inner_post",
            attention=replace(block.attention, query_norm="rms_wide", query_norm_width="all"),
        )
        for block in stack.blocks
    )
    return replace(base, stacks=(replace(stack, blocks=blocks, final_norm="rms_wide"),))


def gpt2(config: Config) -> Architecture:
    """GPT-2: layer norms, learned positions, fused projection, GELU in Python."""
    width = config.size("n_embd", "hidden_size", default=768)
    layers = config.size("n_layer", "num_hidden_layers", default=12)
    heads = config.size("n_head", "num_attention_heads", default=12)
    vocab = config.size("vocab_size", default=50257)
    head_dim = width // heads
    residual = config.rate("resid_pdrop", default=0.1)
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim,
        bias=four(True), fused_qkv=True, dropout=config.rate("attn_pdrop", default=0.1),
    )  # fmt: skip
    inner = config.optional("n_inner") or 4 * width
    mlp = Mlp(inner=inner, activation=config.text("activation_function", default="gelu_new"), bias=True)
    block = Block(norm="layer", attention=attention, feed_forward=mlp, dropout=residual)
    stack = Stack(
        name="decoder", blocks=(), final_norm="layer",
        positions=config.size("n_positions", default=1024),
        embedding_dropout=config.rate("embd_pdrop", default=0.1),
    )  # fmt: skip
    head = language_head(config, vocab, tied=True)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=head, stack=stack)


def gpt_neox(config: Config) -> Architecture:
    """GPT-NeoX and Pythia: parallel branches with their own norms, partly rotated queries."""
    width = config.size("hidden_size", default=6144)
    layers = config.size("num_hidden_layers", default=44)
    heads = config.size("num_attention_heads", default=64)
    vocab = config.size("vocab_size", default=50432)
    head_dim = width // heads
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim, fused_qkv=True, rotary=True,
        copied_result=True, softmax_wide=True,
        bias=four(config.flag("attention_bias", default=True)), dropout=config.rate("attention_dropout"),
    )  # fmt: skip
    inner = config.size("intermediate_size", default=24576)
    mlp = Mlp(inner=inner, activation=config.text("hidden_act", default="gelu"), bias=True)
    parallel = config.flag("use_parallel_residual", default=True)
    block = Block(
        norm="layer", attention=attention, feed_forward=mlp, dropout=config.rate("hidden_dropout"),
        placement="parallel_two" if parallel else "pre",
    )  # fmt: skip
    stack = Stack(name="decoder", blocks=(), final_norm="layer", embedding_dropout=config.rate("hidden_dropout"))
    head = language_head(config, vocab, tied=False)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=head, stack=stack)


def opt(config: Config) -> Architecture:
    """OPT: layer norms, learned positions, ReLU."""
    width = config.size("hidden_size", default=768)
    layers = config.size("num_hidden_layers", default=12)
    heads = config.size("num_attention_heads", default=12)
    vocab = config.size("vocab_size", default=50272)
    head_dim, biased = width // heads, config.flag("enable_bias", default=True)
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim, softmax_wide=True,
        bias=four(biased), dropout=config.rate("attention_dropout"),
    )  # fmt: skip
    mlp = Mlp(
        inner=config.size("ffn_dim", default=3072),
        activation=config.text("activation_function", default="relu"),
        bias=biased,
    )
    before = config.flag("do_layer_norm_before", default=True)
    block = Block(
        norm="layer", attention=attention, feed_forward=mlp, dropout=config.rate("dropout", default=0.1),
        placement="pre" if before else "post",
    )  # fmt: skip
    positions = config.size("max_position_embeddings", default=2048) + 2
    stack = Stack(name="decoder", blocks=(), final_norm="layer" if before else None, positions=positions)
    head = language_head(config, vocab, tied=True)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=head, stack=stack)


def phi(config: Config) -> Architecture:
    """Phi-1 and Phi-2: one norm before two parallel branches."""
    width = config.size("hidden_size", default=2048)
    layers = config.size("num_hidden_layers", default=24)
    heads = config.size("num_attention_heads", default=32)
    vocab = config.size("vocab_size", default=51200)
    attention = replace(
        base_attention(config, heads=heads, width=width),
        bias=four(True),
        rotary=True,
        copied_result=True,
        query_norm="layer" if config.flag("qk_layernorm", default=False) else None,
    )
    inner = config.size("intermediate_size", default=8192)
    mlp = Mlp(inner=inner, activation=config.text("hidden_act", default="gelu_new"), bias=True)
    block = Block(
        norm="layer", attention=attention, feed_forward=mlp, dropout=config.rate("resid_pdrop"), placement="parallel"
    )
    stack = Stack(name="decoder", blocks=(), final_norm="layer", embedding_dropout=config.rate("embd_pdrop"))
    head = language_head(config, vocab, tied=False, bias=True)
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=head, stack=stack)


def starcoder2(config: Config) -> Architecture:
    """StarCoder2: layer norms, rotary positions, grouped queries, plain feed-forward, biases."""
    width = config.size("hidden_size", default=3072)
    layers = config.size("num_hidden_layers", default=30)
    heads = config.size("num_attention_heads", default=24)
    vocab = config.size("vocab_size", default=49152)
    biased = config.flag("use_bias", default=True)
    attention = replace(
        base_attention(config, heads=heads, width=width, kv_heads=2),
        bias=four(biased),
        rotary=True,
    )
    inner = config.size("intermediate_size", default=12288)
    mlp = Mlp(inner=inner, activation=config.text("hidden_act", default="gelu_pytorch_tanh"), bias=biased)
    block = Block(norm="layer", attention=attention, feed_forward=mlp, dropout=config.rate("residual_dropout"))
    blocks = windowed(block, _windows(config, layers))
    stack = Stack(name="decoder", blocks=(), final_norm="layer", embedding_dropout=config.rate("embedding_dropout"))
    head = language_head(config, vocab, tied=True)
    return decoder(config, blocks, width=width, vocab=vocab, head=head, stack=stack)


def stablelm(config: Config) -> Architecture:
    """StableLM: layer norms with a gated feed-forward."""
    width = config.size("hidden_size", default=2560)
    layers = config.size("num_hidden_layers", default=32)
    heads = config.size("num_attention_heads", default=32)
    vocab = config.size("vocab_size", default=50304)
    biased = config.flag("use_qkv_bias", default=False)
    attention = replace(
        base_attention(config, heads=heads, width=width),
        bias=(biased, biased, biased, False),
        rotary=True,
        copied_result=True,
    )
    if config.flag("qk_layernorm", default=False):
        config.notes.append("the per-head norms of qk_layernorm are not counted")
    inner = config.size("intermediate_size", default=6912)
    mlp = Mlp(inner=inner, activation=config.text("hidden_act", default="silu"), gated=True)
    parallel = config.flag("use_parallel_residual", default=False)
    block = Block(
        norm="layer", attention=attention, feed_forward=mlp, dropout=config.rate("hidden_dropout"),
        placement="parallel" if parallel else "pre",
    )  # fmt: skip
    return decoder(config, (block,) * layers, width=width, vocab=vocab, head=language_head(config, vocab, tied=False))
