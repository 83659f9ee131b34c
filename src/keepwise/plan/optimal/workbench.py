"""What planning one step leaves for the next budget: its views, and every plan that the judge accepted.

A *view* is one way to cut the step into stages, with its menus and tables. There is one at the narrow points; a small pass also has
one without cuts, in which windows may begin from any leaf. The bound is the smallest of the views'.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from keepwise.ir import Schedule, Step
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.named import boundary_names, get_planner
from keepwise.plan.optimal.assemble import assemble
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.improve import MAX_OPS, LocalSearch
from keepwise.plan.optimal.model import Model, build_model
from keepwise.plan.optimal.programs import Programs
from keepwise.simulate import ScheduleError, Timeline, simulate

_KEY = "_optimal_workbench"

TINY = 1e-9
"""Seconds that count as none."""

NAMED = ("full", *(f"every:{k}" for k in range(2, 9)), "sqrt", "recursive", "selective", "recompute_everything")
"""Planners whose schedules are candidates at every budget."""

MAX_BOUNDARY_OPS = 5000
"""Up to as many ops, boundaries at modules are tried too: `NUM_BOUNDARIES` kinds of modules and as many single ones."""

NUM_BOUNDARIES = 16

MAX_NAMED_OPS = 40_000
"""Above as many ops they are not tried: they take longer than the program that beats them."""

LONG_CHAIN = 64
"""Stages from which on grains are coarse."""

MAX_FLOOR_OPS = 300_000
"""The smallest peak of very long chains is sought among plans that replay about as many ops, or 4 forward passes."""

NUM_FLOORS = 12
"""Budgets at which the smallest peak of several micro-batches in flight is sought."""

MAX_WHOLE_STORAGES = 8
"""Passes that save at most as many storages are also planned without cuts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A plan that the judge accepted."""

    schedule: Schedule
    peak_bytes: int
    added_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A model with its tables."""

    model: Model
    upper: Programs
    """The menus with bytes rounded up: its plans fit, as far as the chain knows."""
    near: Programs
    """The menus with bytes rounded down: its plans may be a little over."""
    lower: Programs
    """The bounds with bytes rounded down."""
    high: int
    """Largest budget that it is about, in bytes."""
    build_seconds: float
    """Wall time that its tables took."""


