"""From a recorded step and a budget to a schedule that the simulator accepted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keepwise._errors import InfeasibleBudget, UsageError
from keepwise._units import show_bytes
from keepwise.ir import Schedule, Step
from keepwise.ir.packing import with_packing
from keepwise.plan import get_planner
from keepwise.plan.optimal import OptimalResult, plan_floor, plan_optimal
from keepwise.plan.optimal import Status as Solved
from keepwise.plan.registry import ask
from keepwise.session.advice import binding_moment, infeasible_message, named_message
from keepwise.session.budget import is_word
from keepwise.session.forced import plan_forced
from keepwise.session.overheads import Overheads
from keepwise.session.status import Status
from keepwise.simulate import ScheduleError, Timeline, simulate

Progress = Callable[[str], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A schedule and what is known about it."""

    schedule: Schedule
    timeline: Timeline
    plain: Timeline
    status: Status
    bound_seconds: float
    floor_bytes: int
    notes: tuple[str, ...] = ()


def decided(
    step: Step, planned: Planned, budget: int | float | str, limit: int | None, overheads: Overheads
) -> dict[str, Any]:
    """The fields of a `PlanDocument` that planning decides.

    Args:
        step: the step that `planned` is for.
        planned: the plan.
        budget: as the user wrote it.
        limit: the same in bytes; None for no limit.
        overheads: what it costs and gains besides its replays.
    """
    return {
        "step": step,
        "schedule": planned.schedule,
        "status": planned.status.name,
        "budget": str(budget),
        "budget_bytes": None if is_word(budget, "min") else limit,
        "plain_peak_bytes": planned.plain.peak_bytes,
        "peak_bytes": planned.timeline.peak_bytes,
        "floor_bytes": planned.floor_bytes,
        "added_seconds": planned.timeline.added_seconds,
        "bound_seconds": planned.bound_seconds,
        **overheads._asdict(),
    }


def plan_step(step: Step, planner: Any, *, packs: bool, forced: frozenset[int], **options: Any) -> tuple[Step, Planned]:
    """Plan a step, with random masks expanded from their bits where that is better than drawing them again (`ir.packing`).

    Args:
        step: the recorded step.
        planner: as for `plan_schedule`; named planners and the user's own plan the recorded step.
        packs: whether packed forms may be used.
        forced: as for `plan_schedule`.
        options: the other arguments of `plan_schedule`.

    Returns:
        The step that the schedule is for, and the plan.

    Raises:
        InfeasibleBudget, UsageError: as `plan_schedule` does.
    """
    plain, budget = simulate(step), options["budget_bytes"]
    fits = not options["want_floor"] and (budget is None or plain.peak_bytes <= budget)
    packed = with_packing(step, but=forced) if packs and planner == "auto" and not fits else step
    if packed is step:
        return step, plan_schedule(step, planner=planner, forced=forced, **options)
    try:
        found = plan_schedule(packed, planner=planner, forced=forced, **options)
    except InfeasibleBudget:
        return step, plan_schedule(step, planner=planner, forced=forced, **options)
    if options["want_floor"] or found.status is Status.INFEASIBLE:  # the bits themselves may stand in the way
        other = plan_schedule(step, planner=planner, forced=forced, **options)
        if (other.timeline.peak_bytes, other.timeline.added_seconds) < (
            found.timeline.peak_bytes,
            found.timeline.added_seconds,
        ):
            return step, other
    return packed, dataclasses.replace(found, plain=plain)


def plan_schedule(
    step: Step,
    budget_bytes: int | None,
    planner: Any,
    *,
    on_infeasible: str,
    want_floor: bool,
    progress: Progress,
    forced: frozenset[int] = frozenset(),
) -> Planned:
    """Plan a step.

    Args:
        step: the recorded step.
        budget_bytes: whole-step peak to stay under; None for no limit; ignored if `want_floor`.
        planner: a name of API.md or an object with `plan(step, budget_bytes) -> Schedule`.
        on_infeasible: `"raise"` or `"floor"`.
        want_floor: the user asked for the smallest peak (`budget="min"`).
        progress: told what happens.
        forced: storages that the user wants recomputed (`pin=`).

    Raises:
        InfeasibleBudget: no plan fits, or the named planner's does not, and `on_infeasible` is `"raise"`.
        UsageError: no such planner, or the user's planner returned an illegal schedule, or `forced` cannot be recomputed.
    """
    plain = simulate(step)
    if forced:
        return _forced(
            step,
            budget_bytes,
            planner,
            plain,
            forced,
            on_infeasible=on_infeasible,
            want_floor=want_floor,
            progress=progress,
        )
    if planner != "auto":
        found = _named(step, budget_bytes, planner, plain)
        if found.status is not Status.INFEASIBLE:
            return found
        if want_floor:
            return dataclasses.replace(found, status=Status.FEASIBLE)
        assert budget_bytes is not None
        text = named_message(
            planner if isinstance(planner, str) else type(planner).__name__, budget_bytes, found.timeline
        )
        if on_infeasible == "raise":
            raise InfeasibleBudget(text, floor_bytes=found.timeline.peak_bytes, binding=binding_moment(found.timeline))
        return dataclasses.replace(found, notes=(text,))
    try:
        return _optimal(
            step, budget_bytes, plain, on_infeasible=on_infeasible, want_floor=want_floor, progress=progress
        )
    except (AssertionError, ValueError, IndexError) as error:  # a fault of the solver must not cost the user the plan
        return _best_named(step, 0 if want_floor else budget_bytes, plain, f"{error}")


