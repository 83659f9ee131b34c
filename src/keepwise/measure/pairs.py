"""Times of several steps side by side: A B A B ..., so that a slow minute of the machine falls on all of them."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from keepwise._errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Seconds:
    """Times of repeated runs."""

    samples: tuple[float, ...]
    """Seconds of each run, in order."""

    @property
    def median(self) -> float:
        """Median, in seconds."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """Distance between the quartiles, in seconds: half of all runs lie within it."""
        low, high = quartiles(self.samples)
        return high - low

    def __float__(self) -> float:
        return self.median

    def __str__(self) -> str:
        low, high = quartiles(self.samples)
        return f"{self.median:.4g} s (quartiles {low:.4g}...{high:.4g}, {len(self.samples)} runs)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Paired:
    """Times of several steps that were run in turn; ratios compare runs of the same round."""

    seconds: dict[str, tuple[float, ...]]
    """Seconds of each round by name."""
    ratios: dict[str, tuple[float, ...]]
    """The same divided by the seconds of the first name in that round."""

    def ratio(self, name: str) -> float:
        """Median of the ratios of `name`."""
        return statistics.median(self.ratios[name])

    def ratio_quartiles(self, name: str) -> tuple[float, float]:
        """Lower and upper quartile of the ratios of `name`."""
        return quartiles(self.ratios[name])


def paired(steps: Mapping[str, Callable[[], object]], pairs: int = 9, *, warmup: int = 1) -> Paired:
    """Run each step once a round, in the given order, for `pairs` rounds, after `warmup` rounds that do not count.

    Garbage is collected before each run and not during it.

    Args:
        steps: name -> one whole step; the first one is what the others are compared with.
        pairs: rounds that count.
        warmup: rounds that do not.

    Raises:
        UsageError: there is no step or no round.
    """
    if not steps or pairs < 1:
        raise UsageError(f"paired needs at least one step and one round, got {len(steps)} and {pairs}")
    for _ in range(warmup):
        for step in steps.values():
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(pairs):
        for name, step in steps.items():
            times[name].append(timed(step))
    first = times[next(iter(steps))]
    return Paired(
        seconds={name: tuple(values) for name, values in times.items()},
        ratios={name: tuple(t / f for t, f in zip(values, first, strict=True)) for name, values in times.items()},
    )


def timed(step: Callable[[], object]) -> float:
    """Seconds of one run, until all work on accelerators is done."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        _synchronise()
        begin = time.perf_counter()
        result = step()
        _synchronise()
        seconds = time.perf_counter() - begin
        del result
        return seconds
    finally:
        if enabled:
            gc.enable()


def _synchronise() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile; both the sample itself where there is one only."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high
