"""How good are plans for a machine that is not here? This machine is taken for one.

    python benchmarks/elsewhere.py [targets] --threads 2

Each target's step is recorded here, with measured prices. The same step is priced by the roofline of this machine's measured profile
(`keepwise.measure.measure_device`), as it would be for one that is elsewhere, and planned with those prices for five budgets between the
smallest peak and the plain one. The plans are then judged by the measured prices, beside the plans that were made with them.
"""

from __future__ import annotations

import argparse

import torch

import keepwise
from keepwise import targets
from keepwise.cost import on_device
from keepwise.ir import Step
from keepwise.measure import measure_device
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.simulate import simulate

SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)


def recorded(name: str) -> Step:
    """The step of a target, with measured prices."""
    target = targets.build(name)
    plan = keepwise.fit(target.model, target.args, target.kwargs, loss=target.loss, budget="max", verify=False)
    plan.remove()
    return plan.step


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["gpt2", "llama", "vit", "resnet50"])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    profile = measure_device("cpu")
    print(
        f"{profile.name}: {profile.single_flops / 1e9:.0f} GFLOP/s, {profile.memory_bandwidth / 1e9:.1f} GB/s, "
        f"{profile.launch_seconds * 1e6:.1f} us an op\n"
    )
    print("| target | ops by the roofline / measured | " + " | ".join(f"{s:.0%} of the way" for s in SHARES) + " |")
    print("|---|---|" + "---|" * len(SHARES))
    for name in options.targets:
        step = recorded(name)
        there = on_device(step, profile)
        forward = [op.index for op in step.ops if op.phase == "forward"]
        share = sum(there.ops[i].seconds for i in forward) / sum(step.ops[i].seconds for i in forward)
        low, high = simulate(step, plan_floor(step).schedule).peak_bytes, simulate(step).peak_bytes
        cells: list[str] = []
        for where in SHARES:
            budget = int(low + where * (high - low))
            ours, theirs = plan_optimal(step, budget).schedule, plan_optimal(there, budget).schedule
            if ours is None or theirs is None:
                cells.append("none")
                continue
            best, found = simulate(step, ours), simulate(step, theirs)
            assert found.peak_bytes <= budget
            cells.append(
                f"{1 + found.added_seconds / step.seconds:.3f}x / {1 + best.added_seconds / step.seconds:.3f}x"
            )
        print(f"| {name} | {share:.2f} | " + " | ".join(cells) + " |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
