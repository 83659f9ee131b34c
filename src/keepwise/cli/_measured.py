"""Peaks and times of steps that are run in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from keepwise.measure import Paired, PeakTracker, allocator_timeline, peak_of
from keepwise.measure.events import device_name
from keepwise.measure.pairs import timed
from keepwise.measure.static import holdings

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

Step = Callable[[], object]
Setting = Callable[[], AbstractContextManager[object]]
"""Makes a context inside which a step runs as one of the compared ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Memory of one steady step."""

    static_bytes: int
    """What is there when the step begins: parameters, gradients, buffers, optimizer state, inputs."""
    above_bytes: int
    """Highest level above that."""

    @property
    def total_bytes(self) -> int:
        """Peak of the whole step."""
        return self.static_bytes + self.above_bytes


def step_peak(step: Step, model: nn.Module, optimizer: Optimizer | None = None) -> Peak:
    """Run a step twice and take the peak of the second from the allocator."""
    held = holdings(step, model, optimizer)
    device = device_name(None, held.any_tensors())
    if device.startswith("cuda"):
        step()
        static = sum(size for _, size in held.storages(device).values())
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        with PeakTracker(device) as mark:
            step()
        return Peak(static_bytes=static, above_bytes=(mark.bytes or before) - before)
    sizes: list[int] = []
    events = allocator_timeline(
        step,
        lead=1,
        between=lambda: sizes.append(sum(size for _, size in held.storages(device).values())),
        device=device,
    )
    return Peak(static_bytes=sizes[0], above_bytes=peak_of(events))


def in_turn(
    steps: Mapping[str, tuple[Step, Setting]],
    rounds: int,
    *,
    warmup: int = 1,
    tell: Callable[[float], None] | None = None,
) -> Paired:
    """Time steps in turn, A B C A B C ...; a setting's own entry and exit are not timed.

    Args:
        steps: name -> (one whole step, the context to run it in); the others are compared with the first.
        rounds: rounds that count.
        warmup: rounds before them that do not.
        tell: told the share that is done.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    total = (rounds + warmup) * len(steps)
    for i in range(rounds + warmup):
        for j, (name, (step, setting)) in enumerate(steps.items()):
            if tell is not None:
                tell((i * len(steps) + j) / total)
            with setting():
                taken = timed(step)
            if i >= warmup:
                seconds[name].append(taken)
    first = seconds[next(iter(steps))]
    return Paired(
        seconds={name: tuple(values) for name, values in seconds.items()},
        ratios={name: tuple(t / f for t, f in zip(values, first, strict=True)) for name, values in seconds.items()},
    )


def plainly() -> AbstractContextManager[object]:
    """The setting that changes nothing."""
    return contextlib.nullcontext()
