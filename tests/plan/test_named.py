from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise._errors import UsageError
from keepwise.ir import Schedule, Step
from keepwise.plan import NAMES, Planner, get_planner
from keepwise.plan.build import Span, build
from keepwise.plan.droppable import droppable, formally_droppable
from keepwise.plan.named import is_heavy
from keepwise.plan.segments import blocks_and_rest
from keepwise.plan.tables import tables_of
from keepwise.simulate import ScheduleError, simulate
from tests.steps import StepBuilder, accumulated, chain, check_step, gpt_like, in_place_stream, random_steps, unet_like

PLANNERS = ["none", "full", "every:2", "every:3", "sqrt", "recursive", "selective", "recompute_everything"]


def planned(step: Step, name: str) -> Schedule:
    return get_planner(name).plan(step, None)


@settings(max_examples=80, deadline=None)
@given(random_steps(), st.sampled_from(PLANNERS))
def test_no_op_of_a_plan_is_for_nothing(step: Step, name: str) -> None:
    """Without any one op the judge refuses the plan, or something must be held longer in its place."""
    schedule = planned(step, name)
    before = simulate(step, schedule).live_bytes
    for i, window in enumerate(schedule.windows):
        for op in window.ops:
            less = msgspec.structs.replace(window, ops=tuple(x for x in window.ops if x != op))
            windows = (*schedule.windows[:i], less, *schedule.windows[i + 1 :])
            try:
                after = simulate(step, msgspec.structs.replace(schedule, windows=windows)).live_bytes
            except ScheduleError:
                continue
            assert (after > before).any()


@settings(max_examples=100, deadline=None)
@given(random_steps(), st.sampled_from(PLANNERS))
def test_what_is_held_is_saved_or_read_by_a_replay(step: Step, name: str) -> None:
    schedule = planned(step, name)
    for s in set(schedule.held) - formally_droppable(step):
        less = msgspec.structs.replace(schedule, held=tuple(x for x in schedule.held if x != s))
        with pytest.raises(ScheduleError):
            simulate(step, less)


@settings(max_examples=100, deadline=None)
@given(random_steps())
def test_the_stress_plan_drops_everything_that_has_a_recipe(step: Step) -> None:
    schedule = planned(step, "recompute_everything")
    read = {r.storage for r in tables_of(step).reads}
    inputs = {step.values[v].storage for w in schedule.windows for i in w.ops for v in step.ops[i].inputs}
    for s in set(schedule.held) & droppable(step) & read:
        # Held although it has a recipe: an op that cannot be replayed makes it, or a window replays from it, or it is made
        # after its window begins.
        opaque = not all(step.ops[i].replayable for i in _ancestors(step, s))
        assert opaque or s in inputs or _read_twice(step, s)


def _ancestors(step: Step, storage: int) -> set[int]:
    """Every op that may have had a part in a storage."""
    found: set[int] = set()
    storages = {storage}
    for op in reversed(step.ops):
        touched = {step.values[o].storage for o in op.outputs} | set(op.writes)
        if touched & storages:
            found.add(op.index)
            storages |= {step.values[v].storage for v in op.inputs}
    return found


def _read_twice(step: Step, storage: int) -> bool:
    return len(tables_of(step).reads_of[storage]) > 1


@pytest.mark.parametrize("step", [gpt_like(6), gpt_like(4, dropout=True), unet_like(3), accumulated(3, 4)])
def test_full_replays_each_op_at_most_once_and_no_result_that_nobody_reads(step: Step) -> None:
    schedule = planned(step, "full")
    count = Counter(i for w in schedule.windows for i in w.ops)
    assert count
    assert max(count.values()) == 1
    for w in schedule.windows:
        read = {step.values[v].storage for i in w.ops for v in step.ops[i].inputs} | set(w.retain)
        assert all(read & {step.values[o].storage for o in step.ops[i].outputs} for i in w.ops)


def test_full_keeps_the_inputs_of_blocks_and_leaves_the_last_block_alone() -> None:
    step = gpt_like(6)
    schedule = planned(step, "full")
    assert [w.path for w in schedule.windows][:5] == ["h.4", "h.3", "h.2", "h.1", "h.0"]
    last = {s.id for s in step.storages if s.birth >= 0 and step.ops[s.birth].path.startswith("h.5.")}
    assert last & formally_droppable(step) <= set(schedule.held)
    inner = {s.id for s in step.storages if s.birth >= 0 and step.ops[s.birth].path.startswith("h.2.")}
    assert not inner & set(schedule.held)
    targets = [step.ops[i].target for i in schedule.windows[0].ops]
    # The last product of a block makes the next block's input, which is kept.
    assert targets.count("aten.addmm.default") == 3


