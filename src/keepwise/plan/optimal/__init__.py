"""The optimal planner: the fastest plan within a budget, with a bound. In the order of the data:

- `graph`: bytes that no plan changes, recipes; `cuts`, `stages`: the forward pass cut at its narrow points, equal stages recognised;
- `options`: what one stage can do, exactly priced. All that is worth doing: by search (`menu`), completely (`enumerate`, which counts
  with `arrays` and `windows`), or completely in parts that share little (`pieces`). `relaxed`: what a stage needs at least;
  `dominance`: what no other beats;
- `model`: one step ready for planning; `chain`: a dynamic program over its stages; `programs`: those of all passes;
- `assemble`: decisions to a `Schedule`; `improve`: local search; `workbench`: what is kept for the next budget;
- `solve`: the judge's loop; `in_flight`: for several micro-batches; `overall`: a bound over all schedules;
- `binding`: what makes the peak; `result`: the answer.
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
