"""Plans for several micro-batches in flight: what a forward pass leaves for its backward is there n - 1 times more.

With `h` bytes left behind by one forward, a budget of `B` is one of `B - (n - 1) h` for a single micro-batch. Neither is known before
the plan is: so the values of `h` are searched by branch and bound. For an interval `[a, b]` of them

    bound:  least time at the budget B - (n - 1) a of plans that leave at most b
    plan:   least time at the budget B - (n - 1) b of plans that leave at most b

both by the chain's first pass with a reserve (`ChainProgram.build_root`); the interval with the least bound is halved next.
"""

from __future__ import annotations

import heapq
import time

from keepwise.plan.optimal.assemble import assemble
from keepwise.plan.optimal.workbench import View, Workbench

MAX_INTERVALS = 64
"""Intervals that are looked at for one budget."""


def left_by_every_plan(bench: Workbench, view: View) -> int:
    """Bytes that forward leaves for backward whatever is planned: saved tensors that cannot be dropped."""
    step, graph = bench.step, view.model.graph
    split = step.span("backward").start
    if not split:
        return 0
    before = sum(graph.nbytes[s.id] for s in step.storages if s.birth < 0 and s.death >= split)
    return int(graph.between[split]) - before - step.outside_bytes


def solve_in_flight(bench: Workbench, view: View, budget_bytes: int, deadline: float, tolerance: float) -> float:
    """Offer plans for one budget to the judge; the bound within the family, 0 where there was no time for one."""
    others = bench.step.in_flight - 1
    fixed = others * left_by_every_plan(bench, view)
    most = (budget_bytes - fixed - view.lower.low) // others
    if most < 0:
        return float("inf")

    def bound(a: int, b: int) -> float:
        return view.lower.leaving(budget_bytes - fixed - others * a, b)[0]

    intervals = [(bound(0, most), 0, most)]
    least = float("inf")
    for _ in range(MAX_INTERVALS):
        if not intervals or time.perf_counter() > deadline:
            break
        value, a, b = heapq.heappop(intervals)
        best = bench.best(budget_bytes)
        close = best is not None and best.added_seconds - value <= tolerance * max(value, 0.01 * bench.step.seconds)
        if close or value == float("inf") or b - a <= view.lower.grain:
            least = value
            break
        for target in (b, (a + b) // 2):
            roots = view.upper.plan_leaving(budget_bytes - fixed - others * target, target)
            if roots is not None:
                bench.offer(assemble(view.model, roots))
        middle = (a + b) // 2
        for low, high in ((a, middle), (middle, b)):
            heapq.heappush(intervals, (max(bound(low, high), value), low, high))
    return min([least, *(value for value, _, _ in intervals)])
