"""`plan_optimal`: the fastest plan that fits, with a bound.

1. *Model* (once a step): stages, menus, links (`model`), and the tables of the dynamic program (`chain`).
2. *Chain*: with bytes rounded up it gives a plan, rounded down a bound.
3. *Simulate and tighten*: the judge's peak decides; a plan that does not fit is solved again for less, one that leaves room
   for more.
4. *Second solve*: the smallest budget at which the program takes the same time.
5. *Finer grains*: where a gap is left, all again with tables for the lower part of the range only.
6. *All schedules*: where one is still left, the bound over all schedules (`overall`), if that is higher.
7. *Local search* beyond the family on small steps (`improve`).

Every plan that the judge accepted is remembered with its step (`workbench`), and the best that fits is the answer, so that a
smaller budget never gives a higher peak or less added time.

*What the bound is about.* All schedules in which each stage takes an option of its family (`enumerate`, `pieces`) and the chain's
passes drop or leave whole options (`chain`). Schedules outside of it exist: a stage's inputs are there from the start of its backward,
a window inside a stage begins at that stage's inputs, and an op is replayed for a segment only as part of a whole stage. Where one
of those is found that takes less time than the bound, the gap is 0.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np

from keepwise.ir import Schedule, Step
from keepwise.plan.optimal.binding import describe_peak
from keepwise.plan.optimal.in_flight import solve_in_flight
from keepwise.plan.optimal.overall import bound_over_all_schedules
from keepwise.plan.optimal.result import OptimalResult, Status, gap_of, why_floor, why_none, why_optimal
from keepwise.plan.optimal.workbench import TINY, Candidate, View, Workbench, workbench
from keepwise.plan.registry import registered_schedules
from keepwise.simulate import simulate

MAX_OVERALL_OPS = 3000
"""Above as many ops the bound over all schedules is not asked for."""

MAX_OVERALL_SECONDS = 1.0

Progress = Callable[[str, float], None]
"""Called with what is being done and the gap so far."""


def plan_optimal(
    step: Step,
    budget_bytes: int,
    *,
    time_limit: float = 5.0,
    tolerance: float = 0.01,
    progress: Progress | None = None,
    candidates: Sequence[Schedule] = (),
) -> OptimalResult:
    """The plan of `step` with the least added time whose whole-step peak is within `budget_bytes`.

    Args:
        step: a steady training step.
        budget_bytes: bound on the peak of the whole step on its device, static bytes included.
        time_limit: seconds after which the best plan so far is returned; the step's model, made at the first call, is not cut short.
        tolerance: gap at which a plan counts as optimal.
        progress: called now and then with what is being done and the gap so far.
        candidates: schedules of other planners; the result is never worse than one of them that fits.

    Returns:
        The plan with its bound. An infeasible budget is a result (`Status.INFEASIBLE`), with the schedule of the smallest peak.
        On Ctrl-C the best plan so far is returned.
    """
    began = time.perf_counter()
    bench = workbench(step)
    layers: list[str] = []
    try:
        if progress is not None:
            progress("menus", float("inf"))
        bench.prepare()
        layers += ["menus", "chain"]
        if bench.plain.peak_bytes <= budget_bytes:
            return _result(bench, budget_bytes, tolerance, began, layers)
        others = registered_schedules(step, budget_bytes)
        for schedule in (*candidates, *(msgspec.structs.replace(s, planner=name) for name, s in others)):
            bench.offer(schedule)
        if candidates or others:
            layers.append("candidates")
        if step.in_flight > 1:
            _several(bench, budget_bytes, began + time_limit, tolerance, layers)
            _climb(bench, budget_bytes, began + time_limit, layers)
            return _result(bench, budget_bytes, tolerance, began, layers)
        for view in bench.views:
            if progress is not None:
                progress("chain", _gap(bench, budget_bytes))
            _solve(bench, view, budget_bytes, began + time_limit, layers)
        for number in range(len(bench.views)):
            if _gap(bench, budget_bytes) <= tolerance:
                break
            view = bench.closer(number, budget_bytes, began + time_limit - time.perf_counter())
            if view is not None:
                layers += [] if "finer grains" in layers else ["finer grains"]
                _solve(bench, view, budget_bytes, began + time_limit, layers)
        _over_all(bench, budget_bytes, began + time_limit, tolerance, layers)
        _climb(bench, budget_bytes, began + time_limit, layers)
    except KeyboardInterrupt:
        layers.append("interrupted")
    return _result(bench, budget_bytes, tolerance, began, layers)


def plan_floor(step: Step) -> OptimalResult:
    """The plan with the smallest whole-step peak that the planner knows how to reach."""
    began = time.perf_counter()
    bench = workbench(step)
    bench.prepare()
    return _result(bench, bench.floor().peak_bytes, 0.01, began, ["menus", "chain"])


def frontier(step: Step, points: int = 20, *, also: Sequence[Step] = ()) -> list[OptimalResult]:
    """Plans at `points` budgets from the floor to the plain peak, ascending.

    Every budget's answer is the best of all plans that were found for any of them: less budget never gives a higher peak or less time.

    Args:
        step: a steady training step.
        points: number of budgets.
        also: the same step in other forms (`ir.packing`): each answer is the best of all, the bound is the least of theirs.
    """
    benches = [workbench(s) for s in (step, *also)]
    for bench in benches:
        bench.prepare()
    high = benches[0].plain.peak_bytes
    solved: dict[int, list[OptimalResult]] = {}
    budgets: list[int] = []
    # Local search at a budget may find a smaller peak than the smallest so far.
    while not budgets or _smallest(benches) < budgets[0]:
        low = _smallest(benches)
        budgets = [low + (high - low) * i // max(points - 1, 1) for i in range(points)]
        for budget in reversed(budgets):
            solved[budget] = [plan_optimal(bench.step, budget) for bench in benches]
    return [_best_of(benches, budget, solved[budget]) for budget in budgets]


def _smallest(benches: Sequence[Workbench]) -> int:
    return min(bench.floor().peak_bytes for bench in benches)


def _best_of(benches: Sequence[Workbench], budget: int, solved: Sequence[OptimalResult]) -> OptimalResult:
    """The best of several forms of a step at a budget, by all that is known of each by now."""
    results = [
        _result(bench, budget, 0.01, time.perf_counter(), list(r.layers))
        for bench, r in zip(benches, solved, strict=True)
    ]
    best = min(results, key=lambda r: (r.status is Status.INFEASIBLE, r.added_seconds, r.peak_bytes))
    bound = min(r.bound_seconds for r in results if r.status is not Status.INFEASIBLE or r is best)
    return replace(
        best,
        floor_bytes=min(r.floor_bytes for r in results),
        bound_seconds=bound,
        gap=gap_of(best.added_seconds, bound, benches[0].step.seconds),
        solve_seconds=sum(r.solve_seconds for r in solved),
    )


def _solve(bench: Workbench, view: View, budget_bytes: int, deadline: float, layers: list[str]) -> None:
    _tighten(bench, view, budget_bytes, deadline, layers)
    if view.near is not view.upper:
        _round_down(bench, view, budget_bytes, deadline)
    # What the chain charges twice leaves room: ask for more, as long as the judge agrees.
    for grains in (1, 4, 16, 64, 256):
        if time.perf_counter() > deadline:
            layers.append("time limit")
            return
        best = bench.best(budget_bytes)
        more = budget_bytes + grains * view.upper.grain
        if best is not None and view.upper.seconds(more) < best.added_seconds - TINY:
            bench.try_chain(view, view.upper, more)
    best = bench.best(budget_bytes)
    if best is not None:
        if "second solve" not in layers:
            layers.append("second solve")
        smallest = view.upper.smallest(best.added_seconds + TINY)
        if smallest is not None and smallest < best.peak_bytes:
            bench.try_chain(view, view.upper, smallest)


def _over_all(bench: Workbench, budget_bytes: int, deadline: float, tolerance: float, layers: list[str]) -> None:
    """Where a gap is left: a bound over all schedules is one over the family too."""
    left = min(deadline - time.perf_counter(), MAX_OVERALL_SECONDS)
    if len(bench.step.ops) > MAX_OVERALL_OPS or left <= 0 or _gap(bench, budget_bytes) <= tolerance:
        return
    bound = bound_over_all_schedules(bench.step, budget_bytes, time_limit=left)
    if bound < float("inf"):
        bench.note_bound(budget_bytes, bound)
        layers.append("all schedules")


def _climb(bench: Workbench, budget_bytes: int, deadline: float, layers: list[str]) -> None:
    """Local search, also where nothing in the family is better."""
    if time.perf_counter() < deadline and bench.climb(budget_bytes):
        layers.append("local search")


def _several(bench: Workbench, budget_bytes: int, deadline: float, tolerance: float, layers: list[str]) -> None:
    """Micro-batches in flight: see `in_flight`."""
    layers.append("in flight")
    bench.floor()
    if not bench.passes_are_one:
        return
    bound = min(solve_in_flight(bench, view, budget_bytes, deadline, tolerance) for view in bench.views)
    if bound < float("inf"):
        bench.note_bound(budget_bytes, bound)


def _tighten(bench: Workbench, view: View, budget_bytes: int, deadline: float, layers: list[str]) -> None:
    """Solve for less until the judge agrees, then halve the step between the last two."""
    program = view.upper
    target, over = budget_bytes, budget_bytes
    for _ in range(8):
        found = bench.try_chain(view, program, target)
        if found is None or found.peak_bytes <= budget_bytes or time.perf_counter() > deadline:
            break
        if "tighten" not in layers:
            layers.append("tighten")
        over = target
        target -= max(found.peak_bytes - budget_bytes, program.grain)
    while over - target > max(program.grain, (over - program.low) // 1024) and time.perf_counter() < deadline:
        middle = (over + target) // 2
        found = bench.try_chain(view, program, middle)
        if found is not None and found.peak_bytes > budget_bytes:
            over = middle
        else:
            target = middle


def _round_down(bench: Workbench, view: View, budget_bytes: int, deadline: float) -> None:
    """Plans with bytes rounded down, for ever less, until one fits or is no better than what is there."""
    program = view.near
    target = budget_bytes
    for _ in range(6):
        best = bench.best(budget_bytes)
        if time.perf_counter() > deadline or (best and program.seconds(target) >= best.added_seconds - TINY):
            return
        found = bench.try_chain(view, program, target)
        if found is None or found.peak_bytes <= budget_bytes:
            return
        target -= max(found.peak_bytes - budget_bytes, program.grain)


def _gap(bench: Workbench, budget_bytes: int) -> float:
    best = bench.best(budget_bytes)
    if best is None:
        return float("inf")
    return gap_of(best.added_seconds, min(bench.bound(budget_bytes), best.added_seconds), bench.step.seconds)


def _result(bench: Workbench, budget_bytes: int, tolerance: float, began: float, layers: list[str]) -> OptimalResult:
    step = bench.step
    floor = bench.floor()
    found: Candidate | None = bench.best(budget_bytes)
    shown = found or floor
    bound = min(bench.bound(budget_bytes), shown.added_seconds) if found is not None else shown.added_seconds
    gap = gap_of(shown.added_seconds, bound, step.seconds)
    binding = describe_peak(step, simulate(step, shown.schedule))
    plain = bench.plain.peak_bytes
    if found is None:
        name, status, why = "floor", Status.INFEASIBLE, why_floor(budget_bytes, floor.peak_bytes, binding)
    elif plain <= budget_bytes:
        name, status, why = "none", Status.OPTIMAL, why_none(budget_bytes, plain)
    else:
        name, status = "optimal", Status.OPTIMAL if gap <= tolerance else Status.FEASIBLE
        origin = shown.schedule.planner
        found_by = f", found by the planner {origin!r}" if origin not in ("", "optimal") else ""
        why = f"{why_optimal(budget_bytes, floor.peak_bytes, plain)}; {status.name.lower()}: gap {gap:.2%} to the bound{found_by}"
    schedule = msgspec.structs.replace(shown.schedule, planner=name, why=why)
    return OptimalResult(
        step=step,
        schedule=schedule,
        status=status,
        budget_bytes=budget_bytes,
        peak_bytes=shown.peak_bytes,
        plain_peak_bytes=plain,
        floor_bytes=floor.peak_bytes,
        added_seconds=shown.added_seconds,
        bound_seconds=bound,
        gap=gap,
        binding=binding,
        solve_seconds=time.perf_counter() - began,
        layers=tuple(layers),
    )


def memory_price(step: Step, budget_bytes: int) -> float:
    """What a byte is worth at a budget, in seconds a byte: the slope of the chain's least added time, smoothed to a convex curve.

    It is the dual price of the budget where plans may be mixed over steps. 0 where the plain step fits.
    """
    bench = workbench(step)
    bench.prepare()
    if bench.plain.peak_bytes <= budget_bytes:
        return 0.0
    points = {bench.plain.peak_bytes: 0.0}
    for view in bench.views:
        table = view.near.table
        for m in np.flatnonzero(table < np.concatenate([[np.inf], table[:-1]])).tolist():
            at = view.near.low + m * view.near.grain
            points[at] = min(points.get(at, float("inf")), float(table[m]))
    hull: list[tuple[int, float]] = []
    for x, y in sorted(points.items()):
        if hull and y >= hull[-1][1]:
            continue
        while len(hull) >= 2 and _slope(hull[-2], hull[-1]) >= _slope(hull[-2], (x, y)):
            hull.pop()
        hull.append((x, y))
    for a, b in itertools.pairwise(hull):
        if budget_bytes < b[0]:
            return -_slope(a, b)
    return 0.0


def _slope(a: tuple[int, float], b: tuple[int, float]) -> float:
    return (b[1] - a[1]) / (b[0] - a[0])
