"""Holding a tensor between forward and backward without changing what autograd sees.

Notes:
1. A held tensor never carries a grad_fn: a saved output would close a reference cycle through C++ that the garbage collector
   cannot see, and leak whenever backward does not run.
2. The held alias shares the version counter of the original, so that a write in place is noticed when the tensor is used.
   `Tensor.detach` shares it in the `ADInplaceOrView` kernel, which is switched off inside a dispatch mode: `alias` puts it back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Tensor = torch.Tensor
Namer = Callable[[Tensor], str]

_INPLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def alias(t: Tensor) -> Tensor:
    """A detached alias that shares storage and version counter; for use inside a dispatch mode's handler (note 2)."""
    if not t.requires_grad or t.is_leaf:
        return t
    if not _is_excluded(_INPLACE_OR_VIEW):
        return t.detach()
    _set_excluded(_INPLACE_OR_VIEW, False)
    try:
        return t.detach()
    finally:
        _set_excluded(_INPLACE_OR_VIEW, True)


def alias_in_pack(t: Tensor) -> Tensor:
    """The same for use inside a pack hook, where a dispatch mode of ours may be active."""
    if not t.requires_grad or t.is_leaf:
        return t
    with torch._C._DisableTorchDispatch():
        return t.detach()


def version_of(t: Tensor) -> int:
    """The version counter; -1 for inference tensors, which have none."""
    return -1 if t.is_inference() else t._version


def check_version(t: Tensor, version: int, name: str, reader: str) -> None:
    """Raise as plain autograd does when a tensor that backward needs was written in place.

    Raises:
        RuntimeError: the version counter moved.
    """
    now = version_of(t)
    if now != version:
        what = f" {name!r}" if name else ""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{t.dtype} tensor{what} of shape {list(t.shape)} is at version {now}; expected version {version} instead. "
            f"It was read in forward{reader}. Write to it after backward, or to a copy."
        )


class KeptSave:
    """What autograd holds for a saved tensor that the plan keeps: the tensor and the version at which it was saved."""

    __slots__ = ("namer", "tensor", "version")

    def __init__(self, tensor: Tensor, namer: Namer | None) -> None:
        self.tensor = alias_in_pack(tensor)
        self.version = version_of(tensor)
        self.namer = namer

    def unpack(self) -> Tensor:
        """The tensor, if nobody wrote to it since.

        Raises:
            RuntimeError: it was written in place.
        """
        t = self.tensor
        if version_of(t) != self.version:
            check_version(t, self.version, self.namer(t) if self.namer else "", "")
        return t


class ForeignSave:
    """A kept tensor that passed through the user's own hooks, which were active around ours."""

    __slots__ = ("foreign_unpack", "packed")

    def __init__(self, packed: object, foreign_unpack: Callable[[object], Tensor]) -> None:
        self.packed = packed
        self.foreign_unpack = foreign_unpack

    def unpack(self) -> Tensor:
        """What the user's unpack hook returns."""
        return self.foreign_unpack(self.packed)
