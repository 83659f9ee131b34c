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
    size: str
    """What the default size is."""
    tiny: str
    """What the `-tiny` size is."""
    needs: str
    """Packages besides torch; empty for none."""
    options: dict[str, Any] = field(default_factory=dict)

    def line(self, *, tiny: bool) -> str:
        """One line for people."""
        return f"{self.about}: {self.tiny if tiny else self.size}" + (f" ({self.needs})" if self.needs else "")


_TEXT = "6 blocks of width 768, 4 x 512 bytes of text"
_TINY_TEXT = "2 blocks of width 64, 2 x 32 bytes of text"


def _entry(
    where: str,
    about: str,
    size: str = _TEXT,
    tiny: str = _TINY_TEXT,
    *,
    needs: str = "transformers",
    **options: Any,
) -> _Entry:
    module, function = where.split(":")
    return _Entry(
        module=f"keepwise.targets.{module}",
        function=function,
        about=about,
        size=size,
        tiny=tiny,
        needs=needs,
        options=options,
    )


# Default sizes are such that a plain step takes some seconds on two CPU cores.
_TABLE: dict[str, _Entry] = {
    "gpt2": _entry("language:gpt2", "GPT-2"),
    "gpt2-dropout": _entry("language:gpt2", "GPT-2 with dropout 0.1", dropout=0.1),
    "gpt2-eager": _entry("language:gpt2", "GPT-2 with unfused attention, which saves T x T scores", eager=True),
    "llama": _entry("language:llama", "Llama, grouped-query attention"),
    "llama-lora": _entry("language:llama", "Llama, frozen, with LoRA adapters", needs="transformers, peft", lora=True),
    "mixtral": _entry(
        "language:mixtral",
        "Mixtral, mixture of 4 experts, 2 for a token",
        "4 blocks of width 512, 4 x 512 bytes of text",
    ),
    "bert": _entry("language:bert", "BERT, dropout 0.1, masked text"),
    "t5": _entry(
        "language:t5",
        "T5 encoder and decoder, dropout 0.1",
        "4 + 4 blocks of width 512, 4 x 256 + 256 bytes of text",
        "2 + 2 blocks of width 64, 2 x 16 + 16 bytes of text",
    ),
    "whisper": _entry(
        "language:whisper",
        "Whisper encoder and decoder on made-up sounds",
        "4 + 4 blocks of width 384, 4 x 1000 frames, 128 letters",
        "2 + 2 blocks of width 64, 2 x 64 frames, 16 letters",
    ),
    "vit": _entry(
        "vision:vit",
        "Vision Transformer",
        "6 blocks of width 768, 8 pictures of 224 x 224",
        "2 blocks of width 64, 2 pictures of 32 x 32",
    ),
    "resnet50": _entry(
        "vision:resnet50",
        "ResNet, BatchNorm, in-place ReLU",
        "ResNet-50, 8 pictures of 160 x 160",
        "4 blocks, 4 pictures of 32 x 32",
    ),
    "convnext": _entry(
        "vision:convnext",
        "ConvNeXt, depthwise convolutions",
        "18 blocks, 8 pictures of 160 x 160",
        "4 blocks, 2 pictures of 32 x 32",
    ),
    "unet": _entry(
        "unet:unet",
        "U-Net that removes noise: skips live across the whole network",
        "width 48, 3 levels, 8 pictures of 96 x 96",
        "width 8, 2 levels, 2 pictures of 16 x 16",
        needs="",
    ),
    "lstm": _entry(
        "recurrent:lstm",
        "LSTM language model with dropout between its layers",
        "4 layers of width 512, 16 x 256 bytes of text",
        "2 layers of width 32, 2 x 24 bytes of text",
        needs="",
    ),
    "ode": _entry(
        "recurrent:ode",
        "neural ODE: one small network called 4 times in each solver step",
        "width 512, 40 steps, 2048 points",
        "width 16, 8 steps, 16 points",
        needs="",
    ),
    "mlp": _entry(
        "mlp:mlp",
        "residual MLP, 8 blocks x + relu(x W1) W2",
        "width 512, 4096 pieces of 16 bytes",
        "width 32, 16 pieces of 8 bytes",
        needs="",
    ),
}


def names() -> tuple[str, ...]:
    """All built-in names: each target in its default size, then in its `-tiny` size."""
    return tuple(name + size for name in _TABLE for size in ("", TINY))


def describe(name: str) -> str:
    """One line about a built-in target, without building it."""
    return _find(name).line(tiny=name.endswith(TINY))


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
