"""Budget in, `Schedule` out.

`recipes.py` finds the ops that rebuild a tensor, `droppable.py` says which may be dropped, `boundaries.py` cuts a step into blocks,
`build.py` makes a legal schedule from what is held and where windows lie; `named.py` holds the fixed policies by name.
"""

from __future__ import annotations

from keepwise.plan.named import NAMES, Planner, get_planner

__all__ = ["NAMES", "Planner", "get_planner"]
