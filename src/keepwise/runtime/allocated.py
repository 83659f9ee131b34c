"""What a device's allocator has counted."""

from __future__ import annotations

import torch


def highest_allocated(device: torch.device) -> int | None:
    """The most bytes that tensors had on a device at once since its peak statistics were last reset; None where nobody counts (the CPU).

    The statistics are the user's: nothing of ours resets them.
    """
    if device.type != "cuda":
        return None
    counted = torch.cuda.memory_stats_as_nested_dict(device)
    return int(counted["allocated_bytes"]["all"]["peak"]) if counted else None
