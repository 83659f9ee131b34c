"""The bytes of a CPU storage as a `memoryview`.

`Tensor.numpy()` would mark the storage as one that cannot be resized any more, for good: a trace that the user's own `resize_` would meet.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

_view_of: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_READ_AND_WRITE = 0x200


def bytes_at(t: torch.Tensor | torch.UntypedStorage, num_bytes: int) -> memoryview:
    """The `num_bytes` bytes from the first element on; the caller keeps `t` alive while it uses them."""
    if not num_bytes:
        return memoryview(b"")
    view: memoryview = _view_of(t.data_ptr(), num_bytes, _READ_AND_WRITE)
    return view
