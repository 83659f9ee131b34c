"""`keepwise.measure`: peak, resident memory and time of a training step as it really runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from keepwise._errors import UsageError
from keepwise.measure.categories import TEMPORARY, peak_by_category
from keepwise.measure.events import AllocatorEvent, allocator_timeline, device_name, peak_of
from keepwise.measure.pairs import Seconds, timed
from keepwise.measure.resident import ResidentRise
from keepwise.measure.static import Holdings, holdings
from keepwise.measure.tracker import PeakTracker


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a training step takes on its device."""

    device: str
    """`"cpu"` or `"cuda:0"`."""
    peak_bytes: int
    """Peak of the whole step in bytes allocated for tensors: the static ones that it begins with, and what it adds."""
    static_bytes: int
    """Parameters, gradients, buffers, optimizer state and inputs that are there when the step begins, in bytes."""
    reserved_bytes: int | None
    """CUDA: peak that the caching allocator took from the device, in bytes; None elsewhere."""
    resident_bytes: int | None
    """CPU: highest resident set of the process during a step above the one before it (see `resident.py`, note 3), in bytes;
    None elsewhere."""
    by_category: dict[str, int]
    """Bytes at the peak: parameter, gradient, optimizer state, buffer, input, activation, temporary. Their sum is the peak."""
    step_seconds: Seconds
    """Seconds of a step: `.median`, `.spread`, `.samples`."""
    tokens_per_second: float | None
    """`tokens` by the median; None where `tokens` was not given."""


def measure(
    step: Callable[[], object],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    warmup: int = 2,
    steps: int = 5,
    tokens: int | None = None,
) -> Measurement:
    """Run `step` and measure it: `warmup` runs that do not count, `steps` for the time, three more for the memory.

    The step is run for real: what it trains is trained.

    The peak is that of allocator events, kernels' own buffers included. On the CPU they tell only what changes during a step;
    the static tensors are added from `model` and `optimizer` and from what the step's function holds (closure, bound
    arguments, globals that it names). On CUDA the peak is the allocator's own mark.

    Args:
        step: one whole training step without arguments, on the CPU or one CUDA device.
        model: whose parameters, gradients and buffers count, where the step's function does not show it.
        optimizer: whose state counts, likewise.
        warmup: runs that do not count.
        steps: timed runs.
        tokens: tokens in a step, for `tokens_per_second`.

    Raises:
        UsageError: there is nothing to time.
    """
    if steps < 1:
        raise UsageError(f"measure needs at least one timed step, got steps={steps}")
    for _ in range(warmup):
        step()
    held = holdings(step, model, optimizer)
    device = device_name(None, held.any_tensors())
    seconds = Seconds(samples=tuple(timed(step) for _ in range(steps)))
    on_cuda = device.startswith("cuda")
    resident = peak = reserved = None
    if on_cuda:
        with PeakTracker(device) as mark:
            step()
        peak, reserved = mark.bytes, mark.reserved_bytes
    else:
        with ResidentRise() as rise:
            step()
        resident = rise.bytes
    events, before, after = _profiled(step, held, device)
    categories = peak_by_category(events, before, after)
    static = sum(size for _, size in before.values())
    if peak is None:
        peak = static + peak_of(events)
    elif peak > sum(categories.values()):
        # Blocks are rounded up, and other tensors of the process may be on the device.
        categories[TEMPORARY] = categories.get(TEMPORARY, 0) + peak - sum(categories.values())
    return Measurement(
        device=device,
        peak_bytes=peak,
        static_bytes=static,
        reserved_bytes=reserved,
        resident_bytes=resident,
        by_category=categories,
        step_seconds=seconds,
        tokens_per_second=None if tokens is None else tokens / seconds.median,
    )


def _profiled(
    step: Callable[[], object], held: Holdings, device: str
) -> tuple[list[AllocatorEvent], dict[int, tuple[str, int]], dict[int, tuple[str, int]]]:
    """Allocator events of a step, and the static storages before and after it."""
    before: dict[int, tuple[str, int]] = {}
    events = allocator_timeline(step, lead=1, between=lambda: before.update(held.storages(device)), device=device)
    return events, before, held.storages(device)
