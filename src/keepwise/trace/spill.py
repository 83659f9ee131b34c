"""Saved tensors leave memory while a step is recorded, so that what else holds them shows.

Notes:
1. A copy is made of the whole storage, once for each version, so that views that share it share it again when they come back.
2. On the CPU a copy goes to an unlinked file, mapped into memory; space is reserved first, because a full disk would else show as a
   bus error. Small ones, and all of them where there is no room, stay in memory. Device tensors go to the host.
3. What comes back lies in an ordinary allocation: aligned as every other, so that kernels take the same path.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from typing import Any

import torch

Tensor = torch.Tensor

SMALL_BYTES = 1 << 16
"""Copies up to this size stay in memory: a file costs more than it saves."""


def can_spill(t: Tensor) -> bool:
    """Whether a tensor is nothing but a window on a plain storage."""
    return (
        t.layout is torch.strided
        and not t.is_nested
        and not t.is_quantized
        and not t.is_conj()
        and not t.is_neg()
        and type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and t.device.type != "meta"
    )


class Copy:
    """A storage's bytes, apart from the storage."""

    __slots__ = ("__weakref__", "_back", "_bytes", "device", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, *, to_disk: bool) -> None:
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self._back: weakref.ref[torch.UntypedStorage] | None = None
        self._bytes = _room(self.nbytes, to_disk=to_disk and self.device.type == "cpu")
        self._bytes.copy_(storage, non_blocking=False)

    def back(self) -> tuple[torch.UntypedStorage, bool]:
        """The storage again, and whether it was made just now; shared while anyone holds it."""
        storage = self._back() if self._back is not None else None
        if storage is not None:
            return storage, False
        storage = torch.UntypedStorage(self.nbytes, device=self.device)
        storage.copy_(self._bytes, non_blocking=False)
        self._back = weakref.ref(storage)
        return storage, True

    def into(self, storage: torch.UntypedStorage) -> None:
        """Write the bytes over a storage of the same size."""
        storage.copy_(self._bytes, non_blocking=False)

    def equals(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage holds the same bytes still."""
        here = storage if storage.device.type == "cpu" else storage.cpu()
        return torch.equal(_as_bytes(here), _as_bytes(self._bytes))


def _as_bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]


def _room(nbytes: int, *, to_disk: bool) -> torch.UntypedStorage:
    if to_disk and nbytes > SMALL_BYTES:
        try:
            handle, name = tempfile.mkstemp(prefix="keepwise-")
        except OSError:
            return torch.UntypedStorage(nbytes, device="cpu")
        try:
            os.posix_fallocate(handle, 0, nbytes)
            mapped: Any = torch.UntypedStorage.from_file(name, True, nbytes)
            return mapped
        except OSError:
            return torch.UntypedStorage(nbytes, device="cpu")
        finally:
            os.close(handle)
            os.unlink(name)
    return torch.UntypedStorage(nbytes, device="cpu")


class Geometry:
    """How a tensor lies on its storage."""

    __slots__ = ("dtype", "offset", "shape", "stride")

    def __init__(self, t: Tensor) -> None:
        self.dtype = t.dtype
        self.shape = tuple(t.shape)
        self.stride = t.stride()
        self.offset = t.storage_offset()

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same window on another storage of the same bytes."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.shape, self.stride)  # type: ignore[call-overload]
