"""The peak of a device over a stretch of code, where the allocator keeps it for nothing (CUDA)."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import torch


class PeakTracker:
    """`with PeakTracker(device) as peak: ...`, then `peak.bytes`.

    On CUDA: the highest number of bytes allocated on the device, exact and free of cost; PyTorch's own peak statistics of
    that device begin anew. On other devices: None, since their allocators keep no mark.
    """

    def __init__(self, device: torch.device | str) -> None:
        """`device`: where to look."""
        self._device = torch.device(device)
        self.bytes: int | None = None
        self.reserved_bytes: int | None = None
        """Highest number of bytes that the caching allocator held, allocated or not."""

    @property
    def supported(self) -> bool:
        """Whether this device's allocator keeps a mark."""
        return self._device.type == "cuda" and torch.cuda.is_available()

    def __enter__(self) -> Self:
        """Begin at the present level."""
        if self.supported:
            torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Read the marks. The allocator counts when the host allocates, so no synchronisation is needed."""
        if self.supported:
            self.bytes = torch.cuda.max_memory_allocated(self._device)
            self.reserved_bytes = torch.cuda.max_memory_reserved(self._device)
