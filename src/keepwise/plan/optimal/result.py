"""What the optimal planner answers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from keepwise.ir import Schedule, Step


class Status(Enum):
    """How good a plan is; the value is a sentence for the user."""

    OPTIMAL = "No plan of the searched window family that fits takes less time, within the tolerance."
    FEASIBLE = "The plan fits; a faster one that fits may exist: see the gap, or allow more time."
    INFEASIBLE = "No plan that was found fits the budget; the schedule is the one with the smallest peak."


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimalResult:
    """A schedule and what is proved about it."""

    step: Step
    """What the schedule is for: the step that was given, or another form of it (`frontier`)."""
    schedule: Schedule
    """The plan; for an infeasible budget the plan with the smallest peak."""
    status: Status
    budget_bytes: int
    """What was asked for."""
    peak_bytes: int
    """Whole-step peak of the schedule, from `simulate`."""
    plain_peak_bytes: int
    """Whole-step peak of the plain step, from `simulate`."""
    floor_bytes: int
    """Smallest whole-step peak that was found."""
    added_seconds: float
    """Seconds of all replays."""
    bound_seconds: float
    """Dual bound on `added_seconds` at this budget within the window family that was searched, or over all schedules if that is higher."""
    gap: float
    """(added - bound) / max(bound, 1 % of the step)."""
    binding: str
    """Moment and tensors that make the peak, in words."""
    solve_seconds: float
    """Wall time of this call."""
    layers: tuple[str, ...]
    """What was used, in order: `menus`, `chain`, `candidates`, `tighten`, `second solve`, `finer grains`, `all schedules`,
    `local search`, `interrupted`, `time limit`."""


def gap_of(added: float, bound: float, step_seconds: float) -> float:
    """(added - bound) / max(bound, 1 % of the step); 0 where both are 0."""
    difference = max(added - bound, 0.0)
    scale = max(bound, 0.01 * step_seconds)
    return difference / scale if difference else 0.0


def why_optimal(budget_bytes: int, floor_bytes: int, plain_bytes: int) -> str:
    """Why the search was made."""
    return f"the budget of {budget_bytes:,} bytes lies between {floor_bytes:,} (smallest peak found) and {plain_bytes:,} (plain)"


def why_floor(budget_bytes: int, floor_bytes: int, binding: str) -> str:
    """Why the plan with the smallest peak is shown."""
    return f"the budget of {budget_bytes:,} bytes is below {floor_bytes:,}, the smallest peak found: {binding}"


def why_none(budget_bytes: int, plain_bytes: int) -> str:
    """Why nothing is done."""
    return f"the plain step needs {plain_bytes:,} of {budget_bytes:,} bytes: nothing to do"
