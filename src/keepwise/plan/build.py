"""`build`: from what is held and where windows lie to a complete `Schedule`.

Each read of a dropped save is served by the innermost span around it (or by an outer one that retains the storage on request).
Each window replays the closure of what it serves, given what is held, what enclosing windows retain, and what is live at its start
for other reasons. What turns out to have no recipe is held instead, so that every result is legal. What is held for replays alone
and read by none is let go.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from keepwise.ir import NO_OP, Schedule, Step, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.recipes import NoRecipe, Recipe, find_recipe
from keepwise.plan.tables import SavedRead, tables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Where a window lies. Spans are disjoint or nested; a parent comes before its children."""

    start: int
    stop: int
    parent: int = NO_WINDOW
    """Position of the enclosing span in the list of spans."""
    retain: tuple[int, ...] = ()
    """Storages to retain for the spans inside it (they are rebuilt here unless they are available)."""
    copy_before: int = 0
    """First forward op of the segment that it replays: see `find_recipe`."""
    path: str = ""


def build(
    step: Step,
    *,
    held: Iterable[int],
    brief: Iterable[int] = (),
    spans: Sequence[Span] = (),
    planner: str = "",
    why: str = "",
) -> Schedule:
    """A legal schedule that holds `held` and serves all else from windows over `spans`.

    Args:
        step: the step.
        held: storages to hold: droppable ones that are kept, and others that replays may read by reference.
        brief: those of them that replays after autograd's last use make again, instead of having them held for longer.
        spans: where windows may lie. Spans that serve nothing vanish, and their children move to their parents.
        planner: name for the schedule.
        why: reason for the schedule.

    Returns:
        A schedule that `simulate` accepts.
    """
    return _Builder(step, set(held), frozenset(brief), spans).run(planner, why)


@dataclass(slots=True, kw_only=True)
class _Draft:
    """A window in the making."""

    recipe: Recipe
    retain: tuple[int, ...]
    start: int
    stop: int


