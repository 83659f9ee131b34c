"""How much memory a kernel takes beyond its inputs and outputs, by the allocator's own events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]


def run_with_workspace(run: Callable[[], Any]) -> tuple[Any, int | None]:
    """Run something and return its result and its high water above what it leaves behind, in bytes.

    The classic profiler is used: it costs 0.1 ms a start, where the one for people costs 0.4 ms and writes to the terminal.
    Where a profiler is running already nothing is measured.
    """
    if not hasattr(_autograd, "_enable_profiler_legacy") or _autograd._profiler_enabled():
        return run(), None
    config = ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, _ExperimentalConfig())
    _autograd._enable_profiler_legacy(config)
    try:
        result = run()
    finally:
        threads = _autograd._disable_profiler_legacy()
    level = high = 0
    for events in threads:
        for event in events:
            if event.kind() == "memory_alloc":
                level += event.cpu_memory_usage() + event.cuda_memory_usage()
                high = max(high, level)
    return result, max(high - max(level, 0), 0)
