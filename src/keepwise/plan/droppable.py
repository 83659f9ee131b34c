"""Which saved storages may be dropped, and why the others may not."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from keepwise.ir import Category, Step
from keepwise.plan.recipes import find_recipe
from keepwise.plan.tables import tables_of

_KEY = "_plan_reasons"


def keep_reasons(step: Step) -> dict[int, str]:
    """Saved storage -> why it is kept in any plan; empty for those that may be dropped.

    The rule of `Schedule` (an activation or temporary without `keep_reason` that autograd holds longer than anyone else), and two
    reasons that the step itself shows: it is read at a version that is overwritten before the read, or the op that makes it
    cannot be replayed.
    """
    table = vars(step)
    if _KEY not in table:
        table[_KEY] = {s: _reason(step, s) for s in sorted(step.saved_storages)}
    return table[_KEY]


def droppable(step: Step) -> frozenset[int]:
    """Storages that may be dropped and have a recipe, given that everything else is held."""
    return frozenset(s for s, why in keep_reasons(step).items() if not why)


def formally_droppable(step: Step) -> frozenset[int]:
    """Storages that `Schedule` counts as dropped unless they are listed as held."""
    return frozenset(s for s in step.saved_storages if not _formal_reason(step, s))


def _formal_reason(step: Step, storage: int) -> str:
    s = step.storages[storage]
    if s.category not in (Category.ACTIVATION, Category.TEMPORARY):
        return f"{s.category}: it exists in any case"
    if s.keep_reason:
        return s.keep_reason
    if s.saved_until <= s.held_until:
        return f"held in any case by {s.holder or 'others than autograd'}"
    return ""


def _reason(step: Step, storage: int) -> str:
    formal = _formal_reason(step, storage)
    if formal:
        return formal
    tables = tables_of(step)
    reads = tables.reads_of.get(storage, ())
    if not reads:
        return ""
    recipe = find_recipe(step, values={r.value for r in reads}, available=_AllBut(storage), start=reads[0].first)
    return "" if recipe else str(recipe)


@dataclass(frozen=True, slots=True)
class _AllBut(Container[int]):
    """Every storage but one."""

    storage: int

    def __contains__(self, item: object) -> bool:
        return item != self.storage
