"""Planners of the user's own.

```
class Mine:
    def plan(self, step, budget_bytes):
        return get_planner("selective").plan(step, budget_bytes)   # or any `Schedule` that `simulate` accepts

register_planner("mine", Mine())
keepwise.fit(model, batch, budget="8GiB", planner="mine")   # by name; planner=Mine() works without registering
keepwise.fit(model, batch, budget="8GiB")                   # `auto` tries it beside its own search, and says so where it won
```

The judge (`keepwise.simulate`) checks every schedule, so that a wrong one costs an error or a candidate, never a wrong gradient.
"""

from __future__ import annotations

import warnings

from keepwise._errors import UsageError
from keepwise.ir import Schedule, Step
from keepwise.plan.planner import Planner
from keepwise.simulate import ScheduleError, simulate

_REGISTERED: dict[str, Planner] = {}

RESERVED = frozenset(
    {"auto", "optimal", "floor", "none", "full", "every", "sqrt", "recursive", "selective", "boundaries"}
    | {"recompute_everything"}
)
"""Names that mean something already."""


def register_planner(name: str, planner: Planner, *, replace: bool = False) -> None:
    """Make a planner known by a name, and a candidate of `auto`.

    Args:
        name: letters, digits, `-` and `_`.
        planner: an object with `plan(step, budget_bytes) -> Schedule`; `budget_bytes` bounds the whole peak, None is no bound.
        replace: whether the name may be in use.

    Raises:
        UsageError: a bad or reserved name, one in use, or no such method.
    """
    if not name or not name.replace("-", "").replace("_", "").isalnum() or name in RESERVED:
        raise UsageError(
            f"{name!r} cannot name a planner: use letters, digits, '-' and '_', and none of {', '.join(sorted(RESERVED))}"
        )
    _check(planner)
    if name in _REGISTERED and not replace:
        raise UsageError(f"a planner is called {name!r} already; pass replace=True to put this one in its place")
    _REGISTERED[name] = planner


def unregister_planner(name: str) -> None:
    """Forget a registered planner.

    Raises:
        UsageError: none is called so.
    """
    if _REGISTERED.pop(name, None) is None:
        raise UsageError(f"no registered planner is called {name!r}")


def registered_planners() -> dict[str, Planner]:
    """Name -> planner, in the order of registration."""
    return dict(_REGISTERED)


def ask(planner: Planner, name: str, step: Step, budget_bytes: int | None) -> Schedule:
    """What a planner of the user's own proposes.

    Raises:
        UsageError: it is none, it raised (the cause), or what it returned is no `Schedule`.
    """
    _check(planner)
    try:
        schedule = planner.plan(step, budget_bytes)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"the planner {name!r} raised {error!r}") from error
    if not isinstance(schedule, Schedule):
        raise UsageError(f"the planner {name!r} returned {type(schedule).__name__}, not a keepwise.ir.Schedule")
    return schedule


def registered_schedules(step: Step, budget_bytes: int | None) -> list[tuple[str, Schedule]]:
    """What each registered planner proposes; one that raises, or whose schedule the judge refuses, is left out with a warning."""
    found: list[tuple[str, Schedule]] = []
    for name, planner in _REGISTERED.items():
        try:
            schedule = ask(planner, name, step, budget_bytes)
            simulate(step, schedule)
        except UsageError as error:  # its fault must not cost the user the plan
            warnings.warn(f"keepwise: {error}; it is left out", stacklevel=3)
        except ScheduleError as error:
            text = f"keepwise: the planner {name!r} returned an illegal schedule: {error}; it is left out"
            warnings.warn(text, stacklevel=3)
        else:
            found.append((name, schedule))
    return found


def _check(planner: Planner) -> None:
    if not isinstance(planner, Planner):
        raise UsageError(
            f"planner must be a name or an object with plan(step, budget_bytes), got {type(planner).__name__}"
        )
    if isinstance(planner, type):
        raise UsageError(f"a planner is an object: pass {planner.__name__}(), not the class")
