"""Admission of a whole plan: one real step under it, with every replay compared with its original."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepwise._errors import MismatchError
from keepwise.proof.state import SavedState
from keepwise.runtime.apply import attach, detach
from keepwise.runtime.digest import strong_digest
from keepwise.session.batch import Batch
from keepwise.session.plan import Plan
from keepwise.trace import Traced

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the step showed."""

    bad_storages: frozenset[int]
    """Storages whose replay differs from the original."""
    num_audited: int
    """Replayed tensors that were compared."""
    difference: str = ""
    """First difference of the planned step from the plain one, if plain repeats and every replay is right; else empty."""


def prove_plan(
    plan: Plan,
    model: nn.Module,
    run: Callable[[], Any],
    batch: Batch,
    traced: Traced,
    optimizer: torch.optim.Optimizer | None,
    *,
    uses_context: bool,
    repeats: bool | None,
) -> Outcome:
    """Run the planned step from the state that the trace started from.

    Args:
        plan: not yet applied.
        model: without a plan on it.
        run: one whole step.
        batch: its arguments.
        traced: the plain steps, from the same state.
        optimizer: whose step `run` makes, if any.
        repeats: whether the plain step repeats; None: find out if need be.
        uses_context: whether the plan covers the user's whole step (`with plan:`) rather than the model's forward.
    """
    generators = [g for g, _ in (*traced.first.generators, *traced.recording.generators)]
    state = SavedState(model, (batch.args, batch.kwargs), optimizer, generators)
    runner = plan.runner
    runner.audit_every, runner.num_steps, runner.collecting = 1, 0, True
    dropping = not runner.program.drops_nothing
    try:
        state.clear_gradients()
        if dropping:
            attach(model, runner)
        try:
            if uses_context and dropping:
                with plan:
                    result = run()
            else:
                result = run()
        except MismatchError:  # backward could not go on; the tensors concerned are known
            result = None
        finally:
            detach(model)
        bad = frozenset(plan.step.values[view].storage for stats in runner.seen for view in stats.mismatched)
        difference = "" if bad else _difference(model, traced, result)
        if difference and repeats is None:
            state.restore()
            state.clear_gradients()
            repeats = not _difference(model, traced, run())
        audited = sum(stats.num_audited for stats in runner.seen)
        return Outcome(bad_storages=bad, num_audited=audited, difference=difference if repeats else "")
    finally:
        runner.audit_every, runner.num_steps, runner.collecting = 0, 0, False
        runner.reset()
        state.restore()


def time_plain(
    model: nn.Module,
    run: Callable[[], Any],
    batch: Batch,
    traced: Traced,
    optimizer: torch.optim.Optimizer | None,
) -> tuple[float, str]:
    """One plain step from the state that the trace started from.

    Returns:
        Its seconds, and what differs from the traced step (empty: it repeats).
    """
    generators = [g for g, _ in (*traced.first.generators, *traced.recording.generators)]
    state = SavedState(model, (batch.args, batch.kwargs), optimizer, generators)
    try:
        state.clear_gradients()
        began = time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        return seconds, _difference(model, traced, result)
    finally:
        state.restore()


def _difference(model: nn.Module, traced: Traced, result: Any) -> str:
    expected = traced.first.result
    if isinstance(expected, Tensor) and isinstance(result, Tensor) and strong_digest(expected) != strong_digest(result):
        return "the losses"
    for name, p in model.named_parameters():
        g = traced.gradients.get(name)
        if (g is None) != (p.grad is None) or (p.grad is not None and g != strong_digest(p.grad)):
            return f"the gradients of {name}"
    return ""


def not_repeatable(traced: Traced, difference: str) -> str:
    """A note for the user."""
    return (
        f"the plain step is not repeatable from the same state ({difference} differ{_first_path(traced)}): comparing whole steps "
        "proves nothing; every replayed tensor was compared with its original instead"
    )


def _first_path(traced: Traced) -> str:
    """Where two recorded steps first disagree in their literals; empty if nowhere."""
    for a, b in zip(traced.first.step.ops, traced.recording.step.ops, strict=False):
        if a.signature != b.signature and a.target == b.target:
            return f"; the first op whose arguments change from step to step is {b.target} in {b.path or 'the model'} ({b.source})"
    return ""
