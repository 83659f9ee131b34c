"""Two facts about this release of torch, each measured once.

What reference counts look like from inside a dispatch mode when nobody but the engine holds a gradient, and what passing
through a mode costs an op.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keepwise.trace.quiet import quiet

Tensor = torch.Tensor


class _Probe(TorchDispatchMode):
    supports_higher_order_operators: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self.counts: tuple[int, int] | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor:
            self.counts = counts_of(args[0])
        return func(*args, **(kwargs or {}))


def counts_of(t: Tensor) -> tuple[int, int]:
    """References to a tensor and to its storage; valid in a mode's handler only."""
    anything: Any = t
    return anything._use_count(), torch._C._storage_Use_Count(t.untyped_storage()._cdata)


@functools.cache
def unshared_counts() -> tuple[int, int] | None:
    """Measured on a tiny graph in which the engine adds two gradients that nobody else holds.

    The counts depend on how this release of torch passes arguments to a mode, so they are found out instead of assumed. None
    where they cannot be.
    """
    probe = _Probe()
    with quiet(), torch.inference_mode(False), torch.enable_grad():
        x = torch.ones(2, requires_grad=True, device="cpu")
        y = x * 2.0
        loss = (y * 2.0 + y * 3.0).sum()  # Saves no tensor: hooks of the user are not called.
        with probe:
            torch.autograd.backward(loss, torch.ones((), device="cpu"))
    return probe.counts


@functools.cache
def dispatch_seconds() -> float:
    """Seconds that passing through a mode adds to an op before and after our own code runs; medians of a few hundred ops."""

    def loop(x: Tensor) -> float:
        seconds: list[float] = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(60):
                x.add_(1.0)
            seconds.append((time.perf_counter() - began) / 60)
        return statistics.median(seconds)

    with quiet(), torch.inference_mode(False), torch.no_grad():
        x = torch.zeros(1, device="cpu")
        plain = loop(x)
        with _Probe():
            through = loop(x)
    return max(through - plain, 0.0)


def is_dense(t: Tensor) -> bool:
    """Whether the elements fill one block of memory, each once, in any order of the dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(t.stride(), t.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
