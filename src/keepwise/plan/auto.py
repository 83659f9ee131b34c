"""`auto`: which planner a step and a budget call for, and why.

```
choice = AutoPlanner().choose(step, budget_bytes)   # choice.planner, choice.why
schedule = AutoPlanner().plan(step, budget_bytes)   # schedule.planner, schedule.why say the same
```

| chosen | when |
|---|---|
| `none` | there is no budget, or the plain step fits |
| `optimal` | the budget lies between the smallest peak that is known to be reachable and the plain peak |
| `floor` | it lies below: the plan with the smallest peak, which does not fit either |

`optimal` starts from the schedules of the named planners and of registered ones (`registry.py`), so that it is never slower than one
of them that fits; where one of those is the answer, `why` names it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from keepwise.ir import Schedule, Step
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.plan.optimal.result import why_floor, why_none, why_optimal
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
            return Choice(planner="none", why=why_none(budget_bytes, plain))
        floor = plan_floor(step)
        if floor.floor_bytes <= budget_bytes:
            return Choice(planner="optimal", why=why_optimal(budget_bytes, floor.floor_bytes, plain))
        return Choice(planner="floor", why=why_floor(budget_bytes, floor.floor_bytes, floor.binding))

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        """The schedule of the planner that `choose` names, with its reason."""
        choice = self.choose(step, budget_bytes)
        if choice.planner == "none" or budget_bytes is None:
            return hold_everything(step, planner="none", why=choice.why)
        found = plan_optimal(step, budget_bytes, time_limit=self.time_limit)
        return msgspec.structs.replace(found.schedule, planner=choice.planner)
