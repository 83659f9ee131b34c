"""Encoders and encoder-decoders: BERT, ViT, T5, Whisper."""

from __future__ import annotations

from msgspec.structs import replace

from keepwise.estimator.families.reader import Config
from keepwise.estimator.spec import Architecture, Attention, Block, Head, Mlp, Stack


def bert(config: Config) -> Architecture:
    """BERT and RoBERTa with their masked-token head: norms after each residual sum."""
    width = config.size("hidden_size", default=768)
    layers = config.size("num_hidden_layers", default=12)
    heads = config.size("num_attention_heads", default=12)
    vocab = config.size("vocab_size", default=30522)
    head_dim = width // heads
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim, bias=(True, True, True, True), causal=False,
        dropout=config.rate("attention_probs_dropout_prob", default=0.1),
    )  # fmt: skip
    hidden_dropout = config.rate("hidden_dropout_prob", default=0.1)
    activation = config.text("hidden_act", default="gelu")
    mlp = Mlp(inner=config.size("intermediate_size", default=3072), activation=activation, bias=True)
    block = Block(norm="layer", attention=attention, feed_forward=mlp, placement="post", dropout=hidden_dropout)
    stack = Stack(
        name="encoder",
        blocks=(block,) * layers,
        positions=config.size("max_position_embeddings", default=512),
        token_types=config.size("type_vocab_size", default=2),
        embedding_norm=True,
        embedding_dropout=hidden_dropout,
    )
    head = Head(
        kind="mlm",
        outputs=vocab,
        tied=config.flag("tie_word_embeddings", default=True),
        bias=True,
        upcast=False,
        shifted=False,
        activation=activation,
    )
    return Architecture(
        family=config.family,
        width=width,
        vocab=vocab,
        stacks=(stack,),
        head=head,
        max_positions=config.optional("max_position_embeddings"),
        notes=tuple(config.notes),
    )


