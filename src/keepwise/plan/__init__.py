"""Budget in, `Schedule` out.

`recipes.py` finds the ops that rebuild a tensor, `droppable.py` says which may be dropped, `boundaries.py` cuts a step into blocks,
`build.py` makes a legal schedule from what is held and where windows lie; `named.py` holds the fixed policies by name, `optimal/` the
search for the fastest plan that fits, `auto.py` the choice between them, `registry.py` planners of the user's own.
"""

from __future__ import annotations

from keepwise.plan.named import NAMES, get_planner
from keepwise.plan.planner import Planner
from keepwise.plan.registry import register_planner, registered_planners, unregister_planner

__all__ = ["NAMES", "Planner", "get_planner", "register_planner", "registered_planners", "unregister_planner"]
