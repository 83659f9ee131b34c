"""Stages that are too wide to be enumerated: the menu joined from their pieces."""

from __future__ import annotations

import random

import pytest

from keepwise.ir import Step
from keepwise.plan.optimal import Status, plan_floor, plan_optimal
from keepwise.plan.optimal.enumerate import Enumerated, is_wide
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.options import Option, Partition, StageProblem
from keepwise.plan.optimal.pieces import piece_menu, split_stage
from keepwise.plan.optimal.stages import cut_chains
from keepwise.simulate import simulate
from tests.steps import moe_like


def wide_stage(step: Step) -> StageProblem:
    graph = Graph(step)
    (found,) = cut_chains(graph)
    stage = max(found.stages, key=lambda s: len(s.own))
    return StageProblem(graph, stage, found.held)


@pytest.fixture(scope="module")
def problem() -> StageProblem:
    return wide_stage(moe_like(2, 4, width=4096))


@pytest.fixture(scope="module")
def menu(problem: StageProblem) -> Enumerated:
    found = piece_menu(problem)
    assert found is not None
    return found


def test_experts_are_pieces_and_share_what_they_read(problem: StageProblem) -> None:
    assert is_wide(problem)
    shared, pieces = split_stage(problem)
    assert len(pieces) >= 3
    assert 1 <= len(shared) <= 3
    owns = [own for _, own in pieces]
    assert not any(a & b for i, a in enumerate(owns) for b in owns[:i])
    ends = [nodes for nodes, _ in pieces]
    assert [a for a, _ in ends] == [0, *(b + 1 for _, b in ends[:-1])]


def test_options_are_what_they_cost(problem: StageProblem, menu: Enumerated) -> None:
    assert len(menu.options) > 50
    for option in menu.options:
        choice = option.choice
        assert choice is not None
        again = problem.evaluate(choice.held, choice.outer, choice.partition, choice.lasting, choice.again)
        assert again == option


def random_member(problem: StageProblem, rng: random.Random) -> Option | None:
    """Any option of the family: what is held, shared storages made by the first replay, windows within the pieces."""
    shared, pieces = split_stage(problem)
    density = rng.random()
    held = frozenset(p for p in problem.own if rng.random() < density)
    at = [problem.position[s] for s in shared]
    outer = frozenset(p for p in at if p not in held and rng.random() < 0.5)
    partition: list[tuple[int, int]] = []
    again: dict[int, frozenset[int]] = {}
    for (a, b), own in pieces:
        mine = frozenset(problem.position[s] for s in own) - held
        more = frozenset(p for p in mine if rng.random() < 0.2)
        if more:
            again[len(partition)] = more
        cuts = [a, *(n for n in range(a + 1, b + 1) if rng.random() < 0.4), b + 1]
        partition += [(cuts[i], cuts[i + 1] - 1) for i in range(len(cuts) - 1)]
    windows: Partition = tuple(partition)
    return problem.evaluate(held, outer, windows, {}, again)


def test_no_option_of_the_family_beats_the_bound(problem: StageProblem, menu: Enumerated) -> None:
    rng = random.Random(3)
    options = [o for _ in range(600) if (o := random_member(problem, rng)) is not None]
    assert len(options) > 300
    for option in (*options, *menu.options):
        assert any(
            (option.held or not b.held)
            and b.seconds <= option.seconds + 1e-9
            and b.held_bytes <= option.held_bytes
            and b.peak_bytes <= option.peak_bytes
            for b in menu.bounds
        ), option.choice


@pytest.mark.parametrize("experts", [4, 6])
def test_plans_are_near_the_bound(experts: int) -> None:
    step = moe_like(3, experts, width=4096)
    floor = plan_floor(step)
    span = floor.plain_peak_bytes - floor.floor_bytes
    last = float("inf")
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        budget = floor.floor_bytes + int(share * span)
        result = plan_optimal(step, budget, time_limit=60.0)
        assert result.status is not Status.INFEASIBLE
        assert simulate(step, result.schedule).peak_bytes <= budget
        assert result.added_seconds <= last + 1e-9
        assert result.gap <= 0.05
        last = result.added_seconds


def test_what_cannot_be_cut_is_left_alone() -> None:
    assert piece_menu(wide_stage(moe_like(2, 1, width=4096))) is None