def vit(config: Config) -> Architecture:
    """ViT with a classification head: image patches and one class token."""
    width = config.size("hidden_size", default=768)
    layers = config.size("num_hidden_layers", default=12)
    heads = config.size("num_attention_heads", default=12)
    channels = config.size("num_channels", default=3)
    image, patch = config.size("image_size", default=224), config.size("patch_size", default=16)
    head_dim, biased = width // heads, config.flag("qkv_bias", default=True)
    attention = Attention(
        heads=heads, kv_heads=heads, head_dim=head_dim, value_dim=head_dim, softmax_wide=True,
        bias=(biased, biased, biased, True), causal=False,
        dropout=config.rate("attention_probs_dropout_prob"),
    )  # fmt: skip
    dropout = config.rate("hidden_dropout_prob")
    mlp = Mlp(
        inner=config.size("intermediate_size", default=3072),
        activation=config.text("hidden_act", default="gelu"),
        bias=True,
    )
    block = Block(norm="layer", attention=attention, feed_forward=mlp, dropout=dropout)
    special = 2 if config.family == "deit" else 1
    tokens = (image // patch) ** 2 + special
    stack = Stack(
        name="encoder",
        blocks=(block,) * layers,
        length="fixed",
        fixed_length=tokens,
        prelude="patches",
        positions=tokens,
        embedding_dropout=dropout,
        final_norm="layer",
        extra_parameters=(channels * patch**2 + 1) * width + special * width,
        image_values=channels * image**2,
    )
    labels = config.values.get("id2label")
    outputs = config.optional("num_labels") or (len(labels) if labels else 2)
    head = Head(kind="classifier", outputs=outputs, bias=True)
    return Architecture(
        family=config.family, width=width, vocab=0, stacks=(stack,), head=head, notes=tuple(config.notes)
    )


def t5(config: Config) -> Architecture:
    """T5 and mT5: relative position biases, no other biases, ReLU or gated GELU."""
    width = config.size("d_model", default=512)
    layers = config.size("num_layers", default=6)
    decoder_layers = config.size("num_decoder_layers", default=layers)
    heads = config.size("num_heads", default=8)
    vocab = config.size("vocab_size", default=32128 if config.family == "t5" else 250112)
    head_dim = config.size("d_kv", default=64)
    dropout = config.rate("dropout_rate", default=0.1)
    form = config.text("feed_forward_proj", default="relu" if config.family == "t5" else "gated-gelu")
    gated = form.startswith("gated-")
    activation = form.removeprefix("gated-")
    activation = "gelu_new" if form == "gated-gelu" else activation
    mlp = Mlp(
        inner=config.size("d_ff", default=2048), activation=activation, gated=gated, dropout=dropout, widens_inner=True
    )
    own = Attention(
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=head_dim,
        causal=False,
        relative_bias=True,
        dropout=dropout,
    )
    cross = replace(own, relative_bias=False, zero_bias=True)
    encoder_block = Block(norm="rms_promote", attention=own, feed_forward=mlp, dropout=dropout)
    decoder_block = replace(encoder_block, attention=replace(own, causal=True), cross=cross)
    buckets = config.size("relative_attention_num_buckets", default=32) * heads
    encoder = Stack(
        name="encoder",
        blocks=(encoder_block,) * layers,
        length="source",
        embedding_dropout=dropout,
        final_norm="rms_promote",
        final_dropout=dropout,
        extra_parameters=buckets,
    )
    decoder = replace(encoder, name="decoder", blocks=(decoder_block,) * decoder_layers, length="sequence")
    tied = config.flag("tie_word_embeddings", default=True)
    head = Head(kind="lm", outputs=vocab, tied=tied, upcast=False, shifted=False)
    return Architecture(
        family=config.family, width=width, vocab=vocab, stacks=(encoder, decoder), head=head, notes=tuple(config.notes)
    )


def whisper(config: Config) -> Architecture:
    """Whisper: two convolutions, an encoder of fixed length, a decoder with cross-attention."""
    width = config.size("d_model", default=384)
    vocab = config.size("vocab_size", default=51865)
    dropout, activation = config.rate("dropout"), config.text("activation_function", default="gelu")
    mels = config.size("num_mel_bins", default=80)

    def block(side: str, *, cross: bool) -> Block:
        heads = config.size(f"{side}_attention_heads", default=6)
        own = Attention(
            heads=heads, kv_heads=heads, head_dim=width // heads, value_dim=width // heads, bias=(True, False, True, True),
            copied_result=True, causal=cross, dropout=config.rate("attention_dropout"),
        )  # fmt: skip
        mlp = Mlp(
            inner=config.size(f"{side}_ffn_dim", default=1536), activation=activation, bias=True,
            dropout=config.rate("activation_dropout"),
        )  # fmt: skip
        return Block(
            norm="layer",
            attention=own,
            feed_forward=mlp,
            dropout=dropout,
            cross=replace(own, causal=False) if cross else None,
        )

    frames = config.size("max_source_positions", default=1500)
    encoder = Stack(
        name="encoder",
        blocks=(block("encoder", cross=False),) * config.size("encoder_layers", default=4),
        length="fixed",
        fixed_length=frames,
        prelude="audio",
        positions=frames,
        trained_positions=False,
        embedding_dropout=dropout,
        final_norm="layer",
        extra_parameters=(3 * mels + 1) * width + (3 * width + 1) * width,
        audio_channels=mels,
    )
    decoder = Stack(
        name="decoder",
        blocks=(block("decoder", cross=True),) * config.size("decoder_layers", default=4),
        positions=config.size("max_target_positions", default=448),
        embedding_dropout=dropout,
        final_norm="layer",
    )
    head = Head(kind="lm", outputs=vocab, tied=True, upcast=False, shifted=False)
    return Architecture(
        family=config.family,
        width=width,
        vocab=vocab,
        stacks=(encoder, decoder),
        head=head,
        max_positions=config.optional("max_target_positions"),
        notes=tuple(config.notes),
    )
