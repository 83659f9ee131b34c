"""Where the tracer looks at tensors for itself: no mode of the user sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Outside of all dispatch and function modes; autograd stays as it is."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield
