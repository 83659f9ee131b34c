"""Options of `fit` that several commands share, plan files, and a plan's report."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from keepwise._errors import UsageError
from keepwise.cli._progress import Progress
from keepwise.cli._target import as_one, whole_step
from keepwise.targets import Target

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from keepwise.proof.proof import Proof as ProofOf
    from keepwise.report.model import Measured, Proof, Report
    from keepwise.session.plan import Plan

BUDGET_HELP = (
    "Peak of the whole step: 20GiB, 512MiB, 1.5e9, 80% (of the device), 0.6x (of the plain step), auto, min, max."
)


def budget_option(default: str) -> Callable[[Any], Any]:
    """`--budget`."""
    return click.option("--budget", default=default, show_default=True, metavar="SIZE", help=BUDGET_HELP)


PLANNER = click.option(
    "--planner",
    default="auto",
    show_default=True,
    metavar="NAME",
    help="auto, none, full, every:K, sqrt, recursive, selective, boundaries:PATH,PATH,..., recompute_everything.",
)


def load_plan(path: str) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: it cannot be read.
        PlanMismatch: it is no plan, or one of another version.
    """
    from keepwise.session.plan import Plan

    try:
        return Plan.load(path)
    except OSError as error:
        raise UsageError(f"the plan {path} cannot be read: {error.strerror or error}") from None


def fit_target(
    target: Target,
    budget: str,
    say: Progress,
    *,
    optimizer: Optimizer | None = None,
    grads: str = "held",
    planner: str = "auto",
    **options: Any,
) -> Plan:
    """`keepwise.fit` on a target; the plan is applied to its model."""
    import keepwise

    return keepwise.fit(
        target.model,
        target.args,
        target.kwargs,
        loss=target.loss,
        budget=budget,
        optimizer=optimizer,
        grads=grads,
        planner=planner,
        tokens=target.tokens,
        progress=say,
        **options,
    )


def prove_target(
    target: Target, plan: Plan, say: Progress, *, optimizer: Optimizer | None = None, steps: int = 1
) -> tuple[ProofOf, list[float]]:
    """`keepwise.verify` on a target, each step on its own batch; also the losses of the plain steps."""
    import keepwise
    from keepwise.session.batch import loss_of

    losses: list[float] = []

    def batch(index: int) -> Any:
        # Every step of the three series asks for its batch: this is where progress can be told.
        say(
            f"step {index + 1} of {steps}, {('plain', 'plain again', 'planned')[min(len(losses) // steps, 2)]}",
            len(losses) / (3 * steps),
        )
        return as_one(target, target.batch(index))

    def loss(output: Any) -> Any:
        value = loss_of(output, target.loss)
        losses.append(float(value.detach()))
        return value

    first = as_one(target, (target.args, target.kwargs))
    proof = keepwise.verify(
        target.model, first, plan=plan, loss=loss, optimizer=optimizer, steps=steps, batches=batch, progress=say
    )
    return proof, losses[:steps]


def measure_target(
    target: Target, plan: Plan, say: Progress, *, optimizer: Optimizer | None, grads: str, pairs: int
) -> Measured:
    """The plain and the planned step, measured in turn."""
    from keepwise.cli._measured import in_turn, plainly, step_peak
    from keepwise.report.model import Measured

    step = whole_step(target, optimizer, grads=grads)
    say("measuring the plain step's peak")
    with plan.paused():
        plain = step_peak(step, target.model, optimizer)
    say("measuring the planned step's peak")
    planned = step_peak(step, target.model, optimizer)
    times = in_turn(
        {"plain": (step, plan.paused), "planned": (step, plainly)},
        pairs,
        warmup=0 if plan.step_seconds > 0.5 else 1,
        tell=lambda done: say(f"timing {pairs} pairs of steps", done),
    )
    low, high = times.ratio_quartiles("planned")
    return Measured(
        pairs=pairs,
        plain_peak_bytes=plain.total_bytes,
        plan_peak_bytes=planned.total_bytes,
        plain_seconds=_median(times.seconds["plain"]),
        plan_seconds=_median(times.seconds["planned"]),
        ratio=times.ratio("planned"),
        ratio_low=low,
        ratio_high=high,
    )


def _median(samples: tuple[float, ...]) -> float:
    import statistics

    return statistics.median(samples)


def report_target(target: Target, plan: Plan, proof: ProofOf | None, measured: Measured | None) -> Report:
    """The plan's report with what was proved and measured."""
    from keepwise.report import build_report
    from keepwise.simulate import simulate

    return build_report(
        plan,
        plain=simulate(plan.step),
        title=target.name,
        description=target.description,
        proof=None if proof is None else proof_for_report(proof),
        measured=measured,
    )


def proof_for_report(proof: ProofOf) -> Proof:
    """A proof as the report holds it."""
    from keepwise.report.model import Proof

    return Proof(
        text=str(proof),
        identical=proof.identical,
        recomputed_identical=proof.recomputed_identical,
        repeatable=proof.repeatable,
        compared=proof.compared,
        num_steps=proof.num_steps,
        num_compared=proof.num_compared,
        num_replays_compared=proof.num_replays_compared,
        digests=proof.digests,
    )