class _Builder:
    def __init__(self, step: Step, held: set[int], brief: frozenset[int], spans: Sequence[Span]) -> None:
        self.step = step
        self.tables = tables_of(step)
        self.spans = spans
        self.formal = formally_droppable(step)
        self.held = held
        self.brief = brief
        self.extra = [set(span.retain) for span in spans]
        self.inner = self._innermost()
        self.drafts: list[_Draft] = []

    def run(self, planner: str, why: str) -> Schedule:
        while not (self._hold_unserved() and self._draft() and self._let_go()):
            pass
        read = {s for draft in self.drafts for s in draft.recipe.reads if not self.tables.is_leaf[s]}
        held = sorted((self.held & self.formal) | read)
        return Schedule(held=tuple(held), windows=self._windows(), planner=planner, why=why)

    def _hold_unserved(self) -> bool:
        """Hold what is read outside every span; whether nothing was."""
        lost = {r.storage for r in self._dropped_reads() if self.inner[r.first] == NO_WINDOW}
        self.held |= lost
        return not lost

    def _draft(self) -> bool:
        """Draft every window; on obstacles hold more and say False."""
        wanted = self._assign()
        starts, stops = self._tight(wanted)
        self.drafts = []
        around: list[dict[int, frozenset[int]]] = []
        more: set[int] = set()
        for i, span in enumerate(self.spans):
            outer = around[span.parent] if span.parent != NO_WINDOW else {}
            needed = {r.storage for r in wanted[i]}
            extra = {s for s in self.extra[i] if s not in self.held and s not in outer and s not in needed}
            recipe = find_recipe(
                self.step,
                values={r.value for r in wanted[i]},
                storages=extra,
                available=_Available(self, starts[i]),
                retained=outer,
                start=starts[i],
                copy_before=span.copy_before,
            )
            if isinstance(recipe, NoRecipe):
                obstacles = {o.storage for o in recipe.obstacles}
                # Where holding the obstacles changes nothing, give up what the window was to rebuild.
                more |= obstacles if not obstacles <= self.held else needed | extra
                recipe = Recipe(ops=())
            ops = frozenset(recipe.ops)
            retain = tuple(sorted(needed | extra)) if ops else ()
            around.append(outer | dict.fromkeys(retain, ops))
            self.drafts.append(_Draft(recipe=recipe, retain=retain, start=starts[i], stop=stops[i]))
        self.held |= more
        return not more

    def _let_go(self) -> bool:
        """Retain for inner windows only what they read; whether that was so."""
        borrowed: list[set[int]] = [set() for _ in self.spans]
        for i, draft in enumerate(self.drafts):
            for s in draft.recipe.borrowed:
                around = self.spans[i].parent
                while s not in self.drafts[around].retain:
                    around = self.spans[around].parent
                borrowed[around].add(s)
        wanted = self._assign()
        exact = True
        for i, draft in enumerate(self.drafts):
            useless = set(draft.retain) - borrowed[i] - {r.storage for r in wanted[i]}
            exact = exact and not useless
            self.extra[i] -= useless
        return exact

    def _dropped_reads(self) -> Iterator[SavedRead]:
        return (r for r in self.tables.reads if r.storage in self.formal and r.storage not in self.held)

    def _assign(self) -> list[list[SavedRead]]:
        """Span -> the reads of dropped saves that it serves."""
        wanted: list[list[SavedRead]] = [[] for _ in self.spans]
        for r in self._dropped_reads():
            span = self.inner[r.first]
            around = span
            while around != NO_WINDOW:
                if r.storage in self.extra[around]:
                    span = around
                    break
                around = self.spans[around].parent
            wanted[span].append(r)
        return wanted

    def _tight(self, wanted: list[list[SavedRead]]) -> tuple[list[int], list[int]]:
        """Spans cut down to the reads inside them: a later replay holds less."""
        starts = [
            min((r.first for r in reads), default=span.stop) for reads, span in zip(wanted, self.spans, strict=True)
        ]
        stops = [max((r.first for r in reads), default=NO_OP) for reads in wanted]
        for i in range(len(self.spans) - 1, -1, -1):
            parent = self.spans[i].parent
            if parent != NO_WINDOW:
                starts[parent] = min(starts[parent], starts[i])
                stops[parent] = max(stops[parent], stops[i])
        return starts, [max(a, b) for a, b in zip(starts, stops, strict=True)]

    def _innermost(self) -> list[int]:
        """Moment -> innermost span around it."""
        inner = [NO_WINDOW] * len(self.step.ops)
        for i, span in enumerate(self.spans):
            inner[span.start : span.stop + 1] = [i] * (span.stop + 1 - span.start)
        return inner

    def _windows(self) -> tuple[Window, ...]:
        """Number the windows that replay something; the children of the others move up."""
        number: list[int] = []
        windows: list[Window] = []
        for span, draft in zip(self.spans, self.drafts, strict=True):
            parent = number[span.parent] if span.parent != NO_WINDOW else NO_WINDOW
            if not draft.recipe.ops:
                number.append(parent)
                continue
            number.append(len(windows))
            windows.append(
                Window(
                    id=len(windows),
                    start=draft.start,
                    stop=draft.stop,
                    ops=draft.recipe.ops,
                    retain=draft.retain,
                    copies=draft.recipe.copies,
                    parent=parent,
                    path=span.path,
                )
            )
        return tuple(windows)


@dataclass(frozen=True, slots=True)
class _Available:
    """Storages that a replay at `start` may read by reference: held, or live then although no one of ours holds them."""

    builder: _Builder
    start: int

    def __contains__(self, item: object) -> bool:
        if not isinstance(item, int):
            return False
        s = self.builder.step.storages[item]
        if item in self.builder.held:
            return item not in self.builder.brief or s.death >= self.start
        return item not in self.builder.formal and s.birth != NO_OP and s.birth < self.start <= s.death


__all__ = ["Span", "build"]
