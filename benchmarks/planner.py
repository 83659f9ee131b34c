"""What planning costs against the number of blocks: seconds, memory and gap. Nothing is trained.

    python benchmarks/planner.py                       # traces five blocks of GPT-2 XL (width 1600, 25 heads, 1 x 1024 tokens)
    python benchmarks/planner.py --step step.json      # or takes a recorded step
    python benchmarks/planner.py --blocks 12,96,1000 --write

The recorded step is deepened (`repeat.py`) to each number of blocks and planned in a process of its own. *First plan* includes everything
that is made once a step (cuts, menus, tables); *next* is the median of the other budgets. The gap is (added - bound) / max(bound, 1 % of
the step), the largest of the budgets; budgets are shares of the way from the smallest peak to the plain one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from keepwise.ir import Step
from keepwise.plan.optimal import plan_floor, plan_optimal
from repeat import deepen
from svg import Axis, Line, document, panel

FOLDER = Path(__file__).parent / "results"
BLOCKS = "6,12,24,48,96,192,400,1000"
SHARES = (0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
TIME_LIMIT = 60.0


def xl_step(blocks: int = 5) -> Step:
    """Some blocks of GPT-2 XL (Radford et al. 2019) with a small vocabulary, recorded."""
    import torch
    import transformers

    from keepwise.session.batch import as_batch, whole_step
    from keepwise.trace import trace_steps

    config = transformers.GPT2Config(
        n_layer=blocks,
        n_embd=1600,
        n_head=25,
        n_positions=1024,
        vocab_size=2048,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    ids = torch.randint(0, 2048, (1, 1024))
    batch = {"input_ids": ids, "labels": ids}
    run = whole_step(model, as_batch(None, batch), None, None)
    return trace_steps(run, model=model, inputs=((), batch), device="cpu").recording.step


def high_water_bytes() -> int:
    """The most that was resident in this process; `getrusage` would begin with what its parent had."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure(path: str, blocks: int) -> dict[str, object]:
    """Plan the step of that many blocks at every budget; in a process that does nothing else."""
    step = Step.from_json(Path(path).read_bytes())
    step = deepen(step, blocks)
    before = high_water_bytes()
    began, used = time.perf_counter(), time.process_time()
    floor = plan_floor(step)
    model_seconds, model_cpu = time.perf_counter() - began, time.process_time() - used
    low, high = floor.floor_bytes, floor.plain_peak_bytes
    points = []
    for share in SHARES:
        budget = low + int(share * (high - low))
        began, used = time.perf_counter(), time.process_time()
        result = plan_optimal(step, budget, time_limit=TIME_LIMIT)
        points.append(
            {
                "share": share,
                "budget_bytes": budget,
                "peak_bytes": result.peak_bytes,
                "added": result.added_seconds / step.seconds,
                "bound": result.bound_seconds / step.seconds,
                "gap": result.gap,
                "status": result.status.name,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - used,
            }
        )
    after = high_water_bytes()
    return {
        "blocks": blocks,
        "ops": len(step.ops),
        "plain_peak_bytes": high,
        "floor_bytes": low,
        "first_seconds": model_seconds + points[0]["seconds"],
        "first_cpu_seconds": model_cpu + points[0]["cpu_seconds"],
        "next_seconds": statistics.median(p["seconds"] for p in points[1:]),
        "slowest_seconds": max(p["seconds"] for p in points[1:]),
        "planner_bytes": after - before,
        "process_bytes": after,
        "gap": max(p["gap"] for p in points),
        "points": points,
    }


def table(rows: Sequence[dict]) -> str:
    """Markdown."""
    lines = [
        "| blocks | ops | first plan, s | of CPU time | next budget, s | slowest, s | planner, MiB | process, MiB | largest gap |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['blocks']} | {r['ops']:,} | {r['first_seconds']:.1f} | {r['first_cpu_seconds']:.1f} | {r['next_seconds']:.2f} | {r['slowest_seconds']:.1f} | "
            f"{r['planner_bytes'] / 2**20:.0f} | {r['process_bytes'] / 2**20:.0f} | {100 * r['gap']:.2f} % |"
        )
    return "\n".join(lines)


def drawing(rows: Sequence[dict]) -> str:
    """Time and memory against size, both logarithmic."""
    first = [(r["blocks"], r["first_seconds"]) for r in rows]
    following = [(r["blocks"], max(r["next_seconds"], 1e-3)) for r in rows]
    memory = [(r["blocks"], max(r["process_bytes"] / 2**20, 1.0)) for r in rows]
    seconds = [Line(name="first plan", points=first), Line(name="another budget", points=following)]
    panels = [
        panel(
            "Planning time", seconds, Axis(label="blocks", log=True), Axis(label="seconds", log=True), 0, 0, 520, 380
        ),
        panel(
            "Memory of the planner's process",
            [Line(name="resident, highest", points=memory)],
            Axis(label="blocks", log=True),
            Axis(label="MiB", log=True),
            520,
            0,
            520,
            380,
        ),
    ]
    return document(panels, 1040, 380)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", help="a recorded step (JSON) with at least three equal blocks; default: GPT-2 XL's")
    parser.add_argument("--blocks", default=BLOCKS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/planner.json, .md and .svg")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measure(options.step, options.one)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = options.step
        if path is None:
            path = str(Path(folder) / "step.json")
            Path(path).write_bytes(xl_step().to_json())
        rows = []
        for blocks in options.blocks.split(","):
            command = [sys.executable, __file__, "--step", path, "--one", blocks]
            rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
            print(table(rows[-1:]).splitlines()[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if options.write:
        FOLDER.mkdir(exist_ok=True)
        (FOLDER / "planner.json").write_text(json.dumps(rows, indent=1) + "\n")
        (FOLDER / "planner.md").write_text(table(rows) + "\n")
        (FOLDER / "planner.svg").write_text(drawing(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
