"""`keepwise.verify`: the proof for a user's own model, batch and number of steps."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from keepwise._errors import UsageError
from keepwise.proof.proof import Proof, prove
from keepwise.runtime.apply import attach, detach, runner_of
from keepwise.session.batch import Batch, Loss, as_batch, loss_of, make_optimizer
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
    trial = _Trial(
        model=model, plan=plan, batch=as_batch(args, kwargs), batches=batches, loss=loss, step=step, optimizer=optimizer
    )
    return trial.prove(steps, progress)


@dataclass(kw_only=True)
class _Trial:
    """Plain and planned steps of one model, all from the state that it has now. Names are those of `verify`."""

    model: nn.Module
    plan: Plan
    batch: Batch
    batches: Callable[[int], Any] | None
    loss: Loss | None
    step: Callable[[], Any] | None
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None
    count: int = 0
    """Steps run since the state was put back."""

    def prove(self, steps: int, progress: Callable[[str], None] | None) -> Proof:
        """The proof; the model is under the plan that it was under before, if any."""
        self.stepping = make_optimizer(self.optimizer, self.model)
        self.steppers = Steppers(self.model, self.stepping, self.step)
        runner, previous = self.plan.runner, runner_of(self.model)
        audit_every, num_steps = runner.audit_every, runner.num_steps
        runner.audit_every, runner.num_steps = 1, 0
        detach(self.model)
        try:
            self.state = SavedState(
                self.model, (self.batch.args, self.batch.kwargs), self.stepping, run=(self.step, self.loss)
            )
            with self.steppers if self.step is not None else contextlib.nullcontext():
                return prove(
                    run=self.run,
                    model=self.model,
                    planned=self.planned,
                    restore=self.restore,
                    num_steps=steps,
                    num_audited=lambda: runner.stats.num_audited,
                    progress=progress,
                )
        finally:
            runner.audit_every, runner.num_steps = audit_every, num_steps
            detach(self.model)
            if previous is not None:
                attach(self.model, previous)

    def run(self) -> Any:
        """The next step; loss and outputs, or what the user's own step returns."""
        if self.step is not None:
            return self.step()
        now = as_batch(self.batches(self.count), None) if self.batches is not None else self.batch
        self.count += 1
        output = self.model(*now.args, **now.kwargs)
        value = loss_of(output, self.loss)
        value.backward()
        if self.stepping is not None:
            self.stepping.step()
        return value.detach(), tree_map(lambda x: x.detach() if isinstance(x, torch.Tensor) else x, output)

    def planned(self) -> Any:
        """The next step under the plan."""
        attach(self.model, self.plan.runner)
        try:
            with self.plan if self.step is not None else contextlib.nullcontext():
                return self.run()
        finally:
            detach(self.model)

    def restore(self) -> None:
        """Back to the first step."""
        self.count = 0
        self.steppers.restore()
        self.state.restore()
