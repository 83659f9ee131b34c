"""What proof mode costs: a planned step with every replay compared, beside the same step without.

    python benchmarks/audit.py [targets] --budget 0.6x --pairs 5 --every 10 --threads 2

One process, steps in turn (A B A B). An audited step digests each dropped tensor twice; `every` divides what it adds, because the
steps between are the very same code. `--whole N` also measures N steps with `plan.audit(every=...)` against N without, in turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch

import keepwise
from keepwise import targets


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["gpt2"])
    parser.add_argument("--budget", default="0.6x")
    parser.add_argument("--planner", default="auto")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--whole", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| target | budget | step | audited step | compared | added, every step | added, every n-th | quartiles |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.targets:
        target = targets.build(name)
        plan = keepwise.fit(
            target.model,
            target.args,
            target.kwargs,
            loss=target.loss,
            budget=options.budget,
            planner=options.planner,
            on_infeasible="floor",
            verify=False,
        )

        def step(target: targets.Target = target) -> None:
            target.model.zero_grad(set_to_none=False)
            target.scalar(target.model(*target.args, **dict(target.kwargs or {}))).backward()

        step()
        seconds: dict[int, list[float]] = {0: [], 1: []}
        for _ in range(options.pairs):
            for every in seconds:
                plan.audit(every=every)
                seconds[every].append(timed(step))
        added = sorted(a / b - 1 for a, b in zip(seconds[1], seconds[0], strict=True))
        median, n = statistics.median(added), options.every
        low, high = added[len(added) // 4], added[-1 - len(added) // 4]
        print(
            f"| {name} | {options.budget} | {statistics.median(seconds[0]):.2f} s | {statistics.median(seconds[1]):.2f} s "
            f"| {plan.stats.num_audited} tensors | {median:+.1%} | {median / n:+.2%} | {low / n:+.2%} to {high / n:+.2%} |",
            flush=True,
        )
        if options.whole:
            whole = {every: whole_run(plan, step, every, options.whole) for every in (0, n, 0, n)}
            print(f"{options.whole} steps in turn, every={n}: {whole[n] / whole[0] - 1:+.2%}", flush=True)
    return 0


def timed(step: Callable[[], object]) -> float:
    """Seconds of one step, after the garbage of the last one is gone."""
    gc.collect()
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def whole_run(plan: keepwise.Plan, step: Callable[[], object], every: int, num: int) -> float:
    """Seconds of `num` steps."""
    plan.audit(every=every)
    return sum(timed(step) for _ in range(num))


if __name__ == "__main__":
    raise SystemExit(main())
