"""`plan_optimal`: the fastest plan that fits, with a bound.

1. *Model* (once a step): stages, menus, links.
2. *Chain*: the dynamic program with bytes rounded up gives a plan, rounded down a bound.
3. *Simulate and tighten*: the judge's peak decides; a plan that does not fit is solved again for less, one that leaves
   room for more.
4. *Second solve*: the smallest budget at which the program takes the same time.

Every plan that the judge accepted is remembered with its step, and the best that fits is the answer, so that a smaller
budget never gives a higher peak or less added time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keepwise.ir import Schedule, Step
from keepwise.plan.named import get_planner
from keepwise.plan.optimal.assemble import assemble
from keepwise.plan.optimal.binding import describe_peak
from keepwise.plan.optimal.model import Model, build_model
from keepwise.plan.optimal.programs import Programs
from keepwise.plan.optimal.result import OptimalResult, Status, gap_of
from keepwise.simulate import ScheduleError, Timeline, simulate

_KEY = "_optimal_workbench"
_TINY = 1e-9

NAMED = ("full", "every:2", "sqrt", "recursive", "selective")
"""Planners whose schedules are candidates at every budget."""

MAX_NAMED_OPS = 20_000
"""Above as many ops they are not tried: they take longer than the program that beats them."""

Progress = Callable[[str, float], None]
"""Called with what is being done and the gap so far."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that the judge accepted."""

    schedule: Schedule
    peak_bytes: int
    added_seconds: float


@dataclass(kw_only=True, slots=True)
class Workbench:
    """What planning one step leaves for the next budget."""

    step: Step
    model: Model
    plain: Timeline
    plain_schedule: Schedule
    upper: Programs
    near: Programs
    """The menus with bytes rounded down: its plans may be a little over."""
    lower: Programs
    """The bounds with bytes rounded down."""
    candidates: list[Candidate] = field(default_factory=list)
    """No one beaten by another in peak and time, by rising peak."""
    refused: int = 0
    """Schedules that the judge did not accept: none, unless the planner has a bug or a caller offers one."""

    def offer(self, schedule: Schedule) -> Candidate | None:
        """Let the judge see a schedule; None if it is refused."""
        try:
            timeline = simulate(self.step, schedule)
        except ScheduleError:
            self.refused += 1
            return None
        found = Candidate(schedule=schedule, peak_bytes=timeline.peak_bytes, added_seconds=timeline.added_seconds)
        if not any(
            c.peak_bytes <= found.peak_bytes and c.added_seconds <= found.added_seconds + _TINY for c in self.candidates
        ):
            self.candidates = [
                c
                for c in self.candidates
                if c.peak_bytes < found.peak_bytes or c.added_seconds < found.added_seconds - _TINY
            ]
            self.candidates.append(found)
            self.candidates.sort(key=lambda c: c.peak_bytes)
        return found

    def best(self, budget_bytes: int) -> Candidate | None:
        """Least added time that fits, then least peak."""
        fitting = [c for c in self.candidates if c.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda c: (c.added_seconds, c.peak_bytes), default=None)

    def try_chain(self, program: Programs, budget_bytes: int) -> Candidate | None:
        """Plan by the chain, judged."""
        roots = program.plan(budget_bytes)
        return None if roots is None else self.offer(assemble(self.model, roots))


