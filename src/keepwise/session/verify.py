"""`keepwise.verify`: the proof for a user's own model, batch and number of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from keepwise._errors import UsageError
from keepwise.proof.proof import Proof, prove
from keepwise.runtime.apply import attach, detach, runner_of
from keepwise.session.batch import Loss, as_batch, loss_of, make_optimizer
from keepwise.session.fingerprint import check_fingerprint
from keepwise.session.plan import Plan
from keepwise.session.steppers import Steppers
from keepwise.trace.saved_state import SavedState


def verify(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: Plan,
    loss: Loss | None = None,
    step: Callable[[], Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    steps: int = 1,
    batches: Callable[[int], Any] | None = None,
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Prove that a plan changes nothing: the plain step twice, the planned one once, from one state, compared bit for bit.

    Args:
        model: of the architecture that the plan was made for; the plan need not be applied to it.
        args: as in `fit`.
        kwargs: as in `fit`.
        plan: what to prove.
        loss: as in `fit`.
        step: as in `fit`: the whole step, run inside `with plan:`.
        optimizer: as in `fit`: its `step()` ends each step; parameters after it are compared.
        steps: how many steps to run from the same state.
        batches: step number -> args, for another batch in each step (`kwargs` is not added to it).
        progress: told what happens.

    Returns:
        The proof. Model, optimizer and generators are as before.

    Raises:
        UsageError: a bad argument.
        PlanMismatch: the plan is for another model.
        Exception: whatever the model raises in a plain step.
    """
    if steps < 1:
        raise UsageError(f"steps must be at least 1, got {steps}")
    if step is not None and (args is not None or kwargs):
        raise UsageError("pass either args or step=, not both")
    if not isinstance(plan, Plan):
        raise UsageError(f"plan= must be a keepwise.Plan, got {type(plan).__name__}")
    check_fingerprint(plan.document.fingerprint, model)
    batch = as_batch(args, kwargs)
    stepping = make_optimizer(optimizer, model)
    count = 0

    def run() -> Any:
        nonlocal count
        if step is not None:
            return step()
        now = as_batch(batches(count), None) if batches is not None else batch
        count += 1
        output = model(*now.args, **now.kwargs)
        value = loss_of(output, loss)
        value.backward()
        if stepping is not None:
            stepping.step()
        return value.detach(), _detached(output)

    runner = plan.runner
    steppers = Steppers(model, stepping)
    previous = runner_of(model)

    def planned() -> Any:
        attach(model, runner)
        try:
            if step is None:
                return run()
            with plan:
                return run()
        finally:
            detach(model)

    def restore() -> None:
        nonlocal count
        count = 0
        steppers.restore()
        state.restore()

    audit_every, num_steps = runner.audit_every, runner.num_steps
    runner.audit_every, runner.num_steps = 1, 0
    detach(model)
    try:
        state = SavedState(model, (batch.args, batch.kwargs), stepping)
        with steppers if step is not None else contextlib.nullcontext():
            return prove(
                run=run,
                model=model,
                planned=planned,
                restore=restore,
                num_steps=steps,
                num_audited=lambda: runner.stats.num_audited,
                progress=progress,
            )
    finally:
        runner.audit_every, runner.num_steps = audit_every, num_steps
        detach(model)
        if previous is not None:
            attach(model, previous)


def _detached(output: Any) -> Any:
    from torch.utils import _pytree

    return _pytree.tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)
