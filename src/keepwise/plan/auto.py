"""`auto`: which planner a step and a budget call for, and why.

```
choice = AutoPlanner().choose(step, budget_bytes)   # choice.planner, choice.why
schedule = AutoPlanner().plan(step, budget_bytes)
```

| chosen | when |
|---|---|
| `none` | there is no budget, or the plain step fits |
| `optimal` | the budget lies between the smallest peak that is known to be reachable and the plain peak |
| `floor` | it lies below: the plan with the smallest peak, which does not fit either |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from keepwise.ir import Schedule, Step
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.plan.segments import hold_everything
from keepwise.simulate import simulate


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A planner's name and the reason for it."""

    planner: Literal["none", "optimal", "floor"]
    why: str
    """One sentence with the numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AutoPlanner:
    """Chooses between doing nothing, the optimal planner and the smallest peak."""

    time_limit: float = 5.0
    """Seconds that the optimal planner may take."""

    def choose(self, step: Step, budget_bytes: int | None) -> Choice:
        """What `plan` would do.

        Args:
            step: a steady training step.
            budget_bytes: bound on the peak of the whole step; None for none.
        """
        if budget_bytes is None:
            return Choice(planner="none", why="no budget is given: everything is kept")
        plain = simulate(step).peak_bytes
        if plain <= budget_bytes:
            return Choice(
                planner="none", why=f"the plain step needs {plain:,} of {budget_bytes:,} bytes: nothing to do"
            )
        floor = plan_floor(step)
        if floor.floor_bytes <= budget_bytes:
            why = f"the budget of {budget_bytes:,} bytes lies between {floor.floor_bytes:,} and {plain:,} (plain)"
            return Choice(planner="optimal", why=why)
        why = f"the budget of {budget_bytes:,} bytes is below {floor.floor_bytes:,}, the smallest peak found: {floor.binding}"
        return Choice(planner="floor", why=why)

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        """The schedule of the planner that `choose` names, with its reason."""
        choice = self.choose(step, budget_bytes)
        if choice.planner == "none" or budget_bytes is None:
            return hold_everything(step, planner="none", why=choice.why)
        if choice.planner == "floor":
            return msgspec.structs.replace(plan_floor(step).schedule, planner="floor", why=choice.why)
        found = plan_optimal(step, budget_bytes, time_limit=self.time_limit)
        return msgspec.structs.replace(found.schedule, why=f"{choice.why}; {found.schedule.why}")
