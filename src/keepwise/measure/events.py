"""Allocator events of one call: what was allocated and freed, when, by which op.

They come from torch's profiler (`profile_memory`) and are read from its event tree in memory: no trace file is written. The
allocator sees what no dispatcher sees: buffers that a kernel needs inside itself.

Notes:
1. The CPU allocator knows the size of a block that is freed only if the block was allocated under a profiler. A call that
   frees what an earlier call left (gradients, optimizer state) is therefore run once before, under the same profiler
   (`lead`), and only blocks whose allocation was seen are followed.
2. Kineto prints a line at its first start, unless its log level, an environment variable that it reads then, forbids it.
3. Only one profiler can run in a thread at a time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.autograd import profiler

from keepwise._errors import KeepwiseError

_MARK = "keepwise::measured"
_NODE = "autograd::engine::evaluate_function: "
_LEVEL = "KINETO_LOG_LEVEL"


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocatorEvent:
    """One allocation or deallocation."""

    delta_bytes: int
    """Bytes allocated (positive) or freed (negative)."""
    address: int
    """Address of the block; another block may have had it before."""
    time_ns: int
    """Time since the call began, in nanoseconds."""
    device: str
    """`"cpu"` or `"cuda:0"`."""
    op: str
    """Innermost op that was running, e.g. `"aten::addmm"`; empty between ops."""
    node: str
    """Backward node that was running, e.g. `"AddmmBackward0"`; empty outside backward."""


def allocator_timeline(
    call: Callable[[], object],
    *,
    lead: int = 0,
    between: Callable[[], object] | None = None,
    device: str | None = "cpu",
) -> list[AllocatorEvent]:
    """Allocator events of one `call()`, in order of time.

    The result of the call is alive until the end. Frees of blocks that were allocated before the first lead are not in the
    list (note 1).

    Args:
        call: what to run; it runs `lead + 1` times.
        lead: calls under the same profiler before the one that counts, for calls that free what the last one left.
        between: runs right before the call that counts, after the leads.
        device: keep events of this device only (`"cpu"`, `"cuda:0"`); None keeps all.

    Raises:
        KeepwiseError: a profiler is running in this thread already (note 3).
    """
    if _profiler_enabled():
        raise KeepwiseError(
            "memory cannot be measured while another torch profiler is running: stop it around this call"
        )
    held: list[object] = []
    profile = profiler.profile(use_cpu=True, use_kineto=True, profile_memory=True)
    with _quiet_kineto(), profile:
        for _ in range(lead):
            call()
        if between is not None:
            between()
        with profiler.record_function(_MARK):
            held.append(call())
    result: Any = profile.kineto_results
    return _follow(_events(result.experimental_event_tree()), device)


def allocator_peak(call: Callable[[], object], *, lead: int = 0, device: str = "cpu") -> int:
    """Highest level of allocated bytes during `call()` above the level at its start; see `allocator_timeline`."""
    return peak_of(allocator_timeline(call, lead=lead, device=device))


def peak_of(events: list[AllocatorEvent]) -> int:
    """Highest level above the start (at least 0), in bytes."""
    level = peak = 0
    for event in events:
        level += event.delta_bytes
        peak = max(peak, level)
    return peak


def op_workspace(call: Callable[[], object], *, device: str = "cpu") -> int:
    """Bytes that an op needs inside itself: its highest level above the start, less what is still allocated at its end.

    Args:
        call: runs the op once and returns its result, which stays allocated until the level at the end is taken.
        device: `"cpu"` or `"cuda:0"`.
    """
    events = allocator_timeline(call, device=device)
    return peak_of(events) - max(0, sum(event.delta_bytes for event in events))


@contextlib.contextmanager
def _quiet_kineto() -> Iterator[None]:
    before = os.environ.get(_LEVEL)
    os.environ.setdefault(_LEVEL, "99")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_LEVEL, None)


@dataclass(slots=True)
class _Raw:
    """An event before it is known which blocks were allocated under the profiler."""

    time_ns: int
    delta_bytes: int
    address: int
    device: str
    op: str
    node: str


def _events(roots: list[Any]) -> tuple[list[_Raw], int, int]:
    """All allocator events of a profiler's tree in order of time, and when the marked call began and ended (ns)."""
    found: list[_Raw] = []
    begin = end = 0
    # The tree is as deep as calls nest, which for user code can be deeper than Python's own stack allows.
    stack: list[tuple[Any, str, str]] = [(root, "", "") for root in reversed(roots)]
    while stack:
        event, op, node = stack.pop()
        name: str = event.name
        if name == "[memory]":
            fields = event.extra_fields
            found.append(_Raw(event.start_time_ns, fields.alloc_size, fields.ptr or 0, str(fields.device), op, node))
            continue
        if name == _MARK:
            begin, end = event.start_time_ns, event.end_time_ns
        elif name.startswith(_NODE):
            node = name.removeprefix(_NODE).removeprefix("torch::autograd::")
        elif "::" in name:
            op = name
        stack += [(child, op, node) for child in reversed(event.children)]
    found.sort(key=lambda raw: raw.time_ns)
    return found, begin, end


def _follow(events: tuple[list[_Raw], int, int], device: str | None) -> list[AllocatorEvent]:
    """Events of the marked call, without frees of blocks whose allocation was not seen (note 1)."""
    raws, begin, end = events
    sizes: dict[tuple[str, int], int] = {}
    kept: list[AllocatorEvent] = []
    for raw in raws:
        key = raw.device, raw.address
        if raw.delta_bytes > 0:
            sizes[key] = delta = raw.delta_bytes
        else:
            delta = -sizes.pop(key, 0)
        if not delta or not begin <= raw.time_ns <= end or (device is not None and raw.device != device):
            continue
        kept.append(
            AllocatorEvent(
                delta_bytes=delta,
                address=raw.address,
                time_ns=raw.time_ns - begin,
                device=raw.device,
                op=raw.op,
                node=raw.node,
            )
        )
    return kept


def device_name(device: torch.device | str | None, tensors: list[Tensor]) -> str:
    """`"cpu"` or `"cuda:0"`: the given device, else that of the first tensor, else the CPU; as events write it."""
    if device is None:
        device = tensors[0].device if tensors else "cpu"
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return str(device)
