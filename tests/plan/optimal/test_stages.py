"""Cuts, passes and prices of the optimal planner against what is known of the synthetic families."""

from __future__ import annotations

import pytest

from keepwise.ir import Step
from keepwise.plan.optimal.assemble import assemble
from keepwise.plan.optimal.chain import Pass, StageEntry
from keepwise.plan.optimal.enumerate import enumerate_menu
from keepwise.plan.optimal.graph import Graph
from keepwise.plan.optimal.menu import search_menu
from keepwise.plan.optimal.model import build_model
from keepwise.plan.optimal.options import StageProblem
from keepwise.plan.optimal.stages import cut_chains
from keepwise.plan.optimal.workbench import workbench
from keepwise.simulate import simulate
from tests.steps import StepBuilder, chain, check_step, gpt_like, unet_like


def test_equal_blocks_are_one_problem() -> None:
    for blocks in (5, 9):
        model = build_model(gpt_like(blocks))
        (part,) = model.parts
        sizes = [part.kinds.count(k) for k in set(part.kinds)]
        assert max(sizes) >= blocks - 2
        assert len(model.menus) <= 6


def test_a_stage_is_a_block_by_structure_not_by_name() -> None:
    (part,) = build_model(gpt_like(4)).parts
    inner = [s for s in part.chain.stages if s.path.startswith("h.")]
    assert len(inner) >= 3
    for stage in inner[1:]:
        assert len(stage.inputs) == 1


def test_long_skips_cross_the_cuts() -> None:
    graph = Graph(unet_like(3))
    (found,) = cut_chains(graph)
    assert len(found.stages) > 3
    assert max(len(s.inputs) for s in found.stages) > 1


def test_micro_batches_are_passes_of_their_own() -> None:
    step = gpt_like(2)
    assert len(Graph(step).passes) == 1
    b = StepBuilder()
    w = b.parameter(4)
    losses = []
    for _ in range(2):
        x = b.one(b.input(8), w, size=8, save=[w])
        x = b.one(x, size=8, save=[x])
        losses.append(b.one(x, size=4, save=[x]))
    joint = check_step(b.build(losses[-1]))
    assert len(Graph(joint).passes) >= 1
    for forward in Graph(joint).passes:
        assert len({joint.ops[o].phase for o in forward}) == 1


@pytest.mark.parametrize("step", [gpt_like(3), gpt_like(3, dropout=True), chain(6), unet_like(2)])
def test_an_options_price_is_what_the_judge_finds(step: Step) -> None:
    """Everything held elsewhere: the seconds of the whole step are those of the option, and its peak is not exceeded."""
    model = build_model(step)
    (part,) = model.parts
    plain = [next(o for o in model.menus[k] if o.seconds == 0 and not o.windows) for k in part.kinds]
    links = model.links(part, model.menus)
    for i, kind in enumerate(part.kinds):
        before = sum(links[j].input_bytes + plain[j].held_bytes for j in range(i))
        for option in model.menus[kind][:25]:
            entries = [StageEntry(stage=j, option=option if j == i else plain[j]) for j in range(len(part.kinds))]
            timeline = simulate(step, assemble(model, [Pass(entries=tuple(entries))]))
            assert timeline.added_seconds == pytest.approx(option.seconds)
            stage = part.chain.stages[i]
            if stage.nodes and not any(len(s.inputs) > 1 for s in part.chain.stages):
                high = int(timeline.high_water[stage.first : stage.last + 1].max())
                assert high <= before + links[i].level + option.peak_bytes


def test_the_enumerated_bound_is_below_every_option_of_the_stage() -> None:
    graph = Graph(gpt_like(3))
    (found,) = cut_chains(graph)
    stage = max(found.stages, key=lambda s: len(s.own))
    problem = StageProblem(graph, stage, found.held)
    searched = search_menu(problem)
    enumerated = enumerate_menu(problem, searched)
    assert enumerated is not None
    assert len(enumerated.options) > len(searched)
    for option in (*searched, *enumerated.options):
        assert any(
            b.seconds <= option.seconds + 1e-9
            and b.held_bytes <= option.held_bytes
            and b.peak_bytes <= option.peak_bytes
            for b in enumerated.bounds
        )


def test_the_tables_predict_the_judge() -> None:
    step = gpt_like(5)
    bench = workbench(step)
    bench.prepare()
    view = bench.views[0]
    low, high = bench.floor().peak_bytes, bench.plain.peak_bytes
    for i in range(9):
        budget = low + (high - low) * i // 8
        found = bench.try_chain(view, view.upper, budget)
        if found is None:
            continue
        assert found.peak_bytes <= budget
        assert found.added_seconds == pytest.approx(view.upper.seconds(budget))