@dataclass(kw_only=True, slots=True)
class Workbench:
    """Everything that is known about a step."""

    step: Step
    plain: Timeline
    views: tuple[View, ...] = ()
    candidates: list[Candidate] = field(default_factory=list)
    """No one beaten by another in peak and time, by rising peak."""
    _tried: set[tuple[Programs, int]] = field(default_factory=set)
    _closer: dict[tuple[int, int], View] = field(default_factory=dict)
    """(position of a view, halvings of its range) -> the same view of the lower part of the range, in finer grains."""
    _bounds: dict[int, float] = field(default_factory=dict)
    """Budget -> bound that is not read off the tables: for micro-batches in flight, and that over all schedules."""
    _searched: bool = False
    _local: LocalSearch | None = None
    _climbed: set[int | None] = field(default_factory=set)
    """Budgets for which the local search was made (None: the smallest peak)."""
    refused: int = 0
    """Schedules that the judge did not accept: none, unless the planner has a bug or a caller offers one."""

    def prepare(self) -> None:
        """Try the named planners and build the views, once. What was tried before an interruption is kept."""
        if self.views:
            return
        if len(self.step.ops) <= MAX_NAMED_OPS:
            few = len(self.step.ops) <= MAX_BOUNDARY_OPS
            for name in (*NAMED, *(boundary_names(self.step, NUM_BOUNDARIES) if few else ())):
                self.offer(get_planner(name).plan(self.step, None))
        model = build_model(self.step)
        high = self.plain.peak_bytes - self.plain.others_bytes
        views = [_view(model, high)]
        if model.num_stages > 1 and _is_small(model.graph):
            views.append(_view(build_model(self.step, whole=True), high))
        self.views = tuple(views)

    def offer(self, schedule: Schedule) -> Candidate | None:
        """Let the judge see a schedule; None if it is refused."""
        try:
            timeline = simulate(self.step, schedule)
        except ScheduleError:
            self.refused += 1
            return None
        found = Candidate(schedule=schedule, peak_bytes=timeline.peak_bytes, added_seconds=timeline.added_seconds)
        if not any(
            c.peak_bytes <= found.peak_bytes and c.added_seconds <= found.added_seconds + TINY for c in self.candidates
        ):
            self.candidates = [
                c
                for c in self.candidates
                if c.peak_bytes < found.peak_bytes or c.added_seconds < found.added_seconds - TINY
            ]
            self.candidates.append(found)
            self.candidates.sort(key=lambda c: c.peak_bytes)
        return found

    def best(self, budget_bytes: int) -> Candidate | None:
        """Least added time that fits, then least peak."""
        fitting = [c for c in self.candidates if c.peak_bytes <= budget_bytes]
        return min(fitting, key=lambda c: (c.added_seconds, c.peak_bytes), default=None)

    def try_chain(self, view: View, program: Programs, budget_bytes: int) -> Candidate | None:
        """Plan by a view's chain, judged."""
        roots = program.plan(budget_bytes)
        return None if roots is None else self.offer(assemble(view.model, roots))

    def bound(self, budget_bytes: int) -> float:
        """Least added seconds at a budget that any view admits; infinite where none admits a plan, 0 without views."""
        # More budget never takes more time.
        proved = max((found for at, found in self._bounds.items() if at >= budget_bytes), default=0.0)
        if self.step.in_flight > 1:
            return proved
        least = [view.lower.seconds(budget_bytes) for view in self.views]
        for (number, _), view in self._closer.items():
            if budget_bytes <= view.high:
                least[number] = max(least[number], view.lower.seconds(budget_bytes))
        return max(min(least, default=0.0), proved)

    def note_bound(self, budget_bytes: int, seconds: float) -> None:
        """Remember a bound that was proved for a budget."""
        self._bounds[budget_bytes] = max(seconds, self._bounds.get(budget_bytes, 0.0))

    def closer(self, number: int, budget_bytes: int, seconds: float) -> View | None:
        """A view's tables for budgets from the smallest to about this one, in finer grains.

        Args:
            number: position of the view.
            budget_bytes: the budget.
            seconds: wall time that there is for it.

        Returns:
            None where the grains would be no finer, or there is not the time.
        """
        view = self.views[number]
        low, span = view.lower.low, view.high - view.lower.low
        wanted = budget_bytes - low + 16 * view.upper.grain
        halvings = (max(span // max(wanted, 1), 1)).bit_length() - 1
        if halvings < 1:
            return None
        if (number, halvings) not in self._closer:
            if view.build_seconds > seconds:
                return None
            self._closer[number, halvings] = _view(view.model, low + (span >> halvings))
        found = self._closer[number, halvings]
        return found if found.upper.grain < view.upper.grain else None

    def climb(self, budget_bytes: int | None) -> bool:
        """Local search from the plans nearest to a budget, or to the smallest peak where it is None; whether it was made now."""
        if budget_bytes in self._climbed or len(self.step.ops) > MAX_OPS:
            return False
        self._climbed.add(budget_bytes)
        if self._local is None:
            self._local = LocalSearch(self.step, self._judged)
        fitting = [c for c in self.candidates if budget_bytes is None or c.peak_bytes <= budget_bytes]
        over = [c for c in self.candidates if budget_bytes is not None and c.peak_bytes > budget_bytes]
        starts = fitting[:2] if budget_bytes is None else [*reversed(fitting[-2:]), *over[:2]]
        self._local.run([c.schedule for c in starts], budget_bytes)
        return True

    def _judged(self, schedule: Schedule) -> tuple[int, float] | None:
        found = self.offer(schedule)
        return None if found is None else (found.peak_bytes, found.added_seconds)

    @property
    def passes_are_one(self) -> bool:
        """Whether the step has one forward pass."""
        return all(len(view.model.parts) == 1 for view in self.views)

    def _offer_small(self, view: View) -> None:
        """Plans that leave little behind: the smallest peak of several micro-batches in flight is sought among them."""
        low = view.upper.smallest()
        for i in range(NUM_FLOORS if low is not None else 0):
            roots = view.upper.plan((low or 0) + int((view.high - (low or 0)) * (i / NUM_FLOORS) ** 3))
            if roots is not None:
                self.offer(assemble(view.model, roots))

    def floor(self) -> Candidate:
        """The plan with the smallest peak that is known."""
        if self.step.in_flight > 1 and not self._searched:
            self._searched = True
            for view in self.views:
                self._offer_small(view)
        for view in self.views:
            most = view.model.forward_seconds * max(4.0, MAX_FLOOR_OPS / max(view.model.forward_ops, 1))
            for program in (view.upper, view.near):
                smallest = program.smallest(most)
                if (
                    smallest is not None
                    and smallest < self.candidates[0].peak_bytes
                    and (program, smallest) not in self._tried
                ):
                    self._tried.add((program, smallest))
                    self.try_chain(view, program, smallest)
        self.climb(None)
        return self.candidates[0]


def workbench(step: Step) -> Workbench:
    """The workbench of a step, made at the first call and kept with the step; `prepare` it before asking for plans."""
    table: dict[str, Any] = vars(step)
    if _KEY not in table:
        bench = Workbench(step=step, plain=simulate(step))
        held = tuple(sorted(formally_droppable(step)))
        bench.offer(Schedule(held=held, planner="optimal", why="everything fits"))
        table[_KEY] = bench
    return table[_KEY]


def _view(model: Model, high: int) -> View:
    began = time.perf_counter()
    grain = _grain(model, high)
    near = Programs(model, model.menus, high=high, grain=grain, rounding="down")
    # In a long chain, rounding up adds up to more than it saves the judge.
    long = model.num_stages >= LONG_CHAIN
    upper = near if long else Programs(model, model.menus, high=high, grain=grain, rounding="up")
    lower = Programs(model, model.bounds, high=high, grain=grain, rounding="down")
    seconds = time.perf_counter() - began
    return View(model=model, upper=upper, near=near, lower=lower, high=high, build_seconds=seconds)


def _grain(model: Model, high: int) -> int:
    """Bytes of a grain: finer for short chains (the tables cost grains times stages squared).

    Sizes in a step are multiples of a power of two, so that such a grain rounds little; in a long chain it is a part of the most
    common stage input, which other sizes are multiples of.
    """
    levels = [problem.level for part in model.parts for problem in part.problems]
    span = max(high - min(levels, default=0), 1)
    stages = max(model.num_stages, 1)
    finest = max(1, span // max(2000, min(30_000, 1_200_000 // stages)))
    if stages < LONG_CHAIN:
        return 1 << (finest.bit_length() - 1)
    inputs = [sum(p.cost(s) for s in p.inputs) for part in model.parts for p in part.problems]
    unit = max(set(inputs), key=lambda n: (inputs.count(n), n))
    return max(1, unit // max(1, unit // finest)) if unit else finest


def _is_small(graph: Graph) -> bool:
    """Whether every pass can be planned without cuts."""
    for forward in graph.passes:
        saved = sum(1 for op in forward for s in graph.made_by[op] if s in graph.droppable and graph.reads[s])
        if saved > MAX_WHOLE_STORAGES:
            return False
    return True
