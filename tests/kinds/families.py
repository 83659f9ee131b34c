"""Models of the Transformers library, one of each odd feature, with random weights and a few numbers a layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from .program import Case, Collection, case

PROGRAMS = Collection("families", is_wild=True)
COLLECTIONS = (PROGRAMS,)

SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}
TEXT = {**SIZES, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 1}
T5 = {
    "vocab_size": 40,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 40,
    "d_model": 16,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "encoder_layerdrop": 0.4,
    "decoder_layerdrop": 0.4,
}
SPEECH = {
    "vocab_size": 20,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": (8, 8),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "layerdrop": 0.4,
    "mask_time_prob": 0.4,
    "mask_time_length": 2,
    "mask_feature_prob": 0.2,
    "mask_feature_length": 2,
    "ctc_zero_infinity": True,
}
VISION = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
WINDOWS = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2], "window_size": 4}


def _text(length: int = 8, masked: bool = True, **more: Any) -> dict[str, Any]:
    ids = torch.randint(3, 40, (2, length))
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "labels": ids.clone(), **({"attention_mask": mask} if masked else {}), **more}


def _images(size: int = 32, **more: Any) -> dict[str, Any]:
    return {"pixel_values": torch.randn(2, 3, size, size), **more}


def _labelled(size: int = 32) -> dict[str, Any]:
    return _images(size, labels=torch.tensor([0, 1]))


def _waves() -> dict[str, Any]:
    return {"input_values": torch.randn(2, 60), "labels": torch.randint(1, 20, (2, 4))}


def _loss(out: Any) -> torch.Tensor:
    return out.loss


def _add(
    name: str,
    why: str,
    model: str,
    sizes: dict[str, Any],
    inputs: Callable[[], dict[str, Any]] = _text,
    *,
    loss: Callable[[Any], torch.Tensor] = _loss,
    **options: Any,
) -> None:
    def build() -> Case:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        import transformers

        transformers.logging.set_verbosity_error()
        cls: Any = getattr(transformers, model)
        return case(cls(cls.config_class(**sizes)).train(), loss=loss, **inputs())

    build.__name__ = name
    PROGRAMS.add(why, slow=True, **options)(build)


_add("t5", "relative positions are made in the first layer and read by all", "T5ForConditionalGeneration", T5)
_add("bart", "whole layers are dropped by torch's generator", "BartForConditionalGeneration", BART)
_add(
    "deberta",
    "a dropout Function of its own, positions against content",
    "DebertaForMaskedLM",
    {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False},
)
_add(
    "longformer",
    "sliding windows written through strides, some tokens see all",
    "LongformerForMaskedLM",
    {**TEXT, "attention_window": 4},
    lambda: _text(global_attention_mask=torch.tensor([[1] + [0] * 7] * 2)),
)
_add(
    "bigbird",
    "blocks of attention drawn by NumPy",
    "BigBirdForMaskedLM",
    {**TEXT, "attention_type": "block_sparse", "block_size": 4, "num_random_blocks": 1},
    lambda: _text(48, masked=False),
)
_add(
    "reformer",
    "reversible layers in a Function of their own, hashing, seeds drawn from the system",
    "ReformerModelWithLMHead",
    {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "attention_head_size": 8,
        "feed_forward_size": 24,
        "attn_layers": ["local", "lsh"],
        "axial_pos_embds": False,
        "max_position_embeddings": 64,
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
        "is_decoder": True,
        "chunk_size_feed_forward": 4,
    },
    lambda: _text(16, masked=False),
    not_repeatable=True,
)
_add(
    "mixtral",
    "experts by top-k, an auxiliary loss over the router's logits",
    "MixtralForCausalLM",
    {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True, "use_cache": False},
)
_add(
    "switch",
    "experts with a capacity and noise on the router",
    "SwitchTransformersForConditionalGeneration",
    {
        **T5,
        "num_decoder_layers": 2,
        "num_experts": 3,
        "expert_capacity": 4,
        "router_jitter_noise": 0.1,
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
        "output_router_logits": True,
    },
    lambda: _text(masked=False),
)
_add(
    "mamba",
    "a state space model: a scan in Python",
    "MambaForCausalLM",
    {
        "vocab_size": 40,
        "hidden_size": 16,
        "state_size": 4,
        "num_hidden_layers": 2,
        "time_step_rank": 4,
        "use_cache": False,
    },
    lambda: _text(masked=False),
)
_add(
    "recurrent_gemma",
    "a linear recurrence with a Function for the square root, a cache on the module",
    "RecurrentGemmaForCausalLM",
    {
        **GROUPED,
        "num_hidden_layers": 3,
        "lru_width": 16,
        "attention_window_size": 4,
        "conv1d_width": 4,
    },
    lambda: _text(masked=False),
)
_add(
    "perceiver",
    "learned latents look at the input",
    "PerceiverForMaskedLM",
    {
        "num_latents": 4,
        "d_latents": 16,
        "d_model": 16,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_self_attention_heads": 2,
        "num_cross_attention_heads": 2,
        "vocab_size": 40,
        "max_position_embeddings": 8,
        "qk_channels": 16,
        "v_channels": 16,
    },
    lambda: {"inputs": torch.randint(3, 40, (2, 8)), "labels": torch.randint(3, 40, (2, 8))},
)
_add(
    "whisper",
    "layers dropped, spans of the spectrogram masked by NumPy",
    "WhisperForConditionalGeneration",
    {
        **BART,
        "num_mel_bins": 8,
        "max_source_positions": 10,
        "max_target_positions": 16,
        "apply_spec_augment": True,
        "mask_time_prob": 0.3,
        "mask_time_length": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    },
    lambda: {"input_features": torch.randn(2, 8, 20), "labels": torch.randint(3, 40, (2, 6))},
)
_add("wav2vec2", "masked time steps, layer drop, weight norm over a convolution, CTC", "Wav2Vec2ForCTC", SPEECH, _waves)
_add(
    "hubert",
    "batch norm in place of weight norm before the same",
    "HubertForCTC",
    {**SPEECH, "conv_pos_batch_norm": True},
    _waves,
)
_add(
    "vits",
    "a speech flow: durations drawn, lengths that depend on data",
    "VitsModel",
    {
        "vocab_size": 20,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "ffn_dim": 16,
        "flow_size": 16,
        "spectrogram_bins": 9,
        "upsample_initial_channel": 16,
        "upsample_rates": [2, 2],
        "upsample_kernel_sizes": [4, 4],
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3]],
        "prior_encoder_num_flows": 2,
        "prior_encoder_num_wavenet_layers": 2,
        "posterior_encoder_num_wavenet_layers": 2,
        "duration_predictor_num_flows": 2,
        "depth_separable_num_layers": 2,
        "layerdrop": 0.3,
    },
    lambda: {"input_ids": torch.randint(1, 20, (1, 6))},
    loss=lambda out: out.waveform.square().mean(),
)
_add(
    "masked_autoencoder",
    "patches are shuffled and dropped",
    "ViTMAEForPreTraining",
    {
        **VISION,
        "decoder_hidden_size": 8,
        "decoder_num_attention_heads": 2,
        "decoder_num_hidden_layers": 1,
        "decoder_intermediate_size": 12,
    },
    lambda: _images(16),
)
_add(
    "convnext",
    "depthwise convolutions, global response norm, stochastic depth",
    "ConvNextV2ForImageClassification",
    {"hidden_sizes": [4, 6, 8, 10], "depths": [1, 1, 2, 1], "image_size": 32, "drop_path_rate": 0.4},
    _labelled,
)
_add(
    "swin",
    "windows are rolled, stochastic depth",
    "Swinv2ForImageClassification",
    {**WINDOWS, "drop_path_rate": 0.3},
    _labelled,
)
_add(
    "segformer",
    "attention over reduced images, upsampled logits",
    "SegformerForSemanticSegmentation",
    {
        "num_encoder_blocks": 2,
        "depths": [1, 1],
        "sr_ratios": [2, 1],
        "hidden_sizes": [8, 8],
        "patch_sizes": [3, 3],
        "strides": [2, 2],
        "num_attention_heads": [1, 2],
        "mlp_ratios": [2, 2],
        "decoder_hidden_size": 8,
        "num_labels": 3,
        "drop_path_rate": 0.4,
    },
    lambda: _images(16, labels=torch.randint(0, 3, (2, 16, 16))),
)
_add(
    "clip",
    "two towers that meet in a contrastive loss",
    "CLIPModel",
    {
        "text_config": {**SIZES, "max_position_embeddings": 16},
        "vision_config": {**VISION, "patch_size": 8},
        "projection_dim": 8,
    },
    lambda: _images(16, input_ids=torch.randint(3, 40, (2, 8)), return_loss=True),
)
_add(
    "informer",
    "queries are sampled, distributions are the output",
    "InformerForPrediction",
    {
        "prediction_length": 4,
        "context_length": 8,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
        "input_size": 1,
        "encoder_layerdrop": 0.2,
    },
    lambda: {
        "past_values": torch.rand(2, 10),
        "past_time_features": torch.randn(2, 10, 1),
        "past_observed_mask": torch.ones(2, 10),
        "future_values": torch.rand(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    },
)
