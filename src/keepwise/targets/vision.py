"""Models of pictures from `transformers` configs, with random weights."""

from __future__ import annotations

from typing import Any

from keepwise.targets import data
from keepwise.targets.extras import block_names, require
from keepwise.targets.target import Batch, Target

_CLASSES = 16


def _classifier(model: Any, *, count: int, size: int, blocks: str) -> Target:
    """A target out of a picture classifier: the labels go into the model, which returns the loss."""

    def batch(index: int) -> Batch:
        pixels, labels = data.pictures(index, count, size, _CLASSES)
        return (), {"pixel_values": pixels, "labels": labels}

    args, kwargs = batch(0)
    return Target(
        name="",
        model=model.train(),
        args=args,
        kwargs=kwargs,
        tokens=count,
        blocks=block_names(model, blocks),
        batches=batch,
    )


def vit(*, tiny: bool) -> Target:
    """Vision Transformer (Dosovitskiy et al. 2020)."""
    hf = require("transformers", extra="transformers")
    size: dict[str, int] = (
        {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        if tiny
        else {"num_hidden_layers": 6, "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    )
    side, patch = (32, 8) if tiny else (224, 16)
    config = hf.ViTConfig(**size, image_size=side, patch_size=patch, num_labels=_CLASSES, attn_implementation="sdpa")
    model = hf.ViTForImageClassification(config)
    blocks = "vit.layers.*" if hasattr(model.vit, "layers") else "vit.encoder.layer.*"
    return _classifier(model, count=2 if tiny else 8, size=side, blocks=blocks)


def resnet50(*, tiny: bool) -> Target:
    """ResNet-50 (He et al. 2015): BatchNorm's statistics move in forward, ReLU works in place."""
    hf = require("transformers", extra="transformers")
    size: dict[str, Any] = {"embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2]} if tiny else {}
    model = hf.ResNetForImageClassification(hf.ResNetConfig(**size, num_labels=_CLASSES))
    return _classifier(
        model, count=4 if tiny else 8, size=32 if tiny else 160, blocks="resnet.encoder.stages.*.layers.*"
    )


def convnext(*, tiny: bool) -> Target:
    """ConvNeXt (Liu et al. 2022), the paper's own "tiny": kernels that copy their inputs to another memory layout."""
    hf = require("transformers", extra="transformers")
    size: dict[str, Any] = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [2, 2]} if tiny else {}
    model = hf.ConvNextForImageClassification(hf.ConvNextConfig(**size, num_labels=_CLASSES))
    return _classifier(
        model, count=2 if tiny else 8, size=32 if tiny else 160, blocks="convnext.encoder.stages.*.layers.*"
    )
