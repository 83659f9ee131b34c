"""Holding a tensor between forward and backward without changing what autograd sees.

Notes:
1. A held tensor never carries a grad_fn: a saved output would close a reference cycle through C++ that the garbage collector
   cannot see, and leak whenever backward does not run.
2. The held alias shares the version counter of the original, so that a write in place is noticed when the tensor is used.
   `Tensor.detach` shares it in the `ADInplaceOrView` kernel, which is switched off inside a dispatch mode: `alias` puts it back.
3. A dropped tensor is not held, its version counter is: by an alias whose storage was exchanged for an empty one.
4. None of this may reach the user's modes, of either kind.
5. A tracer that runs below us (the branches of `torch.cond`, a compiler) must see what it saves come back: it follows tensors from op to
   op, and takes one that no op made for a constant.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import _disable_current_modes

Tensor = torch.Tensor
Namer = Callable[[Tensor], str]

_INPLACE_OR_VIEW = torch._C.DispatchKey.ADInplaceOrView
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded


def alias(t: Tensor) -> Tensor:
    """A detached alias that shares storage and version counter; for use inside a dispatch mode's handler (note 2).

    A parameter gets one, too: its `.data` may be exchanged before the replay (averaged weights), which writes nothing.
    """
    if not t.requires_grad:
        return t
    with torch._C._DisableTorchDispatch():
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
    with torch._C.DisableTorchFunction():
        if type(t) is Tensor:
            with torch._C._DisableTorchDispatch():
                return t.detach()
        with _disable_current_modes():  # a subclass detaches by a rule of its own
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
        raise _modified(t.dtype, t.shape, now, version, name, reader)


def _modified(dtype: torch.dtype, shape: torch.Size, now: int, version: int, name: str, reader: str) -> RuntimeError:
    what = f" {name!r}" if name else ""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"{dtype} tensor{what} of shape {list(shape)} is at version {now}; expected version {version} instead. "
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


class VersionStub:
    """Knows whether a tensor was written in place since, without holding its memory (note 3); for use inside a pack hook."""

    __slots__ = ("alias", "shape", "version")

    def __init__(self, t: Tensor) -> None:
        self.version = version_of(t)
        self.shape = t.shape
        self.alias: Tensor | None = None
        if self.version >= 0:
            with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
                self.alias = t.detach()
                self.alias.data = _nothing(t.dtype, t.device)

    def is_current(self) -> bool:
        """Whether the tensor was not written."""
        return self.alias is None or self.alias._version == self.version

    def check(self) -> None:
        """Raise as plain autograd does where the tensor was written.

        Raises:
            RuntimeError: it was.
        """
        alias = self.alias
        if alias is not None and alias._version != self.version:
            raise _modified(alias.dtype, self.shape, alias._version, self.version, "", "")


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


class ForeignSave:
    """A kept tensor that passed through the user's own hooks, which were active around ours."""

    __slots__ = ("foreign_unpack", "packed")

    def __init__(self, packed: object, foreign_unpack: Callable[[object], Tensor]) -> None:
        self.packed = packed
        self.foreign_unpack = foreign_unpack

    def unpack(self) -> Tensor:
        """What the user's unpack hook returns."""
        return self.foreign_unpack(self.packed)


class TracedSave:
    """A saved tensor of a graph that a tracer is making (note 5)."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()

    def unpack(self) -> Tensor:
        """The tensor."""
        return self.tensor