def test_full_has_the_peak_of_replaying_the_last_block_too() -> None:
    step = gpt_like(8, width=512, vocab=256)
    blocks, alone = blocks_and_rest(step)
    assert blocks[alone].is_repeated
    full = simulate(step, planned(step, "full"))
    floor = simulate(step, planned(step, "recompute_everything"))
    assert full.peak_bytes < 0.75 * simulate(step).peak_bytes
    assert floor.peak_bytes < full.peak_bytes


def test_a_large_loss_makes_the_last_block_worth_replaying() -> None:
    step = gpt_like(6, width=64, vocab=8000)
    blocks, alone = blocks_and_rest(step)
    assert not blocks[alone].is_repeated


def test_plans_trade_time_for_memory_in_order() -> None:
    step = gpt_like(9, width=64)
    found = {name: simulate(step, planned(step, name)) for name in PLANNERS}
    order = ["none", "every:3", "every:2", "full", "recursive"]
    peaks = [found[name].peak_bytes for name in order]
    seconds = [found[name].added_seconds for name in order]
    assert peaks == sorted(peaks, reverse=True)
    assert seconds == sorted(seconds)
    assert found["selective"].added_seconds < found["full"].added_seconds
    assert found["recompute_everything"].held_bytes == 0


def test_selective_replays_no_matrix_product() -> None:
    step = gpt_like(5)
    schedule = planned(step, "selective")
    assert schedule.windows
    assert not [i for w in schedule.windows for i in w.ops if is_heavy(step.ops[i].target)]
    assert is_heavy("aten.convolution.default")
    assert is_heavy("aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert not is_heavy("aten.add.Tensor")


@pytest.mark.parametrize("n", [8, 16, 32])
def test_recursion_on_a_chain_is_logarithmic_in_memory(n: int) -> None:
    step = chain(n)
    timeline = simulate(step, planned(step, "recursive"))
    levels = n.bit_length()
    # One input a level, the chain's input, two tensors of the backward and what the last level makes.
    assert timeline.peak_bytes <= levels + 5
    assert timeline.added_seconds <= n / 2 * levels


def test_recursion_nests() -> None:
    schedule = planned(chain(16), "recursive")
    depth = {-1: 0}
    for w in schedule.windows:
        depth[w.id] = depth[w.parent] + 1
    assert max(depth.values()) >= 3


def test_boundaries_named_by_their_paths_give_the_plan_of_full() -> None:
    step = gpt_like(6)
    named = planned(step, "boundaries:" + ",".join(f"h.{i}" for i in range(6)))
    assert named.windows == planned(step, "full").windows
    assert planned(step, "boundaries:h.*").windows == named.windows


def test_every_one_is_full_and_every_second_replays_half() -> None:
    step = gpt_like(9)
    assert planned(step, "every:1").windows == planned(step, "full").windows
    half = planned(step, "every:2")
    assert [w.path for w in half.windows] == ["h.6", "h.4", "h.2", "h.0"]


def test_an_in_place_stream_is_copied_at_the_blocks_not_recomputed_from_the_start() -> None:
    step = in_place_stream(6)
    schedule = planned(step, "full")
    assert max(Counter(i for w in schedule.windows for i in w.ops).values()) == 1
    assert any(w.copies for w in schedule.windows)


def test_names_and_errors() -> None:
    for name in ("none", "full", "sqrt", "recursive", "selective", "recompute_everything", "every:4"):
        assert isinstance(get_planner(name), Planner)
        assert planned(gpt_like(2), name).planner == name
    for wrong in ("fill", "every", "every:0", "every:x", "boundaries", "boundaries:", "full:2"):
        with pytest.raises(UsageError, match="no planner is called"):
            get_planner(wrong)
    with pytest.raises(UsageError, match=r"no module of the step has the path g\.1"):
        planned(gpt_like(2), "boundaries:h.0,g.1")
    assert len(NAMES) == 9


@pytest.mark.parametrize("name", PLANNERS)
def test_degenerate_steps(name: str) -> None:
    assert planned(Step(), name).windows == ()
    b = StepBuilder()
    step = check_step(b.build(b.one(b.input(4), size=4)))
    assert planned(step, name).windows == ()


def test_build_holds_what_no_span_covers_and_retains_on_request_only_what_is_read() -> None:
    step = chain(6)
    reads = tables_of(step).reads
    early = max(r.first for r in reads)
    schedule = build(step, held=(), spans=[Span(start=early, stop=early)])
    [window] = schedule.windows
    assert set(schedule.held) == formally_droppable(step) - set(window.retain)
    unread = step.storages[step.values[step.ops[3].outputs[0]].storage].id
    outer = Span(start=reads[0].first, stop=reads[-1].last, retain=(unread,))
    inner = [Span(start=r.first, stop=r.last, parent=0) for r in reads]
    nested = build(step, held=(), spans=[outer, *inner])
    simulate(step, nested)
    assert nested.windows[0].retain == (unread,)
    assert {w.parent for w in nested.windows[1:]} == {0}
