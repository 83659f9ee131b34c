"""Nested windows: recursive checkpointing.

Chen, Xu, Zhang and Guestrin (2016), "Training deep nets with sublinear memory cost", section 4.4: halve the chain, keep the
middle, recurse on both halves. Each level replays half of its blocks once more, so that n blocks cost about (n / 2) log2 n extra
block passes with log2 n inputs alive. Optimal neither in time nor in memory (that is Griewank and Walther's binomial schedule);
it is here because it needs no budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from keepwise.ir import Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan.boundaries import Stretch, crossings, stretches
from keepwise.plan.build import Span, build
from keepwise.plan.segments import Group, common_path, is_replayed, read_within, span_of


def plan_recursive(step: Step, groups: Sequence[Group], *, planner: str, why: str = "") -> Schedule:
    """Nested windows over groups; the groups that are not replayed stay as in the plain step."""
    parts = stretches(step, [g.start for g in groups])
    search = _Recursion(step, groups, crossings(step, {p.start for p in parts}))
    for chain in _chains(parts):
        search.outermost(chain)
    return build(step, held=search.held, spans=search.spans, planner=planner, why=why)


def _chains(parts: Sequence[Stretch]) -> list[list[Stretch]]:
    """Stretches of one backward pass each, in forward order."""
    chains: list[list[Stretch]] = []
    for part in parts:
        if chains and part.start < chains[-1][-1].start:
            chains[-1].append(part)
        else:
            chains.append([part])
    return [chain[::-1] for chain in chains]


class _Recursion:
    def __init__(self, step: Step, groups: Sequence[Group], crossing: dict[int, tuple[int, ...]]) -> None:
        self.step = step
        self.groups = groups
        self.crossing = crossing
        self.held: set[int] = set()
        self.spans: list[Span] = []

    def outermost(self, chain: Sequence[Stretch]) -> None:
        """Along the end of the chain the middles are held from forward: backward begins there."""
        self.held.update(self.crossing[chain[0].start])
        while len(chain) > 1:
            middle = len(chain) // 2
            self.held.update(self.crossing[chain[middle].start])
            self.inner(chain[:middle], NO_WINDOW)
            chain = chain[middle:]
        if is_replayed(self.groups, chain[0]):
            self.spans.append(span_of(self.step, chain[0]))
        else:
            self.held.update(read_within(self.step, chain[0]))

    def inner(self, chain: Sequence[Stretch], parent: int) -> None:
        """A window over `chain`, whose inputs are there, that makes its middle, and the windows inside it."""
        if len(chain) == 1:
            self.spans.append(span_of(self.step, chain[0], parent=parent))
            return
        middle = len(chain) // 2
        number = len(self.spans)
        self.spans.append(
            Span(
                start=chain[-1].first,
                stop=chain[0].last,
                parent=parent,
                retain=self.crossing[chain[middle].start],
                copy_before=chain[0].start,
                path=common_path(self.step, chain[0].start, chain[-1].stop),
            )
        )
        self.inner(chain[middle:], number)
        self.inner(chain[:middle], number)
