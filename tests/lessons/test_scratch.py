"""The algorithm against autograd, against itself under random plans, and against the published figures."""

from __future__ import annotations

import inspect
import math

import numpy as np
import pytest
import torch
from checkpoint_schedules import optimal_steps_binomial
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.lessons import placements, scratch
from keepwise.lessons.placements import every, everything, predict
from keepwise.lessons.scratch import Drop, Keep, Meter, Offload, Plan, Step, layers
from keepwise.lessons.training import SharedMeter, batch, network, train_step

NUM_BLOCKS = 8
INPUTS, CACHES = [64] * NUM_BLOCKS, [576] * NUM_BLOCKS


@pytest.fixture(scope="module")
def blocks():
    return network()


@pytest.fixture(scope="module")
def full(blocks):
    return train_step(blocks, everything(NUM_BLOCKS))


def plans(start: int, stop: int, parts: tuple[str, ...] = ("keep", "drop")) -> st.SearchStrategy[Plan]:
    """Any nested plan over the layers from `start` up to `stop`."""

    @st.composite
    def draw_plan(draw: st.DrawFn, start: int, stop: int, depth: int) -> Plan:
        plan: list[Keep | Offload | Drop] = []
        while start < stop:
            kind = draw(st.sampled_from(parts if depth else tuple(part for part in parts if part != "drop")))
            if kind == "drop":
                end = draw(st.integers(start + 1, stop))
                plan.append(Drop(draw(draw_plan(start, end, depth - 1))))
                start = end
                continue
            plan.append(
                {"keep": Keep(start), "some": Keep(start, draw(st.sampled_from(["xh", "xa", "x"])))}.get(kind)
                or Offload(start)
            )
            start += 1
        return tuple(plan)

    return draw_plan(start, stop, 3)


def test_the_published_figures(blocks, full):
    assert (full.peak_floats, full.forwards_again) == (4_608, 0)
    for k, floats in {1: 1_088, 2: 1_408, 4: 2_432, 8: 4_672}.items():
        run = train_step(blocks, every(NUM_BLOCKS, k))
        assert (run.peak_floats, run.forwards_again, run.difference(full)) == (floats, 8, 0.0)
    away = train_step(blocks, placements.offload(NUM_BLOCKS))
    assert (away.peak_floats, away.moved_floats, away.forwards_again, away.difference(full)) == (576, 9_216, 0, 0.0)


