"""Local search beyond the family: from plans that are known, one change at a time, as long as the judge finds it better.

A plan is what is held, and a tree of spans over the nodes that read (`build` makes a legal schedule of any). Changes: one storage more or
less is held, be it saved or not; one is held until autograd has read it and made again for later replays, instead of being held for
them; neighbours are joined, or one is divided; a span is divided inside an outer one that retains a storage for both halves, or
retains one more or less, or is dissolved. Each start climbs to where no change helps, within a number of schedules that are judged;
the smallest peak of a short step is sought from a plan that holds nothing, too. It proves nothing, and finds what the stages' family
leaves out: a tensor that nobody saves held for a replay, windows that begin at an earlier stage's inputs, graphs that are read twice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from keepwise.ir import NO_OP, Phase, Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.build import Span, build
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.optimal.stages import nodes_of

MAX_OPS = 400
"""Steps with more ops are not searched."""

MAX_JUDGED = 150
"""Schedules that are judged in one search at most: two an op, and `MAX_JUDGED_OPS` ops of all of them."""

MAX_JUDGED_OPS = 15_000

FEW_NODES = 8
"""Steps with as many reading nodes at most are searched from a plan that holds nothing, too: on others its climb does not end in time,
and what it finds by then takes several times as long as the step."""

TINY = 1e-9

Value = tuple[float, float, float]
"""Excess bytes, seconds, bytes: the least is the best."""

Judge = Callable[[Schedule], tuple[int, float] | None]
"""Peak bytes and added seconds of a schedule; None if it is refused."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A span over consecutive reading nodes."""

    first: int
    last: int
    retain: frozenset[int] = frozenset()
    parts: tuple[_Part, ...] = ()


@dataclass(frozen=True, slots=True)
class _State:
    held: frozenset[int]
    parts: tuple[_Part, ...]
    brief: frozenset[int] = frozenset()
    """Those of `held` that replays after autograd's last read make again."""


