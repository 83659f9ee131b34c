"""Everything that a traced step may change, and how it is put back bit for bit.

Notes:
1. Parameters and buffers are copied into files (`spill.Copy`), compared afterwards and written back only where they differ, in
   place: storages, views and hooks stay what they were. Version counters are put back too, so that a graph the user holds
   does not complain.
2. A parameter's `.grad` is taken off and the same object put back; gradients of the traced steps are others.
3. What the step changes in Python is put back by `python_state`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from keepwise.trace.spill import Copy, can_spill

Tensor = torch.Tensor

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


class Generators:
    """States of all global generators: torch on every device in use, Python, NumPy."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = (
            torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        )
        self.python = random.getstate()
        numpy = _numpy()
        self.numpy: Any = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        numpy = _numpy()
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def _numpy() -> Any:
    """NumPy, if anyone has imported it."""
    return sys.modules.get("numpy")


def set_version(t: Tensor, version: int) -> None:
    """Put a version counter back."""
    try:
        _autograd._unsafe_set_version_counter((t,), (version,))
    except TypeError:  # PyTorch before 2.7 takes one tensor at a time
        _autograd._unsafe_set_version_counter(t, version)


class Bytes:
    """Contents of tensors, each storage once (note 1)."""

    def __init__(self, tensors: Iterable[Tensor], *, to_disk: bool = True) -> None:
        self._saved: dict[int, tuple[Tensor, Copy]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        self._shapes: list[tuple[Tensor, torch.Size, tuple[int, ...], int]] = []
        for t in tensors:
            if not can_spill(t):
                continue
            storage = t.untyped_storage()
            self._shapes.append((t, t.shape, t.stride(), int(t.storage_offset())))
            if not t.is_inference():
                self._versions.append((t, t._version))
            if storage._cdata not in self._saved:
                self._saved[storage._cdata] = (t, Copy(storage, to_disk=to_disk))

    def restore(self) -> int:
        """Write back what differs; the number of storages that did."""
        changed = 0
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for t, copy in self._saved.values():
                storage = t.untyped_storage()
                if storage.nbytes() != copy.nbytes:
                    if storage.resizable():
                        storage.resize_(copy.nbytes)
                    else:  # NumPy was given its memory meanwhile
                        storage = torch.UntypedStorage(copy.nbytes, device=storage.device)
                        t.data = torch.empty(0, dtype=t.dtype, device=t.device).set_(storage)  # type: ignore[call-overload]
                if not copy.equals(storage):
                    changed += 1
                    copy.into(storage)
            # What shows more than its storage holds would write elsewhere.
            for t, shape, stride, offset in self._shapes:
                if t.shape != shape or t.stride() != stride or t.storage_offset() != offset:
                    t.data = t.detach().as_strided(shape, stride, offset)
            for t, version in self._versions:
                if t._version != version:
                    set_version(t, version)
        return changed


class Gradients:
    """The `.grad` objects of parameters and arguments (note 2), and whether they ask for one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [(t, t.grad, t.requires_grad) for t in tensors if t.is_leaf]

    def clear(self) -> None:
        """Take them off."""
        for t, _, _ in self._saved:
            t.grad = None

    def restore(self) -> None:
        """Put the same objects back."""
        for t, grad, requires_grad in self._saved:
            t.grad = grad
            if t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a pytree."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
