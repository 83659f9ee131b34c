"""Keepwise beside the stock policies: time, memory and bits of one training step, in one process and in turn.

    python benchmarks/run.py                                  # GPT-2
    python benchmarks/run.py gpt2 llama bert vit resnet50 --pairs 9 --threads 2 --write
    python benchmarks/run.py gpt2 --budgets 800MiB,564MiB,258MiB,min --policies none

Run it with MALLOC_MMAP_THRESHOLD_=65536 MALLOC_TRIM_THRESHOLD_=65536, so that freed memory goes back and the resident peak means
something. Resident memory is measured in a process of its own for each row: what a process did before leaves holes in its heap, which later
steps fill. A budget here is the peak *above* the bytes that exist anyway (parameters, gradients, buffers, inputs), as the tables of
other tools give it; by default each stock policy's own peak, and the smallest one. Gradients are zeroed in place, there is no optimizer
step. Ratios compare runs of the same round with the plain step; the quartiles are over the rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

import keepwise
from keepwise import targets
from keepwise.integrations.stock import apply_stock
from keepwise.measure import ResidentRise, allocator_peak
from keepwise.session.budget import parse_budget
from keepwise.targets import Target

sys.path.insert(0, str(Path(__file__).parent))
from stock import first_difference, outcome, step_of

MIB = 1 << 20
FOLDER = Path(__file__).parent / "results"


@dataclass(kw_only=True, slots=True)
class Row:
    """One way to run the step."""

    name: str
    allocator_bytes: int
    resident_bytes: int
    predicted_bytes: int | None = None
    predicted_ratio: float | None = None
    bound_ratio: float | None = None
    gap: float | None = None
    fit_seconds: float | None = None
    difference: str = ""
    seconds: float = 0.0
    ratio: float = 1.0
    quartiles: tuple[float, float] = (1.0, 1.0)


def planned_step(target: Target, plan: keepwise.Plan) -> Callable[[], object]:
    """A step with the plan put on and taken off around it."""

    def step() -> None:
        plan.apply(target.model)
        try:
            target.model.zero_grad(set_to_none=False)
            target.step()
        finally:
            plan.remove()

    return step


def measure(row: Row, step: Callable[[], object], *how: str) -> None:
    """Fill in the peaks; the resident one by another process."""
    step()
    row.allocator_bytes = allocator_peak(step)
    command = [sys.executable, __file__, *how, "--threads", str(torch.get_num_threads())]
    row.resident_bytes = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def resident_rise(target: Target, how: str) -> int:
    """By how much a step raises this process's resident memory, under a stock policy or a saved plan."""
    if how.endswith(".json"):
        keepwise.Plan.load(how).apply(target.model)
        step = step_of(target, "none")
    else:
        step = step_of(target, how)
    step()
    step()
    with ResidentRise() as rise:
        step()
    return rise.bytes


def compare(
    name: str, policies: Sequence[str], budgets: Sequence[str], pairs: int
) -> tuple[list[Row], dict[str, float]]:
    """Measure everything on one target."""
    target = targets.build(name)
    target.step()
    initial = copy.deepcopy(target.model.state_dict())

    def checked(policy: str) -> dict[str, torch.Tensor]:
        """What a step leaves behind, always from the same state: running statistics move with every step."""
        target.model.load_state_dict(initial)
        return outcome(target, policy)

    reference = checked("none")
    rows: dict[str, Row] = {}
    steps: dict[str, Callable[[], object]] = {}
    for policy in policies:
        row = rows[policy] = Row(name=policy, allocator_bytes=0, resident_bytes=0)
        steps[policy] = step_of(target, policy)
        measure(row, steps[policy], name, "--resident", policy)
        row.difference = first_difference(reference, checked(policy))
        print(f"  {policy}: {row.allocator_bytes / MIB:.0f} MiB", file=sys.stderr, flush=True)
    wanted = list(budgets) or [f"{rows[p].allocator_bytes}" for p in policies if p != "none"] + ["min"]
    static = 0
    for budget in wanted:
        began = time.perf_counter()
        plan = fitted(target, budget, static)
        seconds = time.perf_counter() - began
        if static == 0:
            static = plan.static_bytes
            if budget != "min" and not budget.startswith("planner:"):
                began = time.perf_counter()
                plan = fitted(target, budget, static)
                seconds = time.perf_counter() - began
        plan.remove()
        above = plan.peak_bytes - plan.static_bytes
        label = label_of(budget)
        row = rows[label] = Row(
            name=label,
            allocator_bytes=0,
            resident_bytes=0,
            predicted_bytes=above,
            predicted_ratio=1 + (plan.replay_seconds + plan.overhead_seconds - plan.saved_seconds) / plan.step_seconds,
            bound_ratio=1
            + (plan.document.bound_seconds + plan.overhead_seconds - plan.saved_seconds) / plan.step_seconds,
            gap=plan.gap,
            fit_seconds=seconds,
        )
        steps[label] = planned_step(target, plan)
        with tempfile.TemporaryDirectory() as folder:
            plan.save(f"{folder}/plan.json")
            measure(row, steps[label], name, "--resident", f"{folder}/plan.json")
        plan.apply(target.model)
        row.difference = first_difference(reference, checked("none"))
        plan.remove()
        print(
            f"  {label}: {row.allocator_bytes / MIB:.0f} MiB, {row.difference or 'identical'}",
            file=sys.stderr,
            flush=True,
        )
    samples: dict[str, list[float]] = {k: [] for k in steps}
    for i in range(pairs):
        order = list(steps.items())
        for key, step in order if i % 2 == 0 else reversed(order):  # a drift of the machine favours nobody
            gc.collect()
            began = time.perf_counter()
            step()
            samples[key].append(time.perf_counter() - began)
    for key, row in rows.items():
        ratios = sorted(a / b for a, b in zip(samples[key], samples[policies[0]], strict=True))
        row.seconds = statistics.median(samples[key])
        row.ratio = statistics.median(ratios)
        row.quartiles = (ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4])
    return list(rows.values()), {"static_bytes": static}


