"""Admission of a whole plan: one real step under it, with every replay compared with its original."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepwise._errors import MismatchError
from keepwise.proof.proof import Observation, observe
from keepwise.runtime.apply import attach, detach
from keepwise.session.batch import Batch
from keepwise.session.device import free_bytes
from keepwise.session.plan import Plan
from keepwise.simulate import Timeline
from keepwise.trace import Traced
from keepwise.trace.saved_state import SavedState


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the planned step showed."""

    bad_storages: frozenset[int]
    """Storages whose replay differs from the original."""
    audited: frozenset[int]
    """Views whose replay equals the original."""
    num_audited: int
    """Replayed tensors that were compared."""
    num_deviations: int
    """Saved tensors that the plan drops and that were kept because the step is not the recorded one."""
    deviation_bytes: int
    """Their bytes."""
    replays: tuple[tuple[int, float], ...]
    """Window and seconds of each replay; comparing not included."""
    packing_seconds: float
    """Time that forward took to pack what replays expand."""
    observed: Observation | None
    """What the step left behind; None where its backward could not go on."""


def observe_step(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Callable[..., Observation]:
    """For `trace_steps`: what its first step left behind, gradients left out (the trace digests them itself)."""

    def look(result: Any, generators: list[torch.Generator]) -> Observation:
        return observe(model, result, generators, gradients={}, parameters=optimizer is not None)

    return look


def traced_observation(traced: Traced) -> Observation:
    """What the first traced step left behind."""
    items: dict[str, int] = dict(traced.observed.items)
    for name, value in traced.gradients.items():
        items[f"gradients/{name}"] = value or 0
    return Observation(items)


def generators_of(traced: Traced) -> list[torch.Generator]:
    """The user's own generators that the first step drew from."""
    return [g for g, _ in traced.first.generators]


def prove_plan(
    plan: Plan,
    model: nn.Module,
    run: Callable[[], Any],
    batch: Batch,
    generators: list[torch.Generator],
    optimizer: torch.optim.Optimizer | None,
    *,
    uses_context: bool,
) -> Outcome:
    """Run the planned step, from the present state, with every replay compared.

    Args:
        plan: not yet applied.
        model: without a plan on it.
        run: one whole step.
        batch: its arguments.
        generators: others than the global ones that it draws from.
        optimizer: whose step `run` makes, if any.
        uses_context: whether the plan covers the user's whole step (`with plan:`) rather than the model's forward.
    """
    state = SavedState(model, (batch.args, batch.kwargs), optimizer, generators, run=run)
    runner = plan.runner
    runner.audit_every, runner.num_steps, runner.collecting = 1, 0, True
    dropping = not runner.program.drops_nothing
    observed: Observation | None = None
    try:
        state.clear_gradients()
        torch.clear_autocast_cache()
        if dropping:
            attach(model, runner)
        try:
            if uses_context and dropping:
                with plan:
                    result = run()
            else:
                result = run()
            observed = observe(model, result, generators, parameters=optimizer is not None)
        except MismatchError:  # backward could not go on; the tensors concerned are known
            pass
        except Exception:
            if not any(stats.mismatched for stats in runner.seen):
                raise
            # else what was replayed wrongly may have had another shape
        finally:
            detach(model)
        return Outcome(
            bad_storages=frozenset(
                plan.step.values[view].storage for stats in runner.seen for view in stats.mismatched
            ),
            audited=frozenset().union(*(stats.audited for stats in runner.seen)),
            num_audited=sum(stats.num_audited for stats in runner.seen),
            num_deviations=sum(stats.num_deviations for stats in runner.seen),
            deviation_bytes=sum(stats.deviation_bytes for stats in runner.seen),
            replays=tuple(replay for stats in runner.seen for replay in stats.replays),
            packing_seconds=sum(stats.packing_seconds for stats in runner.seen),
            observed=observed,
        )
    finally:
        runner.audit_every, runner.num_steps, runner.collecting = 0, 0, False
        runner.reset()
        state.restore()


def plain_fits(plain: Timeline, device: torch.device) -> bool:
    """Whether there is room for a plain step now, with a margin for what is not predicted."""
    return plain.peak_bytes - plain.static_bytes < 0.8 * free_bytes(device)


def run_plain(
    model: nn.Module,
    run: Callable[[], Any],
    batch: Batch,
    generators: list[torch.Generator],
    optimizer: torch.optim.Optimizer | None,
) -> tuple[float, Observation]:
    """One plain step from the present state, which is put back.

    Returns:
        Its seconds, and what it left behind.
    """
    state = SavedState(model, (batch.args, batch.kwargs), optimizer, generators, run=run)
    try:
        state.clear_gradients()
        torch.clear_autocast_cache()  # what it holds of an earlier step would not be cast in this one
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        return seconds, observe(model, result, generators, parameters=optimizer is not None)
    finally:
        state.restore()


def not_repeatable(traced: Traced, difference: str) -> str:
    """A note for the user."""
    return (
        f"the plain step is not repeatable from the same state ({difference}{_first_path(traced)}): comparing whole steps "
        "proves nothing; every replayed tensor was compared with its original instead"
    )


def _first_path(traced: Traced) -> str:
    """Where two recorded steps first disagree in their literals; empty if nowhere."""
    for a, b in zip(traced.first.step.ops, traced.recording.step.ops, strict=False):
        if a.signature != b.signature and a.target == b.target:
            return f"; the first op whose arguments change from step to step is {b.target} in {b.path or 'the model'} ({b.source})"
    return ""
