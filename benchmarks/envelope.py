"""Time against peak: every stock policy and ours, on eight targets. Ours must be the lower left edge.

    python benchmarks/envelope.py --write                       # predicted, default sizes; measured, small sizes
    python benchmarks/envelope.py gpt2 unet --measured none     # predicted only

A target that is measured again replaces its own figures in the results and leaves the others.

*Predicted*: each target's step is recorded once; the judge (`keepwise.simulate`) prices the stock policies (as the planners of the same
names) and our plans, masks expanded from their bits as in `fit`, at five budgets and at each policy's own peak. *Measured*: the small size of each target is trained under the
policies and under our plans (`run.py`), bits compared with the plain step. Peaks are above what exists anyway.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from keepwise import targets
from keepwise.ir import Step
from keepwise.ir.packing import with_packing
from keepwise.plan import get_planner
from keepwise.plan.optimal import Status, bound_over_all_schedules, plan_floor, plan_optimal
from keepwise.plan.optimal.result import gap_of
from keepwise.session.batch import as_batch, whole_step
from keepwise.session.step_facts import only_inside_forward
from keepwise.simulate import simulate
from keepwise.trace import trace_steps
from run import Row, compare, table
from svg import Axis, Line, document, panel

FOLDER = Path(__file__).parent / "results"
TARGETS = ("gpt2", "llama", "bert", "vit", "resnet50", "t5", "unet", "mixtral")
POLICIES = ("none", "full", "every:2", "every:3", "sqrt", "recursive", "selective")
SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Budgets as shares of the way from the smallest peak to the plain one."""
CURVE = 32
MIB = 1 << 20


def recorded(name: str, folder: Path | None = None) -> Step:
    """The step of a target, as `fit` records it; from a folder where it was recorded before, and into it."""
    file = folder / f"{name}.json" if folder is not None else None
    if file is not None and file.exists():
        return Step.from_json(file.read_bytes())
    target = targets.build(name)
    batch = as_batch(target.args, target.kwargs)
    run = whole_step(target.model, batch, target.loss, None)
    traced = trace_steps(run, model=target.model, inputs=(batch.args, batch.kwargs), device="cpu")
    step = only_inside_forward(traced.recording.step, traced.recording.inside)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(step.to_json())
    return step