def test_gradients_are_those_of_autograd(blocks, full):
    x, target = (torch.from_numpy(array) for array in batch())
    weights = [torch.from_numpy(w.copy()).requires_grad_() for block in blocks for w in (block.w1, block.w2)]
    y = x
    for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
        y = y + torch.relu(y @ w1) @ w2
    loss = 0.5 * ((y - target) ** 2).sum()
    loss.backward()
    assert full.loss == pytest.approx(loss.item(), rel=1e-12)
    for weight, gradient in zip(weights, full.gradients, strict=True):
        assert weight.grad is not None
        np.testing.assert_allclose(gradient, weight.grad.numpy(), rtol=1e-10, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(plan=plans(0, NUM_BLOCKS))
def test_any_plan_gives_the_same_bits_and_the_predicted_peak(plan):
    blocks = network()
    run = train_step(blocks, plan)
    assert run.difference(train_step(blocks, everything(NUM_BLOCKS))) == 0.0
    assert (run.peak_floats, run.forwards_again) == predict(plan, INPUTS, CACHES)


@settings(max_examples=40, deadline=None)
@given(plan=plans(0, NUM_BLOCKS, ("keep", "some", "drop", "offload")))
def test_any_plan_is_right_under_dropout(plan):
    blocks = network(dropout=0.3)
    run, full = train_step(blocks, plan), train_step(blocks, everything(NUM_BLOCKS))
    assert run.difference(full) == 0.0
    assert run.loss == full.loss


def test_a_dropped_random_state_shows_in_the_gradients_and_only_there():
    blocks = network(dropout=0.1)
    full = train_step(blocks, everything(NUM_BLOCKS))
    wrong = train_step(blocks, every(NUM_BLOCKS, 2, restore_random=False))
    assert wrong.loss == full.loss
    assert wrong.difference(full) > 1.0


@pytest.mark.parametrize(("restore", "moved"), [(True, False), (False, True)])
def test_a_replay_leaves_the_training_stream_where_it_is(restore, moved):
    def state_after(plan: Plan) -> dict:
        rng = np.random.default_rng(5)
        step = Step(network(dropout=0.1), Meter(), rng)
        y, saved = step.forward(plan, batch()[0])
        step.backward(plan, saved, y)
        return rng.bit_generator.state

    same = state_after(every(NUM_BLOCKS, 2, restore_random=restore)) == state_after(everything(NUM_BLOCKS))
    assert same is not moved


def test_which_arrays_can_be_rebuilt_without_a_product(blocks, full):
    again = {}
    for names in ("xh", "xa", "x"):
        run = train_step(blocks, everything(NUM_BLOCKS, names))
        assert run.difference(full) == 0.0
        again[names] = run.products - full.products
    assert again == {"xh": 0, "xa": 0, "x": NUM_BLOCKS}
    with pytest.raises(KeyError):  # x is the end of the layer before: this layer's own cache cannot give it back
        train_step(blocks, everything(NUM_BLOCKS, "ha"))


def test_recomputation_is_a_third_of_the_step(blocks, full):
    assert full.products == 6 * NUM_BLOCKS
    for k in (1, 2, 4, 8):
        assert train_step(blocks, every(NUM_BLOCKS, k)).products * 3 == full.products * 4
        alone = train_step(blocks, every(NUM_BLOCKS, k, keep_last=True))
        assert alone.forwards_again == NUM_BLOCKS - k


def test_shared_storage_is_charged_once(blocks):
    for k in (1, 2, 4, 8):
        copies = train_step(blocks, every(NUM_BLOCKS, k)).peak_floats
        assert copies - train_step(blocks, every(NUM_BLOCKS, k), meter=SharedMeter()).peak_floats == 64


def test_accumulation_adds_up(blocks, full):
    for parts in (2, 4):
        kept = train_step(blocks, everything(NUM_BLOCKS), micro_batches=parts)
        dropped = train_step(blocks, every(NUM_BLOCKS, 1), micro_batches=parts)
        assert dropped.difference(kept) == 0.0
        assert 0.0 < kept.difference(full) < 1e-12
        assert (kept.peak_floats, dropped.peak_floats) == (4_608 // parts, 1_088 // parts)
        assert dropped.forwards_again == NUM_BLOCKS * parts


@pytest.mark.parametrize("num_layers", [1, 2, 5, 8, 13, 21])
def test_binomial_placement_is_optimal(num_layers):
    for slots in range(1, num_layers):
        plan = placements.binomial(num_layers, slots)
        peak_inputs, again = predict(plan, [0] * num_layers, [1] * num_layers)
        assert list(layers(plan)) == list(range(num_layers))
        assert peak_inputs == 1  # one cache at a time
        assert again == optimal_steps_binomial(num_layers, slots) - num_layers


def test_binomial_placement_holds_no_more_inputs_than_it_may(blocks):
    for slots in range(1, NUM_BLOCKS):
        meter = SharedMeter()
        train_step(blocks, placements.binomial(NUM_BLOCKS, slots), meter=meter)
        assert meter.peak_floats <= slots * 64 + 576


@pytest.mark.parametrize("num_layers", [2, 4, 8, 16, 32])
def test_halves_keep_a_logarithm(num_layers):
    levels = int(math.log2(num_layers))
    peak, again = predict(placements.halves(num_layers), [1] * num_layers, [0] * num_layers)
    assert peak == levels
    assert again == num_layers * levels // 2


@settings(max_examples=25, deadline=None)
@given(
    caches=st.lists(st.integers(1, 50), min_size=2, max_size=6),
    budget=st.integers(5, 200),
    data=st.data(),
)
def test_best_is_never_beaten_by_a_plan_of_its_family(caches, budget, data):
    num_layers = len(caches)
    inputs = data.draw(st.lists(st.integers(1, 10), min_size=num_layers, max_size=num_layers))
    fitting = [
        predict(plan, inputs, caches)[1]
        for plan in placements.all_placements(num_layers)
        if predict(plan, inputs, caches)[0] <= budget
    ]
    if not fitting:
        with pytest.raises(ValueError, match="no placement fits"):
            placements.best(inputs, caches, budget)
        return
    peak, again = predict(placements.best(inputs, caches, budget), inputs, caches)
    assert peak <= budget
    assert again == min(fitting)


def test_the_family_has_the_size_that_is_claimed():
    for num_layers in range(1, 8):
        assert sum(1 for _ in placements.all_placements(num_layers)) == 2 * 3 ** (num_layers - 1)


def test_square_root_is_best_where_a_cache_is_as_large_as_an_input():
    for num_layers in (36, 64):
        peaks = {k: math.ceil(num_layers / k) + k for k in range(1, num_layers + 1)}
        assert peaks[round(math.sqrt(num_layers))] == min(peaks.values())
    assert placements.square_root(36) == every(36, 6)


def test_the_algorithm_fits_one_sitting():
    assert len(inspect.getsource(scratch).splitlines()) < 200
