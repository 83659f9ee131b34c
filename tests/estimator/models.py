"""Small real models of each family, for comparison with the estimate."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers

BATCH, SEQUENCE, VOCAB = 2, 16, 96

_WIDE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
_GROUPED = {**_WIDE, "intermediate_size": 160, "num_key_value_heads": 2}
_TEXT = {"vocab_size": VOCAB}


@dataclasses.dataclass(frozen=True)
class Family:
    model: str
    config: str
    sizes: dict[str, Any]
    attention: str = "sdpa"
    inputs: str = "text"


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, **_TEXT}),
    "llama-biased": Family("LlamaForCausalLM", "LlamaConfig", {**_GROUPED, **_TEXT, "attention_bias": True, "mlp_bias": True}),
    "mistral": Family("MistralForCausalLM", "MistralConfig", {**_GROUPED, **_TEXT}),
    "mistral-window": Family("MistralForCausalLM", "MistralConfig", {**_GROUPED, **_TEXT, "sliding_window": 8}),
    "qwen2": Family("Qwen2ForCausalLM", "Qwen2Config", {**_GROUPED, **_TEXT}),
    "qwen3": Family("Qwen3ForCausalLM", "Qwen3Config", {**_GROUPED, **_TEXT, "head_dim": 16}),
    "gemma": Family("GemmaForCausalLM", "GemmaConfig", {**_GROUPED, **_TEXT, "head_dim": 16}),
    "gemma2": Family("Gemma2ForCausalLM", "Gemma2Config", {**_GROUPED, **_TEXT, "head_dim": 16, "sliding_window": 8}, "eager"),
    "gemma3": Family("Gemma3ForCausalLM", "Gemma3TextConfig", {**_GROUPED, **_TEXT, "head_dim": 16, "sliding_window": 8}),
    "olmo2": Family("Olmo2ForCausalLM", "Olmo2Config", {**_GROUPED, **_TEXT}),
    "phi": Family("PhiForCausalLM", "PhiConfig", {**_WIDE, **_TEXT, "intermediate_size": 256}),
    "phi3": Family("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, **_TEXT, "pad_token_id": 0}),
    "gpt2": Family(
        "GPT2LMHeadModel", "GPT2Config",
        {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 256, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **_TEXT},
    ),
    "gpt2-dropout": Family("GPT2LMHeadModel", "GPT2Config", {"n_embd": 64, "n_layer": 2, "n_head": 8, "n_positions": 256, **_TEXT}),
    "gpt_neox": Family("GPTNeoXForCausalLM", "GPTNeoXConfig", {**_WIDE, **_TEXT, "intermediate_size": 256}),
    "opt": Family(
        "OPTForCausalLM", "OPTConfig",
        {**_WIDE, **_TEXT, "ffn_dim": 256, "max_position_embeddings": 512, "word_embed_proj_dim": 64, "dropout": 0.0},
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", "Starcoder2Config", {**_GROUPED, **_TEXT}),
    "stablelm": Family("StableLmForCausalLM", "StableLmConfig", {**_GROUPED, **_TEXT}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, **_TEXT, "intermediate_size": 96, "num_local_experts": 4}),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", "Qwen2MoeConfig",
        {
            **_GROUPED, **_TEXT, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80, "num_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        {**_GROUPED, **_TEXT, "moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "olmoe": Family("OlmoeForCausalLM", "OlmoeConfig", {**_GROUPED, **_TEXT, "num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM", "DeepseekV3Config",
        {
            **_WIDE, **_TEXT, "num_key_value_heads": 8, "intermediate_size": 160, "moe_intermediate_size": 32, "n_routed_experts": 4,
            "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16,
            "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", "GptOssConfig",
        {**_GROUPED, **_TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 8}, "eager",
    ),
    "bert": Family(
        "BertForMaskedLM", "BertConfig",
        {**_WIDE, **_TEXT, "intermediate_size": 256, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    ),
    "bert-dropout": Family("BertForMaskedLM", "BertConfig", {**_WIDE, **_TEXT, "intermediate_size": 256}),
    "vit": Family(
        "ViTForImageClassification", "ViTConfig",
        {**_WIDE, "intermediate_size": 256, "image_size": 32, "patch_size": 8, "num_labels": 10}, inputs="image",
    ),
    "t5": Family(
        "T5ForConditionalGeneration", "T5Config",
        {"d_model": 64, "d_kv": 8, "d_ff": 160, "num_layers": 2, "num_heads": 8, "dropout_rate": 0.0, "decoder_start_token_id": 0, **_TEXT},
    ),
    "whisper": Family(
        "WhisperForConditionalGeneration", "WhisperConfig",
        {
            "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 8,
            "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "num_mel_bins": 20, "max_source_positions": 24, "max_target_positions": 256,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, **_TEXT,
        },
        inputs="audio",
    ),
}  # fmt: skip

_PRECISIONS = {"fp32": "fp32", "bf16": "bf16-pure", "autocast": "bf16-autocast"}


@dataclasses.dataclass
class Case:
    """A model, its batch, and the arguments that ask `keepwise.estimate` for the same."""

    model: torch.nn.Module
    batch: dict[str, torch.Tensor]
    estimate: dict[str, Any]
    autocast: bool

    def loss(self) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            self.output = self.model(**self.batch)
        return self.output.loss


def make(
    name: str,
    mode: str = "fp32",
    *,
    attention: str | None = None,
    meta: bool = False,
    sequence: int = SEQUENCE,
    batch: int = BATCH,
    **more: Any,
) -> Case:
    family = FAMILIES[name]
    kernel = attention or family.attention
    config = getattr(transformers, family.config)(**{**family.sizes, **more})
    config._attn_implementation = kernel
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = getattr(transformers, family.model)(config)
    model.train()
    if getattr(config, "use_cache", None):
        config.use_cache = False
    inputs = _inputs(family.inputs, batch, sequence, meta=meta)
    if mode == "bf16":
        model = model.to(torch.bfloat16)
        inputs = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in inputs.items()}
    values = config.to_dict()
    if family.inputs == "image":
        values["num_labels"] = config.num_labels
    asked = {
        "config": values, "batch": batch, "sequence": sequence, "attention": kernel, "precision": _PRECISIONS[mode], "device": "cpu",
    }  # fmt: skip
    return Case(model=model, batch=inputs, estimate=asked, autocast=mode == "autocast")


def _inputs(kind: str, batch: int, sequence: int, *, meta: bool) -> dict[str, torch.Tensor]:
    device = "meta" if meta else "cpu"
    labels = torch.randint(0, VOCAB, (batch, sequence), device=device)
    if kind == "image":
        return {
            "pixel_values": torch.randn(batch, 3, 32, 32, device=device),
            "labels": torch.randint(0, 10, (batch,), device=device),
        }
    if kind == "audio":
        return {"input_features": torch.randn(batch, 20, 48, device=device), "labels": labels}
    return {"input_ids": labels.clone(), "labels": labels}
