"""Views described by their numbers, and copies that keep them.

Some tensor objects come from no op that is replayed: an alias made by `.data`, a view that autograd made anew. They are described
over another object of the same storage, relative to where that object begins, because a replay's storage may begin elsewhere.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor

SMALL_BYTES = 64 * 1024
"""Captured tensors that may legally be written before their replay are copied up to this size."""


class Geometry:
    """Where a tensor lies over another one of the same storage and dtype."""

    __slots__ = ("offset", "root", "shape", "stride")

    def __init__(self, shape: torch.Size, stride: tuple[int, ...], offset: int, root: int) -> None:
        self.shape, self.stride = shape, stride
        self.offset = offset
        """Elements after the beginning of the other tensor."""
        self.root = root
        """View id of the other tensor."""

    @staticmethod
    def over(base: Tensor, t: Tensor, root: int) -> Geometry | None:
        """`t` over `base`; None where it does not lie within the memory that `base` spans, or reads it as another type."""
        if t.dtype != base.dtype:
            return None
        offset = int(t.storage_offset()) - int(base.storage_offset())
        if offset < 0 or offset + span(t) > span(base):
            return None
        return Geometry(t.shape, t.stride(), offset, root)

    def of(self, base: Tensor) -> Tensor:
        """The same view over a replayed `base`."""
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset)


def span(t: Tensor) -> int:
    """Number of elements from the first to the last that `t` shows."""
    if not t.numel():
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))


def storage_bytes(storage: torch.UntypedStorage, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A tensor over all bytes of a storage, which it shares; as words of another dtype where they divide it."""
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)  # type: ignore[call-overload]


def copy_whole(t: Tensor) -> Tensor:
    """A copy on a storage of its own with the same strides, also where they overlap or leave gaps; no mode sees it."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        if (t.is_contiguous() and not t.is_conj() and not t.is_neg()) or t._is_zerotensor():  # type: ignore[operator]
            return t.detach().clone()
        size = span(t)
        room = torch.empty(size, dtype=t.dtype, device=t.device)
        room.copy_(t.detach().as_strided((size,), (1,), t.storage_offset()))
        return room.as_strided(t.shape, t.stride(), 0)