def _grains(stages: int) -> int:
    """Finer for short chains: the tables cost grains times stages squared."""
    return max(2000, min(60_000, 1_500_000 // max(stages, 1)))


def workbench(step: Step) -> Workbench:
    """The model and tables of a step, made at the first call and kept with the step."""
    table: dict[str, Any] = vars(step)
    if _KEY not in table:
        model = build_model(step)
        plain = simulate(step)
        high = plain.peak_bytes
        grains = _grains(model.num_stages)
        schedule = Schedule(held=tuple(sorted(model.graph.formal)), planner="optimal", why="everything fits")
        bench = Workbench(
            step=step,
            model=model,
            plain=plain,
            plain_schedule=schedule,
            upper=Programs(model, model.menus, high=high, grains=grains, rounding="up"),
            near=Programs(model, model.menus, high=high, grains=grains, rounding="down"),
            lower=Programs(model, model.bounds, high=high, grains=grains, rounding="down"),
        )
        bench.offer(schedule)
        if len(step.ops) <= MAX_NAMED_OPS:
            for name in NAMED:
                bench.offer(get_planner(name).plan(step, None))
        table[_KEY] = bench
    return table[_KEY]


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
        time_limit: seconds after which the best plan so far is returned.
        tolerance: gap at which a plan counts as optimal.
        progress: called now and then with what is being done and the gap so far.
        candidates: schedules of other planners; the result is never worse than one of them that fits.

    Returns:
        The plan with its bound. An infeasible budget is a result (`Status.INFEASIBLE`), with the schedule of the smallest peak.
        On Ctrl-C the best plan so far is returned.
    """
    began = time.perf_counter()
    bench = workbench(step)
    layers = ["menus", "chain"]
    if bench.plain.peak_bytes <= budget_bytes:
        return _result(bench, budget_bytes, bench.best(bench.plain.peak_bytes), tolerance, began, layers)
    try:
        for schedule in candidates:
            bench.offer(schedule)
        if candidates:
            layers.append("candidates")
        if progress is not None:
            progress("chain", float("inf"))
        _solve(bench, budget_bytes, began + time_limit, layers)
    except KeyboardInterrupt:
        layers.append("interrupted")
    return _result(bench, budget_bytes, bench.best(budget_bytes), tolerance, began, layers)


def _solve(bench: Workbench, budget_bytes: int, deadline: float, layers: list[str]) -> None:
    _tighten(bench, budget_bytes, deadline, layers)
    if time.perf_counter() > deadline:
        layers.append("time limit")
        return
    _round_down(bench, budget_bytes, deadline)
    # What the chain charges twice leaves room: ask for more, as long as the judge agrees.
    for grains in (1, 2, 4, 8, 16):
        if time.perf_counter() > deadline:
            layers.append("time limit")
            return
        best = bench.best(budget_bytes)
        more = budget_bytes + grains * bench.upper.grain
        if best is not None and bench.upper.seconds(more) < best.added_seconds - _TINY:
            bench.try_chain(bench.upper, more)
    best = bench.best(budget_bytes)
    if best is not None:
        layers.append("second solve")
        _smallest_peak(bench, best.added_seconds)


def _tighten(bench: Workbench, budget_bytes: int, deadline: float, layers: list[str]) -> None:
    """Solve for less until the judge agrees, then halve the step between the last two."""
    target, over = budget_bytes, budget_bytes
    for _ in range(8):
        found = bench.try_chain(bench.upper, target)
        if found is None or found.peak_bytes <= budget_bytes or time.perf_counter() > deadline:
            break
        if "tighten" not in layers:
            layers.append("tighten")
        over = target
        target -= max(found.peak_bytes - budget_bytes, bench.upper.grain)
    while over - target > max(bench.upper.grain, (over - bench.upper.low) // 256) and time.perf_counter() < deadline:
        middle = (over + target) // 2
        found = bench.try_chain(bench.upper, middle)
        if found is not None and found.peak_bytes > budget_bytes:
            over = middle
        else:
            target = middle


def _round_down(bench: Workbench, budget_bytes: int, deadline: float) -> None:
    """Plans with bytes rounded down, for ever less, until one fits or is no better than what is there."""
    target = budget_bytes
    for _ in range(6):
        best = bench.best(budget_bytes)
        if time.perf_counter() > deadline or (best and bench.near.seconds(target) >= best.added_seconds - _TINY):
            return
        found = bench.try_chain(bench.near, target)
        if found is None or found.peak_bytes <= budget_bytes:
            return
        target -= max(found.peak_bytes - budget_bytes, bench.near.grain)


def _smallest_peak(bench: Workbench, seconds: float) -> None:
    """Ask the program for the smallest budget with no more time."""
    smallest = bench.upper.smallest(seconds + _TINY)
    if smallest is not None:
        bench.try_chain(bench.upper, smallest)


def _floor(bench: Workbench) -> Candidate:
    """The plan with the smallest peak that is known."""
    smallest = bench.upper.smallest()
    if smallest is not None:
        bench.try_chain(bench.upper, smallest)
    return bench.candidates[0]


def _result(
    bench: Workbench, budget_bytes: int, found: Candidate | None, tolerance: float, began: float, layers: list[str]
) -> OptimalResult:
    step = bench.step
    floor = _floor(bench)
    if found is None and floor.peak_bytes <= budget_bytes:
        found = floor
    shown = found or floor
    bound = min(bench.lower.seconds(budget_bytes), shown.added_seconds) if found is not None else shown.added_seconds
    gap = gap_of(shown.added_seconds, bound, step.seconds)
    if found is None:
        status = Status.INFEASIBLE
    else:
        status = Status.OPTIMAL if gap <= tolerance else Status.FEASIBLE
    schedule = msgspec.structs.replace(
        shown.schedule, planner="optimal", why=f"{status.name.lower()}: gap {gap:.2%} to the bound"
    )
    return OptimalResult(
        schedule=schedule,
        status=status,
        budget_bytes=budget_bytes,
        peak_bytes=shown.peak_bytes,
        plain_peak_bytes=bench.plain.peak_bytes,
        floor_bytes=floor.peak_bytes,
        added_seconds=shown.added_seconds,
        bound_seconds=bound,
        gap=gap,
        binding=describe_peak(step, simulate(step, schedule)),
        solve_seconds=time.perf_counter() - began,
        layers=tuple(layers),
    )


def plan_floor(step: Step) -> OptimalResult:
    """The plan with the smallest whole-step peak that the planner knows how to reach."""
    began = time.perf_counter()
    bench = workbench(step)
    floor = _floor(bench)
    return _result(bench, floor.peak_bytes, bench.best(floor.peak_bytes), 0.01, began, ["menus", "chain"])


def frontier(step: Step, points: int = 20) -> list[OptimalResult]:
    """Plans at `points` budgets from the floor to the plain peak, ascending."""
    bench = workbench(step)
    low, high = _floor(bench).peak_bytes, bench.plain.peak_bytes
    budgets = [low + (high - low) * i // max(points - 1, 1) for i in range(points)]
    for budget in reversed(budgets):
        plan_optimal(step, budget)
    return [plan_optimal(step, budget) for budget in budgets]
