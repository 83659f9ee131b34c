from __future__ import annotations

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from keepwise.ir import Schedule, Step, Window
from keepwise.plan.droppable import droppable, formally_droppable, keep_reasons
from keepwise.plan.recipes import NoRecipe, Recipe, find_recipe
from keepwise.plan.tables import tables_of
from keepwise.simulate import ScheduleError, simulate
from tests.steps import StepBuilder, check_step, gpt_like, random_steps, unet_like


def serves(step: Step, storage: int, ops: tuple[int, ...], copies: tuple[int, ...], held: frozenset[int]) -> bool:
    """Whether the judge accepts one window with these ops for all reads of one dropped storage."""
    reads = tables_of(step).reads_of[storage]
    window = Window(id=0, start=reads[0].first, stop=reads[-1].last, ops=ops, retain=(storage,), copies=copies)
    others = formally_droppable(step) - {storage}
    try:
        simulate(step, Schedule(held=tuple(sorted(others | held)), windows=(window,)))
    except ScheduleError:
        return False
    return True


@settings(max_examples=80, deadline=None)
@given(random_steps(max_ops=7), st.data())
def test_a_recipe_is_accepted_and_is_the_smallest(step: Step, data: st.DataObject) -> None:
    targets = [s for s in sorted(droppable(step)) if tables_of(step).reads_of.get(s)]
    assume(targets)
    target = data.draw(st.sampled_from(targets))
    reads = tables_of(step).reads_of[target]
    start = reads[0].first
    others = frozenset(s.id for s in step.storages if s.birth < start and s.id != target)
    held = frozenset(s for s in others if data.draw(st.booleans())) | (formally_droppable(step) - {target})
    recipe = find_recipe(step, values={r.value for r in reads}, available=held, start=start)
    assume(recipe and len(recipe.ops) <= 6)
    assert isinstance(recipe, Recipe)
    assert serves(step, target, recipe.ops, recipe.copies, held)
    for size in range(len(recipe.ops)):
        for ops in itertools.combinations(recipe.ops, size):
            needed = {v for i in ops for v in step.ops[i].inputs}
            copies = tuple(c for c in recipe.copies if c in needed)
            assert not serves(step, target, ops, copies, held)


@settings(max_examples=80, deadline=None)
@given(random_steps())
def test_holding_the_obstacles_makes_a_recipe_possible(step: Step) -> None:
    for target in sorted(formally_droppable(step)):
        reads = tables_of(step).reads_of.get(target)
        if not reads:
            continue
        values = {r.value for r in reads}
        recipe = find_recipe(step, values=values, start=reads[0].first)
        if not isinstance(recipe, NoRecipe):
            continue
        hold = {o.storage for o in recipe.obstacles}
        assert str(recipe)
        if target not in hold:
            assert find_recipe(step, values=values, available=hold, start=reads[0].first)


def test_a_value_that_is_overwritten_later_is_copied_for_a_leaf_and_made_again_for_others() -> None:
    b = StepBuilder()
    x = b.input(4)
    early = b.one(x, size=4, save_outputs=(0,), target="aten.sigmoid.default")
    b.write(x, early, target="aten.mul_.Tensor")
    y = b.one(x, size=4)
    first_y = b.one(y, size=4, save_outputs=(0,), target="aten.tanh.default")
    b.write(y, first_y)
    step = check_step(b.build(b.one(y, first_y, early, size=4)))
    [sigmoid, tanh] = [next(r for r in tables_of(step).reads if r.storage == t.storage) for t in (early, first_y)]
    recipe = find_recipe(step, values=[sigmoid.value], start=sigmoid.first)
    assert recipe == Recipe(ops=(0,), copies=(x.view,), seconds=1.0)
    # y is overwritten after tanh: its first version is computed once more, whether y is held or not.
    for available in (frozenset(), frozenset({y.storage})):
        recipe = find_recipe(step, values=[tanh.value], available=available, start=tanh.first)
        assert isinstance(recipe, Recipe)
        assert recipe.ops == (2, 3)
    copied = find_recipe(step, values=[tanh.value], available=frozenset({y.storage}), start=tanh.first, copy_before=3)
    assert isinstance(copied, Recipe)
    assert copied.ops == (3,)
    assert [step.values[c].storage for c in copied.copies] == [y.storage]