def predicted(step: Step) -> dict:
    """Points of the policies, of ours, and of our whole curve: (peak above static in bytes, added seconds as a share of the step)."""
    plain = simulate(step)
    # The duration of the recorded ops: that of the recorded step holds the recording too.
    static, seconds = plain.static_bytes, sum(op.seconds for op in step.ops)
    began = time.perf_counter()
    forms = list({id(s): s for s in (with_packing(step), step)}.values())  # `fit` plans with masks from their bits
    low, high = min(plan_floor(form).floor_bytes for form in forms), plain.peak_bytes
    model_seconds = time.perf_counter() - began

    def ours(budget: int, overall: bool) -> dict:
        began = time.perf_counter()
        results = [plan_optimal(form, budget) for form in forms]
        took = time.perf_counter() - began
        result = min(results, key=lambda r: (r.status is Status.INFEASIBLE, r.added_seconds, r.peak_bytes))
        bound = min(r.bound_seconds for r in results if r.status is not Status.INFEASIBLE)
        return {
            "budget_bytes": budget - static,
            "peak_bytes": result.peak_bytes - static,
            "added": result.added_seconds / seconds,
            "bound": bound / seconds,
            "gap": gap_of(result.added_seconds, bound, seconds),
            "solve_seconds": took,
            "overall_bound": min(bound_over_all_schedules(form, budget, time_limit=5.0) for form in forms) / seconds
            if overall
            else None,
        }

    policies = []
    for name in POLICIES:
        timeline = simulate(step, get_planner(name).plan(step, None))
        beside = ours(timeline.peak_bytes, False)
        policies.append(
            {
                "name": name,
                "peak_bytes": timeline.peak_bytes - static,
                "added": timeline.added_seconds / seconds,
                "ours": beside,
                "never_worse": beside["peak_bytes"] <= timeline.peak_bytes - static
                and beside["added"] <= timeline.added_seconds / seconds + 1e-9,
            }
        )
    points = [ours(low + int(share * (high - low)), True) for share in SHARES]
    curve = [ours(low + (high - low) * i // (CURVE - 1), False) for i in range(CURVE)]
    return {
        "static_bytes": static,
        "step_seconds": seconds,
        "plain_peak_bytes": high - static,
        "floor_bytes": low - static,
        "first_plan_seconds": model_seconds,
        "policies": policies,
        "ours": points,
        "curve": curve,
    }


def measured(name: str, pairs: int) -> list[Row]:
    """The small size trained under each stock policy and under ours at the same peaks and at the smallest."""
    return compare(f"{name}-tiny", ["none", "full", "every2", "selective"], [], pairs)[0]


def markdown(found: dict[str, dict]) -> str:
    """Both tables."""
    lines = [
        "| target | policy | its peak, MiB | its time | ours at that budget: peak, MiB | time | bound |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, f in found.items():
        for p in f["policies"]:
            o = p["ours"]
            lines.append(
                f"| {name} | {p['name']} | {p['peak_bytes'] / MIB:.1f} | {1 + p['added']:.3f}x | {o['peak_bytes'] / MIB:.1f} | "
                f"{1 + o['added']:.3f}x | {1 + o['bound']:.3f}x |"
            )
    lines += [
        "",
        "| target | budget, MiB | peak, MiB | time | bound | gap | bound over all schedules | solving, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, f in found.items():
        for o in f["ours"]:
            lines.append(
                f"| {name} | {o['budget_bytes'] / MIB:.1f} | {o['peak_bytes'] / MIB:.1f} | {1 + o['added']:.3f}x | {1 + o['bound']:.3f}x | "
                f"{100 * o['gap']:.2f} % | {1 + o['overall_bound']:.3f}x | {o['solve_seconds']:.2f} |"
            )
    worse = [f"{n}: {p['name']}" for n, f in found.items() for p in f["policies"] if not p["never_worse"]]
    count = sum(len(f["policies"]) for f in found.values())
    lines += [
        "",
        f"Points of stock policies at which ours has a higher peak or takes longer: {len(worse)} of {count}"
        + (f" ({', '.join(worse)})" if worse else "")
        + ".",
    ]
    return "\n".join(lines)


def drawing(found: dict[str, dict]) -> str:
    """One panel a target: our curve, the five budgets, the policies."""
    panels = []
    for i, (name, f) in enumerate(found.items()):
        ours = [(o["peak_bytes"] / MIB, 1 + o["added"]) for o in f["curve"]]
        highest = 1 + 1.3 * max(0.1, *(p["added"] for p in f["policies"]))
        lines = [
            Line(name="keepwise", points=[p for p in ours if p[1] <= highest]),
            Line(
                name="stock policies",
                points=[(p["peak_bytes"] / MIB, 1 + p["added"]) for p in f["policies"]],
                joined=False,
                labels=[p["name"] for p in f["policies"]],
            ),
        ]
        x = Axis(label="peak above static, MiB", low=0.0)
        y = Axis(label="time of a step, predicted", low=1.0)
        panels.append(panel(name, lines, x, y, 480 * (i % 2), 320 * (i // 2), 480, 320))
    return document(panels, 960, 320 * ((len(found) + 1) // 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=list(TARGETS))
    parser.add_argument("--measured", choices=("tiny", "none"), default="tiny")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=Path, help="folder with recorded steps; missing ones are recorded into it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/envelope.json, .md and .svg")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    file = FOLDER / "envelope.json"
    found: dict[str, dict] = json.loads(file.read_text()) if options.write and file.exists() else {}
    for name in options.targets:
        began = time.perf_counter()
        before = found.get(name, {})
        found[name] = predicted(recorded(name, options.steps))
        print(f"{name}: predicted in {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True)
        found[name]["measured"] = before.get("measured", [])
        if options.measured == "tiny":
            found[name]["measured"] = [asdict(r) for r in measured(name, options.pairs)]
        texts = [
            table(f"{n}-tiny", [Row(**r) for r in f["measured"]], options.pairs)
            for n, f in found.items()
            if f["measured"]
        ]
        if options.write:
            FOLDER.mkdir(exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
            (FOLDER / "envelope.md").write_text("\n\n".join([markdown(found), *texts]) + "\n")
            (FOLDER / "envelope.svg").write_text(drawing(found))
    print(markdown(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
