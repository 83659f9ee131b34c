from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import Phase, Step
from keepwise.plan.boundaries import crossings, find_blocks, narrow_points, stretches
from keepwise.plan.repeats import find_runs
from keepwise.plan.segments import common_path
from keepwise.plan.tables import tables_of
from tests.steps import accumulated, chain, gpt_like, in_place_stream, random_steps, read_twice, unet_like


def crossing_by_hand(step: Step, cut: int) -> set[int]:
    """Storages made before the cut that a forward op behind it reads or writes."""
    found = set()
    for op in step.ops[cut:]:
        if op.phase == Phase.FORWARD:
            touched = {step.values[v].storage for v in op.inputs} | set(op.writes)
            found |= {s for s in touched if step.storages[s].birth < cut}
    return {s for s in found if not (step.storages[s].birth < 0 and step.storages[s].category.is_static)}


@settings(max_examples=100, deadline=None)
@given(random_steps(), st.data())
def test_crossings_are_what_later_forward_ops_read(step: Step, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(step.ops) - 1), max_size=4))
    found = crossings(step, cuts)
    assert found.keys() == set(cuts)
    assert all(set(found[c]) == crossing_by_hand(step, c) for c in cuts)


@settings(max_examples=100, deadline=None)
@given(random_steps())
def test_narrow_points_state_the_bytes_that_cross(step: Step) -> None:
    for cut in narrow_points(step):
        assert cut.nbytes == sum(step.storages[s].nbytes for s in crossing_by_hand(step, cut.op))
        assert any(cut.op in run for run in tables_of(step).passes)


@settings(max_examples=150, deadline=None)
@given(random_steps(), st.data())
def test_every_read_lies_in_one_stretch_that_saved_it(step: Step, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, len(step.ops) - 1), max_size=5))
    parts = stretches(step, cuts)
    for a, b in pairwise(parts):
        assert a.last < b.first
    for r in tables_of(step).reads:
        [part] = [p for p in parts if p.first <= r.first <= p.last]
        assert r.last <= part.last
        assert part.start <= r.at <= part.stop


def test_a_transformer_is_cut_into_its_blocks() -> None:
    step = gpt_like(5)
    blocks = [b for b in find_blocks(step) if b.is_repeated]
    assert [common_path(step, b.start, b.stop) for b in blocks] == [f"h.{i}" for i in range(5)]
    assert [len(crossings(step, [b.start])[b.start]) for b in blocks] == [1] * 5


def test_blocks_do_not_depend_on_module_paths() -> None:
    step = gpt_like(4)
    nameless = msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, path="") for op in step.ops))
    assert find_blocks(nameless) == find_blocks(step)


@pytest.mark.parametrize("step", [chain(12), unet_like(3), in_place_stream(6), accumulated(3, 4), read_twice(5)])
def test_blocks_part_the_forward_passes(step: Step) -> None:
    blocks = find_blocks(step)
    forward = [op.index for op in step.ops if op.phase == Phase.FORWARD]
    assert [i for b in blocks for i in range(b.start, b.stop)] == forward


@pytest.mark.parametrize("step", [chain(12), gpt_like(4), unet_like(3), in_place_stream(6), accumulated(2, 4)])
def test_every_block_has_a_stretch_of_its_own(step: Step) -> None:
    blocks = find_blocks(step)
    parts = stretches(step, [b.start for b in blocks])
    # The first piece of a pass (an embedding, a copy) saves nothing.
    assert len(parts) >= len(blocks) - len(tables_of(step).passes)
    assert {p.start for p in parts} <= {b.start for b in blocks}


def test_two_passes_of_backward_have_their_own_stretches() -> None:
    step = read_twice(5)
    starts = [b.start for b in find_blocks(step)]
    parts = stretches(step, starts)
    assert len(parts) == 2 * len({p.start for p in parts})


def covered_by_hand(tokens: list[int]) -> int:
    """Most pieces that whole periods of one repetition cover, by trying everything."""
    best = 0
    n = len(tokens)
    for a in range(n):
        for b in range(a + 2, n + 1):
            for period in range(1, (b - a) // 2 + 1):
                if all(tokens[i] == tokens[i + period] for i in range(a, b - period)):
                    best = max(best, b - a)
    return best


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=14))
def test_runs_are_repetitions_and_the_first_found_is_nearly_the_longest(tokens: list[int]) -> None:
    runs = find_runs(tokens, [1] * len(tokens), [1] * (len(tokens) + 1))
    for first, period, count in runs:
        assert count >= 2
        block = tokens[first : first + period]
        assert tokens[first : first + period * count] == block * count
    spans = [set(range(first, first + period * count)) for first, period, count in runs]
    assert sum(len(s) for s in spans) == len(set().union(*spans))
    best = covered_by_hand(tokens)
    if best:
        longest = max(period * count + period - 1 for _, period, count in runs)
        assert longest >= 0.95 * best


def test_blocks_begin_where_least_crosses() -> None:
    tokens = [9, 0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 8]
    assert find_runs(tokens, [1] * 12, [5] * 13) == [(1, 3, 3)]
    widths = [5, 5, 1, 5, 5, 1, 5, 5, 1, 5, 5, 5, 5]
    assert find_runs(tokens, [1] * 12, widths) == [(2, 3, 3)]
