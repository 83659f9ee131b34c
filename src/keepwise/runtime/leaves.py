"""Copies of small leaves, which the replays of one forward pass read instead of them.

Notes:
1. A leaf that autograd does not save may legally be written between forward and its replay: a buffer by the next forward pass, a bias
   by an optimizer. A small one is therefore captured by copy. One copy serves all captured calls that read the same version.
2. Whoever captured a copy keeps its memory alive; what is here are weak references. A leaf that is read when the last window that
   read a copy has replayed is copied anew.
3. A copy is used again while the leaf is the same storage at the same version and no op that we watch wrote it (some write without a
   version). On the CPU its bytes are compared as well, because code that shows no ops (NumPy) may write between two reads in forward.
"""

from __future__ import annotations

import weakref
from typing import NamedTuple

import torch

from keepwise.runtime.calls import storage_key
from keepwise.runtime.geometry import SMALL_BYTES, copy_whole, storage_bytes
from keepwise.runtime.holding import version_of

Tensor = torch.Tensor


class _Copy(NamedTuple):
    leaf: weakref.ref[torch.UntypedStorage]
    version: int
    copy: weakref.ref[torch.UntypedStorage]


class LeafCopies:
    """What one forward pass has copied of its leaves."""

    __slots__ = ("copies",)

    def __init__(self) -> None:
        self.copies: dict[int, _Copy] = {}
        """By the leaf's storage."""

    def of(self, t: Tensor) -> Tensor:
        """A detached tensor with what `t` shows now, on memory of ours that nobody may write; no mode sees it."""
        key = storage_key(t)
        if key is None or t.is_quantized or t.is_conj() or t.is_neg() or t._is_zerotensor():  # type: ignore[operator]
            return copy_whole(t)
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            leaf = t.untyped_storage()
            if leaf.nbytes() > SMALL_BYTES:  # a small view, in this step, of something large
                return copy_whole(t)
            copy = self._found(key, leaf, version_of(t))
            if copy is None:
                copy = _all_bytes(leaf).clone().untyped_storage()
                self.copies[key] = _Copy(weakref.ref(leaf), version_of(t), weakref.ref(copy))
            view = torch.empty(0, dtype=t.dtype, device=t.device)
            return view.set_(copy, t.storage_offset(), t.shape, t.stride())  # type: ignore[arg-type]

    def _found(self, key: int, leaf: torch.UntypedStorage, version: int) -> torch.UntypedStorage | None:
        """The copy that there is of a leaf at a version: notes 2 and 3."""
        known = self.copies.get(key)
        if known is None or version < 0 or known.version != version or known.leaf() is not leaf:
            return None
        copy = known.copy()
        if copy is None or (leaf.device.type == "cpu" and not _are_equal(leaf, copy)):
            return None
        return copy

    def forget(self, storage: int | None) -> None:
        """A storage is written; copies that calls captured stay as they are."""
        if storage is not None:
            self.copies.pop(storage, None)


def _are_equal(a: torch.UntypedStorage, b: torch.UntypedStorage) -> bool:
    x, y = _all_bytes(a), _all_bytes(b)
    return torch.equal(x, y) if x.dtype == y.dtype else torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def _all_bytes(storage: torch.UntypedStorage) -> Tensor:
    """As words where that is possible: comparing them takes an eighth of the time."""
    dtype = torch.int64 if storage.nbytes() % 8 == 0 and storage.data_ptr() % 8 == 0 else torch.uint8
    return storage_bytes(storage, dtype)
