"""From a plan's numbers to a `Report`."""

from __future__ import annotations

from collections import Counter

from keepwise.report.curve import curve_of
from keepwise.report.folding import fold
from keepwise.report.inputs import PlanLike, TimelineLike
from keepwise.report.model import KINDS, Measured, Proof, Report
from keepwise.report.peaks import categories, largest_at_peak, largest_saved, moment_in_words


def build_report(
    plan: PlanLike,
    *,
    plain: TimelineLike,
    title: str = "",
    description: str = "",
    proof: Proof | None = None,
    measured: Measured | None = None,
) -> Report:
    """Everything that is said about a plan.

    Args:
        plan: its step, schedule and numbers.
        plain: the simulated plain step.
        title: name of the model or target.
        description: one line about it.
        proof: outcome of `keepwise.verify`, if it ran.
        measured: the two steps as they really ran, if they did.
    """
    step, planned = plan.step, plan.timeline
    tensors: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for d in plan.decisions:
        tensors[d.kind] += 1
        nbytes[d.kind] += d.nbytes
    return Report(
        title=title,
        description=description,
        headline=plan.summary(),
        status=plan.status.name,
        status_text=plan.status.value,
        planner=plan.schedule.planner,
        budget_bytes=plan.budget_bytes,
        plain_peak_bytes=plan.plain_peak_bytes,
        peak_bytes=plan.peak_bytes,
        floor_bytes=plan.floor_bytes,
        static_bytes=plan.static_bytes,
        step_seconds=plan.step_seconds,
        added_seconds=plan.added_seconds,
        time_text=plan.time_in_words(),
        replay_seconds=plan.replay_seconds,
        bound_seconds=plan.bound_seconds,
        gap=plan.gap,
        device=step.device,
        torch_version=step.torch_version,
        num_ops=len(step.ops),
        num_replays=sum(bool(w.ops) for w in plan.schedule.windows),
        num_saved=len(plan.decisions),
        num_tensors={k: tensors[k] for k in KINDS},
        nbytes={k: nbytes[k] for k in KINDS},
        plain_peak_at=moment_in_words(step, plain),
        plan_peak_at=moment_in_words(step, planned),
        curve=curve_of(step, plain, planned),
        categories=categories(plain, planned),
        groups=fold(step, plan.schedule, plan.decisions),
        largest=largest_saved(step, plan.decisions),
        at_peak=largest_at_peak(step, planned),
        notes=plan.notes,
        shapes=plan.shapes,
        proof=proof,
        measured=measured,
    )
