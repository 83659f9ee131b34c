"""`keepwise.frontier`: how much time each budget costs, and where the knee is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from torch import nn

from keepwise._errors import UsageError
from keepwise.ir.packing import with_packing
from keepwise.plan.optimal import OptimalResult
from keepwise.plan.optimal import frontier as solve_frontier
from keepwise.session.admit import generators_of, plain_fits, run_plain
from keepwise.session.batch import Loss, as_batch, check_devices, check_in_flight, make_optimizer, whole_step
from keepwise.session.overheads import MemorySeconds, memory_price_of, overheads_of
from keepwise.session.step_facts import only_inside_forward
from keepwise.session.steppers import Steppers
from keepwise.simulate import simulate
from keepwise.trace import trace_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The best plan for one budget: what `fit` predicts for it before a step of it was run."""

    budget_bytes: int
    peak_bytes: int
    """Predicted peak of the step."""
    replay_seconds: float
    """Predicted seconds of all replays; never less for a smaller budget."""
    added_seconds: float
    """Predicted seconds that the plan adds to a step, as `Plan.added_seconds`."""
    bound_seconds: float
    """As `Plan.bound_seconds`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """Points from the smallest budget to the plain peak."""

    points: tuple[Point, ...]
    plain_peak_bytes: int
    step_seconds: float

    @property
    def knee(self) -> Point:
        """The point farthest below the straight line from the smallest budget to the plain step, both axes scaled to 0..1.

        Budgets below it pay much for little; above it there is little left to gain.
        """
        first, last = self.points[0], self.points[-1]
        width = max(last.peak_bytes - first.peak_bytes, 1)
        height = max(first.added_seconds - last.added_seconds, 1e-12)

        def below(p: Point) -> float:
            x = (p.peak_bytes - first.peak_bytes) / width
            y = (p.added_seconds - last.added_seconds) / height
            return (1 - x) - y

        return max(self.points, key=below)


def frontier(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    points: int = 20,
    loss: Loss | None = None,
    step: Callable[[], Any] | None = None,
    optimizer: Any = None,
    grads: str = "held",
    in_flight: int = 1,
    progress: Callable[[str], None] | None = None,
) -> Frontier:
    """Plan for `points` budgets between the smallest reachable peak and the plain one; the model is left as it is.

    Args:
        model: as in `fit`.
        args: as in `fit`.
        kwargs: as in `fit`.
        points: number of budgets, at least 2.
        loss: as in `fit`.
        step: as in `fit`.
        optimizer: as in `fit`.
        grads: as in `fit`.
        in_flight: as in `fit`.
        progress: told what happens.

    Raises:
        UsageError: a bad argument.
    """
    if points < 2:
        raise UsageError(f"points must be at least 2, got {points}")
    if grads not in ("held", "fresh"):
        raise UsageError(f"grads must be 'held' or 'fresh', got {grads!r}")
    check_in_flight(in_flight)
    batch = as_batch(args, kwargs)
    device = check_devices(model, batch if step is None else None)
    optimizer = make_optimizer(optimizer, model)
    run = step if step is not None else whole_step(model, batch, loss, optimizer)
    if progress:
        progress("recording two steps")
    with Steppers(model, optimizer, step):
        traced = trace_steps(
            run, model=model, inputs=(batch.args, batch.kwargs), optimizer=optimizer, grads=grads, device=device
        )
        recorded = traced.recording.step
        if step is None:
            recorded = only_inside_forward(recorded, traced.recording.inside)
        plain = simulate(recorded)
        if plain_fits(plain, device):
            if progress:
                progress("timing a plain step")
            seconds, _ = run_plain(model, run, batch, generators_of(traced), optimizer)
            recorded = msgspec.structs.replace(recorded, seconds=seconds)
    recorded = msgspec.structs.replace(recorded, in_flight=in_flight)
    if progress:
        progress(f"solving for {points} budgets")
    packed = with_packing(recorded)
    found = solve_frontier(recorded, points, also=() if packed is recorded else (packed,))
    memory = memory_price_of(recorded)
    return Frontier(
        points=tuple(_point(r, memory) for r in found),
        plain_peak_bytes=simulate(recorded).peak_bytes,
        step_seconds=recorded.seconds,
    )


def _point(found: OptimalResult, memory: MemorySeconds) -> Point:
    overheads = overheads_of(simulate(found.step, found.schedule), memory)
    return Point(
        budget_bytes=found.budget_bytes,
        peak_bytes=found.peak_bytes,
        replay_seconds=found.added_seconds,
        added_seconds=overheads.added(found.added_seconds),
        bound_seconds=overheads.added(min(found.bound_seconds, found.added_seconds)),
    )
