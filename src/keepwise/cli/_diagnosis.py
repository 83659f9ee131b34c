"""Findings from a plan's numbers: three questions, each with its evidence and what to try."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from keepwise._units import show_bytes
from keepwise.report.folding import VIEWS
from keepwise.report.model import Report
from keepwise.report.words import plain_reason, show_percent, show_seconds

if TYPE_CHECKING:
    from keepwise.runtime.stats import StepStats
    from keepwise.session.plan import Plan

MEMORY = "Does memory drop?"
TIME = "What does it cost in time?"
BITS = "Do gradients change?"

_FEW = 0.15
"""A drop below this share of the plain peak is called small."""
_SLOW = 0.15
"""Added time above this share of a step is called slow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One answer."""

    question: str
    what: str
    remedy: str = ""
    serious: bool = False
    """Whether the bits are not those of plain training."""


def diagnose(report: Report, plan: Plan, stats: StepStats) -> list[Finding]:
    """What can be said.

    Args:
        report: of the plan, with its proof.
        plan: the same plan.
        stats: of a step that ran under it.
    """
    return [*_memory(report, plan, stats), *_time(report), *_bits(report, plan)]


def _memory(report: Report, plan: Plan, stats: StepStats) -> list[Finding]:
    plain, peak = report.plain_peak_bytes, report.peak_bytes
    drop = plain - peak
    verb = "only " if plain and drop / plain < _FEW else ""
    found = [
        Finding(
            question=MEMORY,
            what=f"The peak goes from {show_bytes(plain)} to {show_bytes(peak)}, {verb}"
            f"{show_percent(drop, plain, sign=False)} less.",
        )
    ]
    if plain and report.static_bytes > peak / 2:
        rows = ", ".join(f"{c.name} {show_bytes(c.plan_bytes)}" for c in report.categories if c.reduced == "no")
        found.append(
            Finding(
                question=MEMORY,
                what=f"{show_bytes(report.static_bytes)} of it are there whatever is planned: {rows}.",
                remedy="LoRA or a quantised base, an 8-bit optimizer, --grads fresh, or sharding: checkpointing does not "
                "reduce these",
            )
        )
    pinned: Counter[str] = Counter()
    for d in plan.decisions:
        if d.is_forced:
            pinned[plain_reason(d.why)] += d.nbytes
    for why, nbytes in pinned.most_common(4):
        if nbytes > drop / 20:
            found.append(
                Finding(question=MEMORY, what=f"{show_bytes(nbytes)} must be kept: {why}.", remedy=_advice(why))
            )
    for category in report.categories:
        if category.reduced == "not directly" and category.plan_bytes > peak / 5:
            found.append(
                Finding(
                    question=MEMORY,
                    what=f"{show_bytes(category.plan_bytes)} at the peak are {category.name}, in {report.plan_peak_at}.",
                    remedy="a smaller batch, or the loss over chunks of the sequence where that is the largest tensor",
                )
            )
    if stats.num_deviations:
        found.append(
            Finding(
                question=MEMORY,
                what=f"{stats.num_deviations} tensors ({show_bytes(stats.deviation_bytes)}) were kept because the step "
                "differed from the recorded one.",
                remedy="fit again with the batch and the mode that you train with, or fit with several batches",
            )
        )
    return found


def _advice(why: str) -> str:
    if "outside of model.forward" in why:
        return "put the loss into the model, or run the step inside `with plan:`"
    if "stays alive anyway" in why:
        return "drop the reference after its last use (del, or no list of outputs)"
    if "differed from the original" in why:
        return "torch.use_deterministic_algorithms(True) may choose a kernel that repeats"
    return ""


def _time(report: Report) -> list[Finding]:
    seconds = max(report.step_seconds, 1e-12)
    slow = report.added_seconds / seconds > _SLOW
    bound = show_percent(report.bound_seconds, seconds)
    parts = f" ({report.time_text})" if report.time_text else ""
    found = [
        Finding(
            question=TIME,
            what=f"The plan adds {show_seconds(report.added_seconds)}, {show_percent(report.added_seconds, seconds)} of a step{parts}; "
            f"no plan that was searched adds less than {bound}.",
            remedy="a larger budget: `keepwise frontier` shows where the knee is" if slow else "",
        )
    ]
    ops: Counter[str] = Counter()
    for group in report.groups:
        for op, _, taken in group.replayed:
            if op != VIEWS:
                ops[op] += round(1e9 * taken)
    if report.replay_seconds > 0:
        listed = ", ".join(f"{op} {show_seconds(n / 1e9)}" for op, n in ops.most_common(4))
        modules = sorted(report.groups, key=lambda g: -g.replay_seconds)[:3]
        where = ", ".join(f"{g.name} {show_seconds(g.replay_seconds)}" for g in modules if g.replay_seconds)
        found.append(Finding(question=TIME, what=f"What replays longest: {listed}; in {where}."))
    return found


def _bits(report: Report, plan: Plan) -> list[Finding]:
    proof = report.proof
    assert proof is not None
    good = proof.identical is True and proof.recomputed_identical
    remedy = ""
    if not proof.repeatable:
        remedy = "seed everything, torch.use_deterministic_algorithms(True), one thread: then verify again"
    elif not good:
        remedy = "keepwise.fit again, pin the module with 'keep', and please report it"
    found = [
        Finding(question=BITS, what=proof.text[:1].upper() + proof.text[1:] + ".", remedy=remedy, serious=not good)
    ]
    refused: Counter[str] = Counter(
        f"{op.target} ({op.why_not})" for op in plan.step.ops if not op.replayable and op.why_not
    )
    if refused:
        listed = ", ".join(f"{what} x{n}" for what, n in refused.most_common(5))
        found.append(
            Finding(question=BITS, what=f"Never replayed, since a replay would not give the same bits: {listed}.")
        )
    return found
