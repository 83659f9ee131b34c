"""How much memory there is, and what `budget="auto"` makes of it."""

from __future__ import annotations

import resource

import psutil
import torch


def device_bytes(device: torch.device) -> int:
    """Memory of a device in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return psutil.virtual_memory().total


def auto_budget(device: torch.device, static_bytes: int) -> tuple[int, str]:
    """What is free plus what this process already holds for tensors, less a margin.

    The margin is max(1 GiB, 5 %) on CUDA, for context and fragmentation, and 5 % elsewhere.

    Returns:
        Bytes, and the numbers behind them in words.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        held = torch.cuda.memory_reserved(device)
        margin = max(2**30, total // 20)
        budget = free + held - margin
    else:
        free = psutil.virtual_memory().available
        held = static_bytes
        margin = free // 20
        budget = free + held - margin
    text = f"budget auto: {free} bytes free + {held} held by this process - {margin} margin = {budget}"
    return max(budget, 1), text


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be allocated on a device; on the CPU also under this process's address-space limit."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = psutil.virtual_memory().available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        free = min(free, limit - psutil.Process().memory_info().vms)
    return max(free, 0)
