"""`auto`: the plain step where it fits, else the fastest plan that fits, else the plan with the smallest peak.

`schedule.planner` says which it was (`none`, `optimal` or `floor`), and `schedule.why` the numbers behind it.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepwise.ir import Schedule, Step
from keepwise.plan.optimal import plan_optimal
from keepwise.plan.segments import hold_everything


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoPlanner:
    """The search for the fastest plan, as a `Planner`."""

    time_limit: float = 5.0
    """Seconds that the search may take."""

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        """The fastest schedule found within the budget (bytes of the whole peak; None: no limit)."""
        if budget_bytes is None:
            return hold_everything(step, planner="none", why="no budget is given: everything is kept")
        return plan_optimal(step, budget_bytes, time_limit=self.time_limit).schedule
