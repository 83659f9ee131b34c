"""Configurations of the common Hugging Face families, as architectures.

`read` takes the mapping of a `config.json`. Missing keys get the defaults of the family's configuration class, because files
leave them out. A family that is not known but looks like a Llama (with experts, or like a BERT) is read as one, and the answer
says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from keepwise._errors import UsageError
from keepwise.estimator.families import decoders, encoders, mixtures
from keepwise.estimator.families.reader import Config
from keepwise.estimator.spec import Architecture

_READERS: dict[str, Callable[[Config], Architecture]] = {
    "llama": decoders.llama_like,
    "mistral": decoders.llama_like,
    "ministral": decoders.llama_like,
    "smollm3": decoders.llama_like,
    "granite": decoders.llama_like,
    "qwen2": decoders.llama_like,
    "qwen3": decoders.llama_like,
    "phi3": decoders.phi3,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma,
    "gemma3_text": decoders.gemma,
    "olmo2": decoders.olmo2,
    "gpt2": decoders.gpt2,
    "gpt_neox": decoders.gpt_neox,
    "opt": decoders.opt,
    "phi": decoders.phi,
    "starcoder2": decoders.starcoder2,
    "stablelm": decoders.stablelm,
    "mixtral": mixtures.mixtral,
    "qwen2_moe": mixtures.qwen_moe,
    "qwen3_moe": mixtures.qwen_moe,
    "olmoe": mixtures.olmoe,
    "deepseek_v2": mixtures.deepseek,
    "deepseek_v3": mixtures.deepseek,
    "gpt_oss": mixtures.gpt_oss,
    "bert": encoders.bert,
    "roberta": encoders.bert,
    "xlm-roberta": encoders.bert,
    "vit": encoders.vit,
    "deit": encoders.vit,
    "t5": encoders.t5,
    "mt5": encoders.t5,
    "whisper": encoders.whisper,
}

FAMILIES: tuple[str, ...] = tuple(sorted(_READERS))
"""Model types that are read exactly."""

_ALIASES = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
"""Text parts of composite models that are another family by another name."""

_ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")

_TEXT_PARTS = ("text_config", "llm_config", "language_config")


def read(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a Hugging Face configuration describes.

    Raises:
        UsageError: when the family is not known and has not the keys of a Llama, or a size is missing or no number.
    """
    notes: list[str] = []
    for part in _TEXT_PARTS:
        if isinstance(config.get(part), Mapping):
            notes.append(
                f"{part} of a {config.get('model_type', 'composite')} configuration: its other towers are not counted"
            )
            config = {**{k: v for k, v in config.items() if k == "tie_word_embeddings"}, **config[part]}
            break
    model_type = str(config.get("model_type"))
    if model_type in _ALIASES:
        model_type = _ALIASES[model_type]
        config = {**config, "model_type": model_type}
    reader = _READERS.get(model_type)
    if reader is None:
        needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
        missing = [key for key in needed if key not in config]
        if missing:
            raise UsageError(
                f"model_type {model_type!r} is not known, and the configuration lacks {', '.join(missing)}, "
                f"so that it cannot be read as a Llama; known: {', '.join(FAMILIES)}"
            )
        reader, words = decoders.llama_like, "a Llama"
        if any(config.get(key) for key in mixtures.EXPERT_COUNTS):
            reader, words = mixtures.like_llama, "a Llama with experts"
        elif config.get("type_vocab_size"):
            reader, words = encoders.bert, "a BERT"
        notes.append(f"model_type {model_type!r} is not known: read as {words} of the same sizes")
    others = sorted(set(config.get("layer_types") or ()) - set(_ATTENTION_KINDS))
    if others or "mamba_d_state" in config:
        notes.append(f"layers of type {', '.join(others) or 'mamba'} are counted as attention layers")
    return reader(Config(config, notes))


__all__ = ["FAMILIES", "read"]
