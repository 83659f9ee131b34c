"""Settings of the process that decide how a kernel computes: a replay computes under those of its forward pass.

A model may run forward, or a part of it, under `torch.backends.mkldnn.flags(enabled=False)`, another default dtype or another number
of threads than backward. Its results would then differ from their replays in the last bits (or in their dtype), so every window notes
the settings when it begins to capture, every call those that are others by then, and a replay puts them back for its duration. They
belong to the process: while a replay has other settings than its surroundings, it holds a lock.
"""

from __future__ import annotations

import contextlib
import functools
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
    if hasattr(_C, "_get_fp32_precision_getter"):
        found += [_precision(kind) for kind in ("matmul", "conv", "rnn")]
    return [
        *found,
        (_determinism, _set_determinism),
        (torch.get_num_threads, torch.set_num_threads),
        (torch.get_default_dtype, torch.set_default_dtype),
    ]


def _precision(kind: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    """In which precision the CPU's kernels compute products of float32."""
    get, put = _C._get_fp32_precision_getter, _C._set_fp32_precision_setter

    def write(value: str) -> None:
        put("mkldnn", kind, "none" if value == get("mkldnn", "all") else value)  # "none": as what is above it says

    return functools.partial(get, "mkldnn", kind), write


def _determinism() -> tuple[bool, bool]:
    return _C._get_deterministic_algorithms(), _C._get_deterministic_algorithms_warn_only()


def _set_determinism(value: tuple[bool, bool]) -> None:
    _C._set_deterministic_algorithms(value[0], warn_only=value[1])


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

    def changed(self) -> Ambient | None:
        """The settings as they are, if they are others; else None."""
        values = tuple([read() for read in _READERS])
        return None if values == self.values else Ambient(values)

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