def fitted(target: Target, budget: str, static: int) -> keepwise.Plan:
    """Fit for a budget above the static bytes."""
    target.model.zero_grad(set_to_none=False)
    with contextlib.redirect_stdout(sys.stderr), apply_stock(target.model, "none", blocks=target.blocks):
        if budget.startswith("planner:"):
            name = budget.removeprefix("planner:")
            return keepwise.fit(target.model, target.args, target.kwargs, loss=target.loss, planner=name, budget="max")
        whole = "min" if budget == "min" else static + int(float_of(budget))
        return keepwise.fit(
            target.model, target.args, target.kwargs, loss=target.loss, budget=whole, on_infeasible="floor"
        )


def label_of(budget: str) -> str:
    """Name of a row."""
    if budget.startswith("planner:"):
        return f"keepwise, planner {budget.removeprefix('planner:')}"
    return "keepwise, smallest" if budget == "min" else f"keepwise <= {float_of(budget) / MIB:.0f}"


def float_of(budget: str) -> float:
    """A size in bytes."""
    return parse_budget(budget, plain_peak_bytes=0, floor_bytes=0, device_bytes=0, auto_bytes=0) or 0


def table(name: str, rows: Sequence[Row], pairs: int) -> str:
    """Markdown."""
    lines = [
        f"### {name} ({pairs} rounds)",
        "",
        "| step | peak above static, MiB | predicted | resident, MiB | time | quartiles | predicted | bound | fit, s | bits |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        predicted = f"{r.predicted_bytes / MIB:.1f}" if r.predicted_bytes is not None else ""
        ratio = f"{r.predicted_ratio:.3f}x" if r.predicted_ratio is not None else ""
        bound = f"{r.bound_ratio:.3f}x" if r.bound_ratio is not None else ""
        fit = f"{r.fit_seconds:.1f}" if r.fit_seconds is not None else ""
        lines.append(
            f"| {r.name} | {r.allocator_bytes / MIB:.1f} | {predicted} | {r.resident_bytes / MIB:.0f} | {r.ratio:.3f}x "
            f"({r.seconds:.2f} s) | {r.quartiles[0]:.3f}-{r.quartiles[1]:.3f} | {ratio} | {bound} | {fit} | "
            f"{'differ: ' + r.difference if r.difference else 'identical'} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["gpt2"])
    parser.add_argument("--policies", default="none,full,every2,selective,selective2")
    parser.add_argument(
        "--budgets",
        default="",
        help="comma-separated sizes above static, min, or planner:NAME; default: the stock peaks and min",
    )
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--resident",
        metavar="POLICY|PLAN.json",
        help="only print by how many bytes a step of the target raises this process's resident memory",
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/TARGET.json and .md")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    if options.resident:
        print(resident_rise(targets.build(options.targets[0]), options.resident))
        return 0
    for name in options.targets:
        print(f"{name}:", file=sys.stderr, flush=True)
        rows, facts = compare(
            name, options.policies.split(","), [b for b in options.budgets.split(",") if b], options.pairs
        )
        text = table(name, rows, options.pairs)
        print(text, "\n", flush=True)
        if options.write:
            FOLDER.mkdir(exist_ok=True)
            conditions = {
                "date": time.strftime("%Y-%m-%d"),
                "torch": str(torch.__version__),
                "threads": options.threads,
                "machine": platform.machine(),
                "python": platform.python_version(),
                **facts,
            }
            data = {"target": name, "pairs": options.pairs, "conditions": conditions, "rows": [asdict(r) for r in rows]}
            (FOLDER / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
            (FOLDER / f"{name}.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
