"""One step made ready for planning: stages, their menus, the chain's links. Independent of the budget, hence cached by step."""

from __future__ import annotations

from dataclasses import dataclass

from keepwise.ir import Step
from keepwise.plan.optimal.chain import Held, Link
from keepwise.plan.optimal.dominance import dominant
from keepwise.plan.optimal.enumerate import enumerate_menu, is_wide
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.menu import search_menu
from keepwise.plan.optimal.options import Option, StageProblem
from keepwise.plan.optimal.pieces import piece_menu
from keepwise.plan.optimal.relaxed import relaxed_bounds
from keepwise.plan.optimal.stages import Chain, cut_chains


@dataclass(kw_only=True, slots=True)
class Part:
    """One forward pass."""

    chain: Chain
    problems: tuple[StageProblem, ...]
    """One a stage."""
    kinds: tuple[int, ...]
    """Number of the distinct problem of each stage."""


@dataclass(kw_only=True, slots=True)
class Model:
    """Everything about a step that does not depend on the budget."""

    graph: Graph
    parts: tuple[Part, ...]
    menus: dict[int, list[Option]]
    """Kind -> options."""
    bounds: dict[int, list[Option]]
    """Kind -> optimistic options that no option of the family beats."""
    complete: bool
    """Whether every menu was enumerated."""

    @property
    def num_stages(self) -> int:
        """Stages of the longest pass."""
        return max((len(p.kinds) for p in self.parts), default=0)

    @property
    def forward_ops(self) -> int:
        """Ops of all passes."""
        return sum(len(stage.ops) for part in self.parts for stage in part.chain.stages)

    @property
    def forward_seconds(self) -> float:
        """Time of all passes."""
        return self.graph.seconds(o for part in self.parts for stage in part.chain.stages for o in stage.ops)

    def links(self, part: Part, menus: dict[int, list[Option]]) -> tuple[Link, ...]:
        """The chain of a pass for the dynamic program, with `menus` or `bounds`."""
        result: list[Link] = []
        fronts: dict[tuple[int, bytes], tuple[int, ...]] = {}
        aside: dict[int, tuple[int, int]] = {}
        for stage, problem, kind in zip(part.chain.stages, part.problems, part.kinds, strict=True):
            hand = problem.at_hand
            made = set(stage.outputs) - set(stage.inputs)
            ops = problem.recipe(made, hand)
            inputs = tuple(
                Held(storage=s, nbytes=problem.cost(s), held_until=self.graph.step.storages[s].held_until)
                for s in stage.inputs
            )
            if kind not in aside:
                aside[kind] = problem.aside_bytes(through=False), problem.aside_bytes(through=True)
            front = (kind, problem.front.tobytes())
            if front not in fronts:
                if menus is self.menus:
                    fronts[front] = tuple(problem.forward_peak(o.held) for o in menus[kind])
                else:  # an optimistic option stands for others, which may hold other storages
                    fronts[front] = (int(problem.front.max()),) * len(menus[kind])
            result.append(
                Link(
                    kind=kind,
                    options=tuple(menus[kind]),
                    forward_bytes=fronts[front],
                    inputs=inputs,
                    level=problem.level,
                    gap_bytes=problem.gap_bytes,
                    forward_level=problem.forward_level,
                    forward_high=int(problem.front.max()),
                    forward_stop=stage.forward_stop,
                    pass_seconds=float("inf") if ops is None else self.graph.seconds(ops),
                    pass_bytes=0 if not ops else self.graph.replay_peak(ops, hand, made),
                    start_bytes=int(problem.between[0]) if len(problem.between) else 0,
                    aside_bytes=aside[kind][0],
                    aside_bytes_through=aside[kind][1],
                )
            )
        return tuple(result)


def _menu(problem: StageProblem) -> tuple[list[Option], list[Option], bool]:
    """Options of a stage, optimistic ones, and whether they cover the whole family."""
    pieces = piece_menu(problem) if is_wide(problem) else None
    if pieces is not None:
        return dominant([*search_menu(problem, pairs=False), *pieces.options], limit=1200), pieces.bounds, True
    found = search_menu(problem)
    if not problem.stage.nodes:
        return found, found, True
    enumerated = enumerate_menu(problem, found)
    if enumerated is None:
        return found, relaxed_bounds(problem), False
    return dominant([*found, *enumerated.options]), enumerated.bounds, True


def build_model(step: Step, *, whole: bool = False) -> Model:
    """Cut (unless each pass is wanted as a `whole`), recognise equal stages, search the menus."""
    graph = Graph(step)
    kinds: dict[tuple[object, ...], int] = {}
    menus: dict[int, list[Option]] = {}
    bounds: dict[int, list[Option]] = {}
    complete = True
    parts: list[Part] = []
    for chain in cut_chains(graph, whole=whole):
        problems: list[StageProblem] = []
        numbers: list[int] = []
        for stage in chain.stages:
            problem = StageProblem(graph, stage, chain.held)
            kind = kinds.setdefault(stage.key, len(kinds))
            if kind not in menus:
                menus[kind], bounds[kind], enumerated = _menu(problem)
                complete &= enumerated
            problems.append(problem)
            numbers.append(kind)
        parts.append(Part(chain=chain, problems=tuple(problems), kinds=tuple(numbers)))
    return Model(graph=graph, parts=tuple(parts), menus=menus, bounds=bounds, complete=complete)
