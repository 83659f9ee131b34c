"""The table of built-in targets: name, module that builds it, and one line for `keepwise fit --list`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from keepwise._errors import UsageError
from keepwise.targets.target import Target

TINY = "-tiny"
"""Suffix of the small size of each target: a step of some milliseconds, for tests."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    module: str
    function: str
    about: str
    options: dict[str, Any] = field(default_factory=dict)


def _entry(where: str, about: str, **options: Any) -> _Entry:
    module, function = where.split(":")
    return _Entry(module=f"keepwise.targets.{module}", function=function, about=about, options=options)


# Default sizes are such that a plain step takes some seconds on two CPU cores.
_TABLE: dict[str, _Entry] = {
    "gpt2": _entry("language:gpt2", "GPT-2, 6 blocks of width 768, 4 x 512 bytes of text (transformers)"),
    "gpt2-dropout": _entry("language:gpt2", "gpt2 with dropout 0.1 (transformers)", dropout=0.1),
    "gpt2-eager": _entry(
        "language:gpt2", "gpt2 with unfused attention, which saves T x T scores (transformers)", eager=True
    ),
    "llama": _entry("language:llama", "Llama, 6 blocks of width 768, grouped-query attention, 4 x 512 (transformers)"),
    "llama-lora": _entry("language:llama", "llama, frozen, with LoRA adapters (transformers, peft)", lora=True),
    "mixtral": _entry("language:mixtral", "Mixtral, mixture of 4 experts, 2 for a token (transformers)"),
    "bert": _entry("language:bert", "BERT, 6 blocks of width 768, dropout 0.1, masked text 4 x 512 (transformers)"),
    "t5": _entry("language:t5", "T5 encoder and decoder, dropout 0.1 (transformers)"),
    "whisper": _entry("language:whisper", "Whisper encoder and decoder on made-up sounds (transformers)"),
    "vit": _entry("vision:vit", "Vision Transformer, 6 blocks of width 768, 8 pictures of 224 x 224 (transformers)"),
    "resnet50": _entry("vision:resnet50", "ResNet-50, BatchNorm, 8 pictures of 160 x 160 (transformers)"),
    "convnext": _entry("vision:convnext", "ConvNeXt, depthwise convolutions, 8 pictures of 160 x 160 (transformers)"),
    "unet": _entry("unet:unet", "U-Net that removes noise: skips live across the whole network"),
    "lstm": _entry("recurrent:lstm", "LSTM language model, 4 layers with dropout between them"),
    "ode": _entry("recurrent:ode", "neural ODE: one small network called 4 times in each of many solver steps"),
    "mlp": _entry("mlp:mlp", "residual MLP, 8 blocks x + relu(x W1) W2"),
}


def names() -> tuple[str, ...]:
    """All built-in names: each target in its default size, then in its `-tiny` size."""
    return tuple(name + size for name in _TABLE for size in ("", TINY))


def describe(name: str) -> str:
    """One line about a built-in target, without building it."""
    entry = _find(name)
    return f"{entry.about}; the smallest size, for tests" if name.endswith(TINY) else entry.about


def build(name: str, *, step: int = 0) -> Target:
    """A built-in target with freshly made weights: the same bits on every call.

    Args:
        name: one of `names()`.
        step: which batch of its data stands in `args` and `kwargs`.

    Raises:
        UsageError: there is no such name, or it needs an extra that is not installed.
    """
    entry = _find(name)
    import torch

    builder: Callable[..., Target] = getattr(importlib.import_module(entry.module), entry.function)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        target = builder(tiny=name.endswith(TINY), **entry.options)
    args, kwargs = target.batch(step)
    return replace(target, name=name, args=args, kwargs=kwargs, description=describe(name))


def _find(name: str) -> _Entry:
    entry = _TABLE.get(name.removesuffix(TINY))
    if entry is None:
        close = difflib.get_close_matches(name, names(), n=3)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise UsageError(
            f"no built-in target is called {name!r}: {hint}`keepwise fit --list` prints all; "
            "a target of your own is written file.py:function or package.module:function"
        )
    return entry
