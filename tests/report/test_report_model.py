"""The report's numbers are the plan's, counted another way."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest

from keepwise.ir import Step
from keepwise.report import Report, build_report
from keepwise.report.curve import curve_of
from keepwise.report.folding import Places, pattern_of
from keepwise.report.words import plain_reason, ranges, show_seconds
from tests.report.plans import made
from tests.steps import accumulated, chain, gpt_like, in_place_stream, read_twice, unet_like

STEPS = {
    "gpt": gpt_like(4),
    "gpt with optimizer": gpt_like(3, dropout=True, grads="fresh", optimizer=True),
    "unet": unet_like(2),
    "in place": in_place_stream(4),
    "accumulated": accumulated(3, 3),
    "read twice": read_twice(3),
    "chain": chain(6),
}
PLANNERS = ["none", "full", "every:2", "recursive", "recompute_everything"]


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("name", STEPS)
def test_rows_sum_to_the_plan(name: str, planner: str) -> None:
    plan = made(STEPS[name], planner)
    report = build_report(plan, plain=plan.plain)
    assert sum(sum(g.num_tensors.values()) for g in report.groups) == len(plan.decisions)
    for kind in ("keep", "recompute"):
        assert sum(g.nbytes[kind] for g in report.groups) == sum(d.nbytes for d in plan.decisions if d.kind == kind)
    assert sum(g.replay_seconds for g in report.groups) == pytest.approx(plan.replay_seconds)
    replayed = sum(times for g in report.groups for _, times, _ in g.replayed)
    assert replayed == sum(len(w.ops) for w in plan.schedule.windows)
    assert sum(c.plain_bytes for c in report.categories) == plan.plain_peak_bytes
    assert sum(c.plan_bytes for c in report.categories) == plan.peak_bytes
    assert max(report.curve.plain) == plan.plain_peak_bytes
    assert max(report.curve.plan) == plan.peak_bytes


@pytest.mark.parametrize("name", STEPS)
def test_the_curves_end_when_the_steps_do(name: str) -> None:
    plan = made(STEPS[name], "full")
    curve = curve_of(plan.step, plan.plain, plan.timeline, num_bins=1000)
    seconds = sum(op.seconds for op in plan.step.ops)
    assert len(curve.plain) * curve.bin_seconds == pytest.approx(seconds, rel=0.01)
    assert len(curve.plan) * curve.bin_seconds == pytest.approx(seconds + plan.added_seconds, rel=0.01)
    assert [a for _, a, _ in curve.phases] == sorted(a for _, a, _ in curve.phases)
    assert all(before[2] == after[1] for before, after in pairwise(curve.phases))


def test_identical_blocks_are_one_row() -> None:
    plan = made(gpt_like(6), "full")
    groups = {g.name: g for g in build_report(plan, plain=plan.plain).groups}
    assert sum(g.count for name, g in groups.items() if name.startswith("h.")) == 6
    folded = max(groups.values(), key=lambda g: g.count)
    assert folded.count >= 5
    assert sum(folded.num_tensors.values()) == folded.count * len(folded.items)
    assert sum(folded.nbytes.values()) == folded.count * sum(i.nbytes for i in folded.items)


def test_blocks_with_other_decisions_are_another_row() -> None:
    plan = made(gpt_like(6), "boundaries:h.2,h.3")
    names = [g.name for g in build_report(plan, plain=plan.plain).groups if g.name.startswith("h.")]
    assert len(names) > 1


def test_places() -> None:
    place = Places(["transformer.h.0.mlp", "transformer.ln_f", "transformer", "head.out.norm", ""])
    assert place("transformer.h.3.mlp.c_fc").block == ("transformer.h", 3)
    assert place("transformer.h.3.mlp.c_fc").rest == "mlp.c_fc"
    assert place("transformer.ln_f").block == ("transformer.ln_f", -1)
    assert place("transformer").block == ("transformer", -1)
    assert place("head.out.norm").block == ("head", -1)
    assert place("head.out.norm").rest == "out.norm"
    assert place("").block == ("", -1)
    assert place("0.1").block == ("", 0)
    assert pattern_of("stages.0.layers.1.conv") == "stages.*.layers.1.conv"


def test_a_step_without_ops_has_a_report() -> None:
    plan = made(Step(), "none")
    report = build_report(plan, plain=plan.plain)
    assert report.groups == ()
    assert report.curve.plan == ()


def test_the_model_is_plain_data() -> None:
    plan = made(gpt_like(2))
    report = build_report(plan, plain=plan.plain, title="gpt")
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report


@pytest.mark.parametrize(
    ("numbers", "text"), [([3], "3"), ([1, 0], "0, 1"), ([0, 1, 2, 5], "0-2, 5"), ([7, 1, 2, 3, 9], "1-3, 7, 9")]
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges(numbers) == text


def test_words() -> None:
    assert [show_seconds(s) for s in (0, 2e-6, 0.0125, 1.5)] == ["0", "2 us", "12.5 ms", "1.50 s"]
    assert plain_reason("replayed once in backward, 0.02 ms") == "replayed once in backward"
