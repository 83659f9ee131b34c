"""What the device in this machine reaches, as a `cost.DeviceProfile`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

from keepwise.cost import DeviceProfile

ROUNDS = 5
_STREAM_BYTES = 64 << 20


def measure_device(device: torch.device | str = "cpu") -> DeviceProfile:
    """Measure rates: products of square matrices, copies of 64 MiB, and the smallest op.

    Medians of five runs after a first one; they are what kernels reach, so both shares of the profile are 1. Links to
    other devices are not measured: copies to the host stand for them.

    Args:
        device: `"cpu"`, `"cuda"`, ...
    """
    where = torch.device(device)
    on_gpu = where.type == "cuda"
    size = 4096 if on_gpu else 1024

    def product(dtype: torch.dtype) -> float:
        a, b = (torch.ones(size, size, dtype=dtype, device=where) for _ in range(2))
        out = torch.empty_like(a)
        return 2 * size**3 / _median(lambda: torch.mm(a, b, out=out), where)

    with torch.inference_mode():
        half, single = product(torch.bfloat16), product(torch.float32)
        source = torch.ones(_STREAM_BYTES, dtype=torch.uint8, device=where)
        copy = torch.ones_like(source)
        stream = 2 * _STREAM_BYTES / _median(lambda: copy.copy_(source), where)
        host = stream
        if on_gpu:
            below = torch.ones(_STREAM_BYTES, dtype=torch.uint8).pin_memory()
            host = _STREAM_BYTES / _median(lambda: below.copy_(source), where)
        one = torch.zeros(1, device=where)
        launch = _median(lambda: [one.add_(1) for _ in range(200)], where) / 200
    memory = torch.cuda.get_device_properties(where).total_memory if on_gpu else psutil.virtual_memory().total
    name = (
        torch.cuda.get_device_name(where)
        if on_gpu
        else f"CPU, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    return DeviceProfile(
        name=name,
        memory_bytes=memory,
        is_host=not on_gpu,
        half_flops=half,
        single_flops=single,
        memory_bandwidth=stream,
        link_bandwidth=host,
        host_bandwidth=host,
        launch_seconds=launch,
        matrix_share=1.0,
        stream_share=1.0,
    )


def _median(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of a call."""

    def once() -> float:
        began = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return statistics.median(once() for _ in range(ROUNDS))
