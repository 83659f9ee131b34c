"""Data for the built-in targets: real bytes of text, pictures and sounds drawn from them; nothing is downloaded.

The text is the source code of Python's standard library, read from where it is installed. A token is a byte. Pictures
and spectrograms are drawn by formulas whose numbers come from that text, so that labels can be learned from them.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_CORPUS_BYTES = 4 << 20


@functools.lru_cache(maxsize=1)
def corpus() -> np.ndarray:
    """The first 4 MiB of the standard library's top-level sources, in order of file name, as uint8."""
    parts: list[bytes] = []
    size = 0
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        parts.append(path.read_bytes())
        size += len(parts[-1])
        if size >= _CORPUS_BYTES:
            break
    return np.frombuffer(b"".join(parts)[:_CORPUS_BYTES], dtype=np.uint8)


def text(index: int, rows: int, length: int) -> Tensor:
    """Token ids (int64, `rows` x `length`, below 256) of the `index`-th batch: `rows` consecutive pieces of text."""
    source = corpus()
    start = index * rows * length
    where = np.arange(start, start + rows * length) % len(source)
    return torch.from_numpy(source[where].astype(np.int64)).view(rows, length)


def masked_text(index: int, rows: int, length: int, *, mask_id: int, share: float = 0.15) -> tuple[Tensor, Tensor]:
    """Inputs with a `share` of the tokens replaced by `mask_id`, and labels: those tokens, and -100 elsewhere."""
    labels = text(index, rows, length)
    chosen = torch.from_numpy(np.random.default_rng(index).random((rows, length)) < share)
    return torch.where(chosen, mask_id, labels), torch.where(chosen, labels, -100)


def pictures(index: int, count: int, size: int, classes: int) -> tuple[Tensor, Tensor]:
    """Coloured waves on a shaded ground (float32, `count` x 3 x `size` x `size`, about -1...1) and labels (int64).

    The label is the direction of the waves, one of `classes`; their frequency, phase and colours come from the text.
    """
    source = corpus()
    start = index * count * 8
    numbers = torch.from_numpy(source[np.arange(start, start + count * 8) % len(source)].astype(np.float32)).view(
        count, 8
    )
    labels = (numbers.sum(1).long() * 2654435761 >> 7) % classes
    grid = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    angle = (labels.float() * (torch.pi / classes)).view(-1, 1, 1)
    along = x * angle.cos() + y * angle.sin()
    unit = (numbers / 256).view(count, 8, 1, 1)
    wave = torch.sin((8 + 24 * unit[:, 0]) * along + 6.3 * unit[:, 1])
    ground = x * (unit[:, 2] - 0.5) + y * (unit[:, 3] - 0.5)
    channels = [wave * (0.3 + 0.7 * unit[:, 4 + c]) + ground * (c - 1) for c in range(3)]
    return torch.stack(channels, 1).contiguous(), labels


def chirps(index: int, rows: int, mels: int, frames: int, letters: int) -> tuple[Tensor, Tensor]:
    """Made-up speech: features (float32, `rows` x `mels` x `frames`) and its text (int64, `rows` x `letters`).

    Each letter sounds for `frames / letters` frames at a pitch and with overtones given by its byte.
    """
    ids = text(index, rows, letters)
    spoken = ids.repeat_interleave(-(-frames // letters), dim=1)[:, :frames]
    pitch = (spoken % mels).unsqueeze(1).float()
    overtone = ((spoken * 7) % mels).unsqueeze(1).float()
    bins = torch.arange(mels, dtype=torch.float32).view(1, mels, 1)
    power = torch.exp(-((bins - pitch) ** 2) / 4) + 0.5 * torch.exp(-((bins - overtone) ** 2) / 8)
    return (power * 2 - 1).contiguous(), ids
