"""Models of text and speech from `transformers` configs, with random weights."""

from __future__ import annotations

import warnings
from typing import Any

from keepwise.targets import data
from keepwise.targets.extras import block_names, require
from keepwise.targets.target import Batch, Target


def _causal(model: Any, *, rows: int, length: int, blocks: str) -> Target:
    """A target out of a causal language model: labels are the inputs (the model shifts them)."""

    def batch(index: int) -> Batch:
        ids = data.text(index, rows, length)
        return (), {"input_ids": ids, "labels": ids}

    return _target(model, batch, tokens=rows * length, blocks=block_names(model, blocks))


def _target(model: Any, batch: Any, *, tokens: int, blocks: tuple[str, ...]) -> Target:
    args, kwargs = batch(0)
    return Target(name="", model=model.train(), args=args, kwargs=kwargs, tokens=tokens, blocks=blocks, batches=batch)


def gpt2(*, tiny: bool, dropout: float = 0.0, eager: bool = False) -> Target:
    """GPT-2 (Radford et al. 2019)."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64}
        if tiny
        else {"n_layer": 6, "n_embd": 768, "n_head": 12, "vocab_size": 2048, "n_positions": 512}
    )
    config = hf.GPT2Config(
        **size,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager" if eager else "sdpa",
    )
    rows, length = (2, 32) if tiny else (4, 512)
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # What it takes anyway, after a warning on the terminal.
    return _causal(model, rows=rows, length=length, blocks="transformer.h.*")


def llama(*, tiny: bool, lora: bool = False) -> Target:
    """Llama, grouped-query attention (Touvron et al. 2023); with `lora`, frozen but for adapters (Hu et al. 2021)."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        if tiny
        else {"num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12}
    )
    config = hf.LlamaConfig(
        **size,
        num_key_value_heads=2 if tiny else 4,
        vocab_size=256 if tiny else 2048,
        max_position_embeddings=64 if tiny else 512,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model, blocks = hf.LlamaForCausalLM(config), "model.layers.*"
    if lora:
        peft = require("peft", extra="peft")
        adapters = peft.LoraConfig(
            r=4 if tiny else 8, lora_alpha=16, lora_dropout=0.05, target_modules=["q_proj", "v_proj"]
        )
        with warnings.catch_warnings():
            # peft asks the model for an attribute that transformers has renamed.
            warnings.simplefilter("ignore", FutureWarning)
            model = peft.get_peft_model(model, adapters)
        blocks = f"base_model.model.{blocks}"
    rows, length = (2, 32) if tiny else (4, 512)
    return _causal(model, rows=rows, length=length, blocks=blocks)


def mixtral(*, tiny: bool) -> Target:
    """Mixtral: a router sends each token to 2 experts (Jiang et al. 2024), so shapes change with the data."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
        if tiny
        else {"num_hidden_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8}
    )
    config = hf.MixtralConfig(
        **size,
        num_key_value_heads=2 if tiny else 4,
        num_local_experts=4,
        num_experts_per_tok=2,
        vocab_size=256 if tiny else 2048,
        max_position_embeddings=64 if tiny else 512,
        output_router_logits=True,
        use_cache=False,
        attn_implementation="sdpa",
        # One matrix product for each expert that was chosen: the form with shapes that depend on the data.
        experts_implementation="eager",
    )
    rows, length = (2, 32) if tiny else (4, 512)
    return _causal(hf.MixtralForCausalLM(config), rows=rows, length=length, blocks="model.layers.*")


def bert(*, tiny: bool) -> Target:
    """BERT (Devlin et al. 2018), masked language modelling, dropout 0.1."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        if tiny
        else {"num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    )
    vocabulary = 320 if tiny else 2048
    config = hf.BertConfig(
        **size,
        vocab_size=vocabulary,
        max_position_embeddings=64 if tiny else 512,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        attn_implementation="sdpa",
    )
    model = hf.BertForMaskedLM(config)
    rows, length = (2, 32) if tiny else (4, 512)

    def batch(index: int) -> Batch:
        ids, labels = data.masked_text(index, rows, length, mask_id=vocabulary - 1)
        return (), {"input_ids": ids, "labels": labels}

    return _target(model, batch, tokens=rows * length, blocks=block_names(model, "bert.encoder.layer.*"))


def t5(*, tiny: bool) -> Target:
    """T5 (Raffel et al. 2020): the encoder reads a piece of text, the decoder writes the next one."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"num_layers": 2, "num_decoder_layers": 2, "d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4}
        if tiny
        else {"num_layers": 4, "num_decoder_layers": 4, "d_model": 512, "d_ff": 2048, "d_kv": 64, "num_heads": 8}
    )
    config = hf.T5Config(
        **size, vocab_size=256 if tiny else 2048, dropout_rate=0.1, decoder_start_token_id=0, use_cache=False
    )
    model = hf.T5ForConditionalGeneration(config)
    rows, length = (2, 32) if tiny else (4, 512)

    def batch(index: int) -> Batch:
        ids = data.text(index, 2 * rows, length // 2).view(rows, 2, length // 2)
        return (), {"input_ids": ids[:, 0].contiguous(), "labels": ids[:, 1].contiguous()}

    return _target(model, batch, tokens=rows * length, blocks=block_names(model, "encoder.block.*", "decoder.block.*"))


def whisper(*, tiny: bool) -> Target:
    """Whisper (Radford et al. 2022): convolutions and an encoder over sound, a decoder that writes what was said."""
    hf = require("transformers", extra="transformers")
    layers, width, inner, heads = (2, 64, 128, 4) if tiny else (4, 384, 1536, 6)
    mels, positions, letters = (16, 32, 16) if tiny else (80, 500, 128)
    config = hf.WhisperConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        d_model=width,
        encoder_ffn_dim=inner,
        decoder_ffn_dim=inner,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        num_mel_bins=mels,
        max_source_positions=positions,
        max_target_positions=2 * letters,
        vocab_size=320 if tiny else 2048,
        pad_token_id=256,
        bos_token_id=257,
        eos_token_id=258,
        decoder_start_token_id=257,
        begin_suppress_tokens=None,
        dropout=0.1,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = hf.WhisperForConditionalGeneration(config)
    rows = 2 if tiny else 4

    def batch(index: int) -> Batch:
        sounds, ids = data.chirps(index, rows, mels, 2 * positions, letters)
        return (), {"input_features": sounds, "labels": ids}

    blocks = block_names(model, "model.encoder.layers.*", "model.decoder.layers.*")
    return _target(model, batch, tokens=rows * letters, blocks=blocks)
