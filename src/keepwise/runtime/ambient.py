"""Settings of the process that decide how a kernel computes: a replay computes under those of its forward pass.

A model may run forward under `torch.backends.mkldnn.flags(enabled=False)`, another default dtype or another number of threads
than backward. Its results would then differ from their replays in the last bits (or in their dtype), so every window notes the
settings when it begins to capture, and its replay puts them back for its duration. They belong to the process: while a replay
has other settings than its surroundings, it holds a lock.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

_C: Any = torch._C
_LOCK = threading.RLock()


def _settings() -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """(read, write) of each setting that this build of PyTorch has."""
    names = [
        ("_get_mkldnn_enabled", "_set_mkldnn_enabled"),
        ("_get_mkldnn_deterministic", "_set_mkldnn_deterministic"),
        ("_get_deterministic_algorithms", "_set_deterministic_algorithms"),
    ]
    if torch.backends.cuda.is_built():
        names += [
            ("_get_cudnn_enabled", "_set_cudnn_enabled"),
            ("_get_cudnn_benchmark", "_set_cudnn_benchmark"),
            ("_get_cudnn_deterministic", "_set_cudnn_deterministic"),
            ("_get_cudnn_allow_tf32", "_set_cudnn_allow_tf32"),
            ("_get_cublas_allow_tf32", "_set_cublas_allow_tf32"),
        ]
    found = [(getattr(_C, get), getattr(_C, put)) for get, put in names if hasattr(_C, get) and hasattr(_C, put)]
    return [*found, (torch.get_num_threads, torch.set_num_threads), (torch.get_default_dtype, torch.set_default_dtype)]


_SETTINGS = _settings()
_READERS = tuple(read for read, _ in _SETTINGS)


class Ambient:
    """The settings at one moment."""

    __slots__ = ("values",)

    def __init__(self, values: tuple[Any, ...]) -> None:
        self.values = values

    @staticmethod
    def now() -> Ambient:
        """The settings as they are."""
        return Ambient(tuple([read() for read in _READERS]))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """These settings inside, those of the surroundings again afterwards."""
        if tuple([read() for read in _READERS]) == self.values:
            yield
            return
        with _LOCK:
            before = tuple([read() for read in _READERS])
            _set(before, self.values)
            try:
                yield
            finally:
                _set(self.values, before)


def _set(now: tuple[Any, ...], wanted: tuple[Any, ...]) -> None:
    for (_, write), a, b in zip(_SETTINGS, now, wanted, strict=True):
        if a != b:
            write(b)