class LocalSearch:
    """Improves plans of one step.

    Args:
        step: the step.
        judge: prices a schedule, and remembers it.
    """

    def __init__(self, step: Step, judge: Judge) -> None:
        self.step = step
        self.judge = judge
        self.formal = formally_droppable(step)
        reads = ((step.values[save.value].storage, read.first, read.last) for save in step.saves for read in save.reads)
        self.nodes = [(n.first, n.last) for n in nodes_of(r for r in reads if r[0] in self.formal)]
        """First and last moments of what reads a droppable storage."""
        self.choices = sorted(
            {
                s.id
                for s in step.storages
                if s.birth != NO_OP
                and step.ops[s.birth].phase is Phase.FORWARD
                and not s.category.is_static
                and s.nbytes
            }
        )
        self.seen: set[_State] = set()

    def run(self, starts: list[Schedule], budget_bytes: int | None) -> None:
        """Climb from each start: to the least time within the budget, or to the smallest peak.

        Args:
            starts: schedules to begin with, the most promising first.
            budget_bytes: the budget; None for the smallest peak.
        """
        if not self.nodes or len(self.step.ops) > MAX_OPS:
            return
        left = min(2 * len(self.step.ops), MAX_JUDGED, MAX_JUDGED_OPS // len(self.step.ops))
        states = [self._state(schedule) for schedule in starts]
        if budget_bytes is None and len(self.nodes) <= FEW_NODES:  # a small peak may be far from all that is known
            states.append(_State(frozenset(), tuple(_Part(n, n) for n in range(len(self.nodes)))))
        for number, state in enumerate(states):
            share = left // (len(states) - number)
            left -= share - self._climb(state, budget_bytes, share)

    def _climb(self, state: _State, budget_bytes: int | None, most: int) -> int:
        """What is left of the number of schedules to judge."""
        rng = random.Random(len(self.step.ops))
        value = self._value(state, budget_bytes)
        left = most - 1
        better = True
        while better and left > 0:
            better = False
            changed = list(self._changes(state))
            rng.shuffle(changed)
            for other in changed:
                if left <= 0:
                    break
                if other in self.seen:
                    continue
                left -= 1
                found = self._value(other, budget_bytes)
                if found < value:
                    state, value, better = other, found, True
                    break
        return max(left, 0)

    def _value(self, state: _State, budget_bytes: int | None) -> Value:
        self.seen.add(state)
        spans: list[Span] = []
        self._spans(state.parts, NO_WINDOW, spans)
        found = self.judge(build(self.step, held=state.held, brief=state.brief, spans=spans, planner="local search"))
        if found is None:
            return (float("inf"), 0.0, 0.0)
        peak, seconds = found
        if budget_bytes is None:
            return (peak, round(seconds, 9), 0.0)
        return (max(peak - budget_bytes, 0), round(seconds, 9), peak)

    def _spans(self, parts: tuple[_Part, ...], parent: int, spans: list[Span]) -> None:
        for part in parts:
            number = len(spans)
            spans.append(
                Span(
                    start=self.nodes[part.first][0],
                    stop=self.nodes[part.last][1],
                    parent=parent,
                    retain=tuple(sorted(part.retain)),
                )
            )
            self._spans(part.parts, number, spans)

    # From schedules to states.

    def _state(self, schedule: Schedule) -> _State:
        children: dict[int, list[int]] = {}
        for window in schedule.windows:
            children.setdefault(window.parent, []).append(window.id)

        def parts(parent: int, first: int, last: int) -> tuple[_Part, ...]:
            found: list[_Part] = []
            at = first
            for i in sorted(children.get(parent, ()), key=lambda i: (schedule.windows[i].start, i)):
                window = schedule.windows[i]
                inside = [n for n in range(at, last + 1) if window.start <= self.nodes[n][0] <= window.stop]
                if not inside:
                    continue
                found += [_Part(n, n) for n in range(at, inside[0])]
                inner = parts(i, inside[0], inside[-1]) if i in children else ()
                retain = frozenset(window.retain) if inner else frozenset[int]()
                found.append(_Part(inside[0], inside[-1], retain, inner))
                at = inside[-1] + 1
            return (*found, *(_Part(n, n) for n in range(at, last + 1)))

        return _State(frozenset(schedule.held), parts(NO_WINDOW, 0, len(self.nodes) - 1))

    # Changes.

    def _changes(self, state: _State) -> Iterator[_State]:
        for s in self.choices:
            yield replace(state, held=state.held ^ {s}, brief=state.brief - {s})
        for s in sorted(self.formal - state.brief):
            yield replace(state, held=state.held | {s}, brief=state.brief | {s})
        for parts in self._rearranged(state.parts):
            yield replace(state, parts=parts)

    def _rearranged(self, parts: tuple[_Part, ...]) -> Iterator[tuple[_Part, ...]]:
        for i, part in enumerate(parts):
            before, after = parts[:i], parts[i + 1 :]
            if after:
                yield (*before, _joined(part, after[0]), *after[1:])
            if part.parts:
                yield (*before, *part.parts, *after)
                yield (*before, _Part(part.first, part.last), *after)
                for s in self.choices:
                    yield (*before, replace(part, retain=part.retain ^ {s}), *after)
                for inner in self._rearranged(part.parts):
                    yield (*before, replace(part, parts=inner), *after)
                continue
            for n in range(part.first + 1, part.last + 1):
                halves = (_Part(part.first, n - 1), _Part(n, part.last))
                yield (*before, *halves, *after)
                for s in self.choices:
                    yield (*before, _Part(part.first, part.last, frozenset({s}), halves), *after)


def _joined(a: _Part, b: _Part) -> _Part:
    if not a.parts and not b.parts:
        return _Part(a.first, b.last)
    return _Part(a.first, b.last, a.retain | b.retain, (*(a.parts or (a,)), *(b.parts or (b,))))
