"""What watching costs: a step with every hook and the op guard installed and every tensor kept, beside the plain step.

    python benchmarks/guard.py [targets] --pairs 9 --threads 2

`watch`: the guard compares each op's name, the hooks keep each saved tensor. `guard alone`: the same, but no result is written into memory of
dead ones, which hides on the CPU what watching costs. `capture`: as `watch`, and the calls of every window of the planner `full` are
captured, as if they were to be replayed, but nothing is dropped.
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
from keepwise.plan import get_planner
from keepwise.runtime.guard import Guard
from keepwise.runtime.program import compile_program
from keepwise.runtime.stats import StepStats
from keepwise.simulate import simulate, spare_of
from keepwise.targets import Target


def watched(target: Target, program: object, *, recycles: bool = True) -> Callable[[], object]:
    """A step whose forward runs under a guard that drops nothing."""

    def step() -> None:
        target.model.zero_grad(set_to_none=False)
        arguments, keywords = target.args, dict(target.kwargs or {})
        with Guard(program, StepStats(), None) as guard:  # type: ignore[arg-type]
            if not recycles:
                guard.recycler = None
            output = target.model(*arguments, **keywords)
        target.scalar(output).backward()

    return step


def plain(target: Target) -> Callable[[], object]:
    """The plain step."""

    def step() -> None:
        target.model.zero_grad(set_to_none=False)
        target.scalar(target.model(*target.args, **dict(target.kwargs or {}))).backward()

    return step


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["gpt2"])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| target | step | time | quartiles | ops seen |")
    print("|---|---|---|---|---|")
    for name in options.targets:
        target = targets.build(name)
        plan = keepwise.fit(
            target.model, target.args, target.kwargs, loss=target.loss, planner="full", budget="max", verify=False
        )
        plan.remove()
        keep_all = get_planner("none").plan(plan.step, None)
        nothing = compile_program(plan.step, keep_all, spare_of(simulate(plan.step, keep_all)))
        everything = compile_program(plan.step, plan.schedule, spare_of(simulate(plan.step, plan.schedule)))
        everything.drops.clear()
        everything.drops_by_view.clear()
        steps = {
            "plain": plain(target),
            "guard alone": watched(target, nothing, recycles=False),
            "watch": watched(target, nothing),
            "capture": watched(target, everything),
        }
        samples: dict[str, list[float]] = {k: [] for k in steps}
        for step in steps.values():
            step()
        order = list(steps)
        for _ in range(options.pairs):
            order = [*order[1:], order[0]]  # nobody always comes after the same one
            for key in order:
                gc.collect()
                began = time.perf_counter()
                steps[key]()
                samples[key].append(time.perf_counter() - began)
        for key in steps:
            ratios = sorted(a / b for a, b in zip(samples[key], samples["plain"], strict=True))
            low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
            seconds = statistics.median(samples[key])
            ratio = statistics.median(ratios)
            print(
                f"| {name} | {key} | {ratio:.3f}x ({seconds:.2f} s) | {low:.3f}-{high:.3f} | {plan.num_forward_ops} |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