def _optimal(
    step: Step, budget_bytes: int | None, plain: Timeline, *, on_infeasible: str, want_floor: bool, progress: Progress
) -> Planned:
    smallest: tuple[Schedule, ...] = ()
    if want_floor:
        if progress:
            progress("searching the smallest peak")
        floor = plan_floor(step)
        budget_bytes, smallest = floor.peak_bytes, (floor.schedule,)
    if budget_bytes is None or plain.peak_bytes <= budget_bytes:
        return _unchanged(step, plain)
    if progress and not want_floor:
        progress("solving for the fastest step that fits")
    found = plan_optimal(step, budget_bytes, candidates=smallest)
    if found.status is not Solved.INFEASIBLE:
        return _solved(step, plain, found, Status[found.status.name])
    over = _solved(step, plain, plan_floor(step), Status.INFEASIBLE)
    if on_infeasible == "raise":
        raise InfeasibleBudget(
            infeasible_message(budget_bytes, over.timeline),
            floor_bytes=over.timeline.peak_bytes,
            binding=binding_moment(over.timeline),
        )
    return over


def _solved(step: Step, plain: Timeline, found: OptimalResult, status: Status) -> Planned:
    timeline = simulate(step, found.schedule)
    return Planned(
        schedule=found.schedule,
        timeline=timeline,
        plain=plain,
        status=status,
        bound_seconds=min(found.bound_seconds, timeline.added_seconds),
        floor_bytes=min(found.floor_bytes, timeline.peak_bytes),
    )


def _forced(
    step: Step,
    budget_bytes: int | None,
    planner: Any,
    plain: Timeline,
    forced: frozenset[int],
    *,
    on_infeasible: str,
    want_floor: bool,
    progress: Progress,
) -> Planned:
    """A plan in which the user's storages are recomputed; what the planner would do without that is its bound."""
    free: list[Planned] = []

    def plan(target: int | None) -> Schedule:
        found = plan_schedule(
            step, target, planner, on_infeasible="floor", want_floor=want_floor, progress=progress if not free else None
        )
        free.append(found)
        return found.schedule

    others: list[Schedule] = []
    if planner == "auto":
        others = [get_planner(name).plan(step, None) for name in ("full", "sqrt", "recursive")]
        others.append(plan_floor(step).schedule)
    schedule, timeline = plan_forced(step, 0 if want_floor else budget_bytes, forced, plan, others)
    held = forced & set(schedule.held)
    if held:
        first = max(held, key=lambda s: step.storages[s].nbytes)
        raise UsageError(
            f"pin: {len(held)} of the {len(forced)} tensors that are pinned to 'recompute' cannot be made again together; the largest is "
            f"{show_bytes(step.storages[first].nbytes)} of {step.ops[step.storages[first].birth].path or 'the model'}. "
            "Pin a smaller part of the model"
        )
    fits = want_floor or budget_bytes is None or timeline.peak_bytes <= budget_bytes
    if not fits and on_infeasible == "raise":
        assert budget_bytes is not None
        raise InfeasibleBudget(
            infeasible_message(budget_bytes, timeline),
            floor_bytes=timeline.peak_bytes,
            binding=binding_moment(timeline),
        )
    return Planned(
        schedule=schedule,
        timeline=timeline,
        plain=plain,
        status=Status.FEASIBLE if fits else Status.INFEASIBLE,
        bound_seconds=min(free[0].bound_seconds, timeline.added_seconds),
        floor_bytes=min(free[0].floor_bytes, timeline.peak_bytes),
    )


def _unchanged(step: Step, plain: Timeline) -> Planned:
    schedule = get_planner("none").plan(step, None)
    return Planned(
        schedule=schedule,
        timeline=simulate(step, schedule),
        plain=plain,
        status=Status.FITS_UNCHANGED,
        bound_seconds=0.0,
        floor_bytes=plain.peak_bytes,
    )


def _best_named(step: Step, budget_bytes: int | None, plain: Timeline, fault: str) -> Planned:
    """The fastest named plan that fits, else the one with the smallest peak."""
    found = [
        _named(step, budget_bytes, name, plain)
        for name in ("none", "selective", "every:2", "sqrt", "full", "recursive")
    ]
    fitting = [p for p in found if p.status is not Status.INFEASIBLE]
    best = (
        min(fitting, key=lambda p: p.timeline.added_seconds)
        if fitting
        else min(found, key=lambda p: p.timeline.peak_bytes)
    )
    note = f"the solver stopped on a check of its own ({fault}): the best named plan was taken instead. Please report this model"
    return dataclasses.replace(best, notes=(note,))


def _named(step: Step, budget_bytes: int | None, planner: Any, plain: Timeline) -> Planned:
    try:
        chosen = get_planner(planner) if isinstance(planner, str) else planner
    except (KeyError, ValueError) as error:
        raise UsageError(str(error).strip("'\"")) from None
    name = planner if isinstance(planner, str) else type(planner).__name__
    schedule = ask(chosen, name, step, budget_bytes)
    try:
        timeline = simulate(step, schedule)
    except ScheduleError as error:
        raise UsageError(f"the planner {name!r} returned an illegal schedule: {error}") from error
    fits = budget_bytes is None or timeline.peak_bytes <= budget_bytes
    status = Status.FEASIBLE if fits else Status.INFEASIBLE
    if not schedule.windows and fits:
        status = Status.FITS_UNCHANGED
    return Planned(
        schedule=schedule,
        timeline=timeline,
        plain=plain,
        status=status,
        bound_seconds=0.0,
        floor_bytes=min(timeline.peak_bytes, plain.peak_bytes),
    )
