"""What a planner is."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from keepwise.ir import Schedule, Step


@runtime_checkable
class Planner(Protocol):
    """Anything that makes a `Schedule` for a step."""

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        """A schedule that `simulate` accepts; named planners do not look at the budget (bytes of the whole peak)."""
        ...
