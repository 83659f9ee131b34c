"""Every row of the estimator's published figures, exactly."""

import math

import pytest

import keepwise
from keepwise.estimator.rule import activation_memory, best_segments, compute_units


def rule(**sizes):
    return keepwise.estimate(**{"layers": 32, "width": 4096, "tokens": 2048, **sizes})


def test_nothing_rebuilt():
    answer = rule()
    assert answer.activation_bytes == 9_126_805_504
    assert answer.peak_bytes == 9_126_805_504
    assert answer.compute_units == 3


def test_every_layer_rebuilt():
    answer = rule(segment=1)
    assert answer.categories.kept_activations == 536_870_912
    assert answer.categories.rebuilt_activations == 285_212_672
    assert answer.activation_bytes == 822_083_584
    assert round(rule().activation_bytes / answer.activation_bytes) == 11


def test_segments_of_eight():
    assert f"{rule(segment=8).activation_bytes / 1e9:.3f}" == "2.349"


def test_longer_sequences():
    assert f"{rule(tokens=8192).activation_bytes / 1e9:.2f}" == "36.51"
    assert f"{rule(tokens=8192, segment=1).activation_bytes / 1e9:.2f}" == "3.29"


@pytest.mark.parametrize(("segment", "units"), [(1, 98), (2, 100), (6, 216)])
def test_units_of_tokens_times_width(segment, units):
    answer = rule(segment=segment)
    assert answer.rule["units"] == units
    assert answer.activation_bytes == units * 2048 * 4096


def test_attention_not_fused():
    assert f"{rule(layer_bytes=60).activation_bytes / 1e9:.3f}" == "16.106"
    assert f"{rule(layer_bytes=60, segment=1).activation_bytes / 1e9:.3f}" == "1.040"
    assert best_segments(layers=32, layer_bytes=60, input_bytes=2) == (1,)


def test_larger_models():
    assert rule(layers=80, width=8192).activation_bytes == 45_634_027_520
    wide = {"layers": 40, "width": 5120, "tokens": 4096}
    assert rule(**wide).activation_bytes == 28_521_267_200
    assert rule(**wide, segment=1).activation_bytes == 2_390_753_280


@pytest.mark.parametrize(("layers", "best"), [(36, (6,)), (64, (8,)), (32, (4, 5, 6, 7, 8))])
def test_square_root_where_inputs_cost_as_much_as_layers(layers, best):
    assert best_segments(layers=layers, layer_bytes=1, input_bytes=1) == best
    totals = {k: math.ceil(layers / k) + k for k in range(1, layers + 1)}  # by hand
    assert best == tuple(k for k, total in totals.items() if total == min(totals.values()))


def test_square_root_ties_take_twelve_units():
    for segment in best_segments(layers=32, layer_bytes=1, input_bytes=1):
        memory = activation_memory(layers=32, tokens=1, width=1, layer_bytes=1, input_bytes=1, segment=segment)
        assert memory.total_bytes == 12


@pytest.mark.parametrize("segment", [1, 2, 5, 8, 32])
def test_full_recomputation_costs_a_third_for_every_segment(segment):
    answer = rule(segment=segment)
    assert answer.compute_units == pytest.approx(4, abs=1e-12)
    assert answer.recompute_overhead == pytest.approx(1 / 3, abs=1e-12)
    assert f"{answer.recompute_overhead:+.1%}" == "+33.3%"
    skipping = compute_units(layers=32, segment=segment, skips_last_segment=True)
    assert 4 - skipping == segment / 32
    assert answer.rule["compute_units_skipping_last"] == skipping


def test_residual_stream_tensors():
    one = activation_memory(layers=1, tokens=2 * 2048, width=4096, layer_bytes=2, segment=None)
    assert one.total_bytes == 33_554_432 == 32 * 2**20
    blocks = activation_memory(layers=24, tokens=2 * 2048, width=4096, layer_bytes=8 * 2, segment=None)
    assert blocks.total_bytes == 6144 * 2**20
    regions = activation_memory(layers=24, tokens=2 * 2048, width=4096, layer_bytes=8 * 2, segment=4)
    assert regions.stored_inputs_bytes == 192 * 2**20
    assert regions.segment_bytes == 1024 * 2**20
    # Six boundaries and the input are seven tensors; the formula keeps six inputs.
    seven = regions.stored_inputs_bytes + one.total_bytes
    assert seven == 224 * 2**20
    assert (seven + regions.segment_bytes) / 2**20 == 1248


def test_full_fine_tuning_of_seven_billion():
    answer = rule(segment=1, parameters=6.738e9)
    assert answer.static_bytes == 16 * 6_738_000_000
    assert f"{answer.peak_bytes / 1e9:.2f}" == "108.63"
    plain = rule(parameters=6.738e9)
    assert plain.static_bytes == answer.static_bytes
    assert plain.peak_bytes - answer.peak_bytes == 9_126_805_504 - 822_083_584
    categories = answer.categories
    assert categories.parameters == categories.gradients == 2 * 6_738_000_000
    assert categories.optimizer == (4 + 8) * 6_738_000_000


def test_checkpointing_reduces_activations_alone():
    plain, full = rule(parameters="7B"), rule(parameters="7B", checkpointing="full")
    for name in ("parameters", "gradients", "optimizer"):
        assert getattr(plain.categories, name) == getattr(full.categories, name)
    assert full.activation_bytes < plain.activation_bytes


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"layers": 0}, "layers"),
        ({"segment": 0}, "segment"),
        ({"tokens": -1}, "tokens"),
        ({"layer_bytes": 0}, "layer_bytes"),
        ({"parameters": "many"}, "many"),
        ({"tensor_parallel": 8}, "tensor_parallel"),
        ({"checkpointing": "sac"}, "sac"),
    ],
)
def test_wrong_sizes_are_refused_by_name(wrong, word):
    with pytest.raises(ValueError, match=word):
        rule(**wrong)
