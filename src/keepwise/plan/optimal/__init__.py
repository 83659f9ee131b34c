"""The optimal planner: the fastest plan within a budget, with a bound.

In the order of the data: `graph` (bytes that no plan changes, recipes), `cuts` and `stages` (the forward pass cut at its narrow
points, equal stages recognised), `options` (what one stage can do, exactly priced), `menu`, `enumerate` and `pieces` (all that is
worth doing: by search, completely, completely in parts that share little), `model` (one step ready for planning), `chain` and
`programs` (a dynamic program over the stages), `assemble` (decisions to a `Schedule`), `improve` (local search), `workbench` (what is
kept for the next budget), `solve` (the judge's loop), `result`.
"""

from __future__ import annotations

from keepwise.plan.optimal.overall import bound_over_all_schedules
from keepwise.plan.optimal.result import OptimalResult, Status
from keepwise.plan.optimal.solve import frontier, memory_price, plan_floor, plan_optimal

__all__ = [
    "OptimalResult",
    "Status",
    "bound_over_all_schedules",
    "frontier",
    "memory_price",
    "plan_floor",
    "plan_optimal",
]
