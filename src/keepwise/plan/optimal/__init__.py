"""The optimal planner: the fastest plan within a budget, with a bound.

In the order of the data: `graph` (bytes that no plan changes, recipes), `stages` (the forward pass cut at its narrow points),
`options` and `menu` (what one stage can do), `chain` (a dynamic program over the stages), `assemble` (decisions to a
`Schedule`), `solve` (the judge's loop), `result`.
"""

from __future__ import annotations

from keepwise.plan.optimal.result import OptimalResult, Status
from keepwise.plan.optimal.solve import frontier, plan_floor, plan_optimal

__all__ = ["OptimalResult", "Status", "frontier", "plan_floor", "plan_optimal"]
