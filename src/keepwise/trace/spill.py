"""Saved tensors leave memory while a step is recorded, so that what else holds them shows.

Notes:
1. A copy is made of the whole storage, once for each version, so that views that share it share it again when they come back.
2. On the CPU a copy goes to a file without a name (`arena`). Small ones, and all of them where there is no room, stay in memory.
   Device tensors go to the host.
3. What comes back lies in an ordinary allocation: aligned as every other, so that kernels take the same path.
"""

from __future__ import annotations

import os
import weakref

import torch

from keepwise.runtime.geometry import storage_bytes
from keepwise.trace.arena import ARENA

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
        and not t._is_zerotensor()  # type: ignore[operator] - zeros without memory, as derivatives make them
        and type(t) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        and t.device.type != "meta"
    )


class Copy:
    """A storage's bytes, apart from the storage."""

    __slots__ = ("__weakref__", "_back", "_bytes", "_owner", "_place", "device", "nbytes")

    def __init__(self, storage: torch.UntypedStorage, *, to_disk: bool) -> None:
        self.nbytes = storage.nbytes()
        self.device = storage.device
        self._back: weakref.ref[torch.UntypedStorage] | None = None
        self._bytes: torch.UntypedStorage | None = None
        self._owner = os.getpid()
        self._place: int | None = None
        if to_disk and self.device.type == "cpu" and self.nbytes > SMALL_BYTES:
            self._place = ARENA.write(storage)
        if self._place is None:
            self._bytes = torch.UntypedStorage(self.nbytes, device="cpu")
            self._bytes.copy_(storage, non_blocking=False)

    def __del__(self) -> None:
        if self._place is not None:
            ARENA.release(self._owner)

    def back(self) -> tuple[torch.UntypedStorage, bool]:
        """The storage again, and whether it was made just now; shared while anyone holds it."""
        storage = self._back() if self._back is not None else None
        if storage is not None:
            return storage, False
        storage = torch.UntypedStorage(self.nbytes, device=self.device)
        self.into(storage)
        self._back = weakref.ref(storage)
        return storage, True

    def into(self, storage: torch.UntypedStorage) -> None:
        """Write the bytes over a storage of the same size."""
        if self._place is not None:
            ARENA.read(self._place, storage)
        else:
            assert self._bytes is not None
            storage.copy_(self._bytes, non_blocking=False)

    def equals(self, storage: torch.UntypedStorage) -> bool:
        """Whether a storage holds the same bytes still."""
        here = storage if storage.device.type == "cpu" else storage.cpu()
        copy = self._bytes
        if copy is None:
            copy = torch.UntypedStorage(self.nbytes, device="cpu")
            self.into(copy)
        return torch.equal(storage_bytes(here), storage_bytes(copy))


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