def test_an_opaque_op_stands_in_the_way_and_its_result_is_what_to_hold() -> None:
    b = StepBuilder()
    opaque = b.one(b.input(4), size=4, replayable=False, target="lib.opaque.default")
    y = b.one(opaque, size=4)
    z = b.one(y, size=4, save=[y])
    step = check_step(b.build(z))
    [read] = tables_of(step).reads
    recipe = find_recipe(step, values=[read.value], start=read.first)
    assert isinstance(recipe, NoRecipe)
    assert [o.storage for o in recipe.obstacles] == [opaque.storage]
    assert "lib.opaque.default" in str(recipe)
    found = find_recipe(step, values=[read.value], available={opaque.storage}, start=read.first)
    assert isinstance(found, Recipe)
    assert found.ops == (1,)
    assert found.reads == {opaque.storage}


def test_a_view_of_what_is_held_needs_no_op_and_a_view_of_what_is_made_needs_its_own() -> None:
    b = StepBuilder()
    x = b.one(b.input(4), size=4)
    flat = b.view(x)
    y = b.one(flat, size=4)
    step = check_step(b.build(b.one(y, size=4, save=[y])))
    [read] = tables_of(step).reads
    held = find_recipe(step, values=[read.value], available={x.storage}, start=read.first)
    assert isinstance(held, Recipe)
    assert held.ops == (2,)
    made = find_recipe(step, values=[read.value], start=read.first)
    assert isinstance(made, Recipe)
    assert made.ops == (0, 1, 2)


def test_moving_statistics_are_no_obstacle() -> None:
    step = unet_like(1)
    reasons = keep_reasons(step)
    made = {s for s in reasons if step.storages[s].birth >= 0}
    assert made
    assert all(not reasons[s] for s in made if step.storages[s].saved_until > step.storages[s].held_until)


@pytest.mark.parametrize("reads_mean", [False, True])
def test_a_moved_buffer_is_copied_only_if_the_replay_reads_it(reads_mean: bool) -> None:
    b = StepBuilder()
    x = b.input(8)
    mean = b.buffer(4)
    y = b.batch_norm(x, mean, size=8, reads_mean=reads_mean)
    step = check_step(b.build(b.one(y, size=4, save=[y])))
    read = next(r for r in tables_of(step).reads if r.storage == y.storage)
    recipe = find_recipe(step, values=[read.value], start=read.first)
    assert isinstance(recipe, Recipe)
    assert [step.values[c].storage for c in recipe.copies] == ([mean.storage] if reads_mean else [])


def test_reasons_say_why_a_storage_is_kept() -> None:
    b = StepBuilder()
    weight = b.parameter(4)
    x = b.one(b.input(4), weight, size=4, save=[weight])
    kept = b.one(x, size=4, save=[x])
    b.keep(kept, "written by NumPy")
    held = b.one(kept, size=4, save=[kept])
    b.hold(held)
    opaque = b.one(held, size=4, save=[held], replayable=False)
    step = check_step(b.build(b.one(opaque, size=4, save=[opaque])))
    reasons = keep_reasons(step)
    assert reasons[x.storage] == ""
    assert reasons[kept.storage] == "written by NumPy"
    assert "parameter" in reasons[weight.storage]
    assert "held in any case by test" in reasons[held.storage]
    assert "not replayable" in reasons[opaque.storage]
    assert droppable(step) == {x.storage}
    assert formally_droppable(step) == {x.storage, opaque.storage}


def test_every_droppable_storage_of_a_transformer_has_a_recipe_from_the_leaves() -> None:
    step = gpt_like(2, dropout=True)
    for s in droppable(step):
        reads = tables_of(step).reads_of[s]
        assert find_recipe(step, values={r.value for r in reads}, start=reads[0].first)


def test_statistics_that_are_an_activation_are_an_obstacle_also_where_their_writer_is_replayed_for_something_else() -> (
    None
):
    """Instance norm moves repeated copies of its statistics, and autograd saves those."""
    b = StepBuilder()
    x = b.input(8)
    mean = b.one(b.input(4), size=4, target="aten.repeat.default")
    y = b.batch_norm(x, mean, size=8, reads_mean=False)
    step = check_step(b.build(b.one(y, mean, size=4, save=[y, mean])))
    reads = [r for r in tables_of(step).reads if r.storage in (y.storage, mean.storage)]
    for values in itertools.permutations({r.value for r in reads}):
        recipe = find_recipe(step, values=values, start=reads[0].first)
        assert isinstance(recipe, NoRecipe)
        assert [o.storage for o in recipe.obstacles] == [mean.storage]
