"""Checkpointing policies: their text, what they keep, and the budget of `keepwise`."""

from itertools import pairwise

import pytest

import keepwise
from keepwise.estimator.api import architecture_of, make_setup
from keepwise.estimator.compute import Estimator
from keepwise.estimator.policy import parse_policy
from keepwise.estimator.treatment import lower_hull, menu

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 4096,
}
MIXTURE = {"model_type": "qwen2_moe", "num_hidden_layers": 4, "vocab_size": 4096}
FORMS = [
    "none", "full", "sqrt", "every:3", "nth:2", "first:5", "selective:attention.core", "selective:mlp,norm", "sac", "sac:2",
    "save:query,key,value", "keepwise", "keepwise:1073741824",
]  # fmt: skip


@pytest.mark.parametrize("text", FORMS)
def test_text_and_back(text):
    assert str(parse_policy(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "every",
        "every:0",
        "every:x",
        "selective:",
        "selective:brain",
        "save:",
        "save:x",
        "keepwise:x",
        "sac:3",
        "Full",
    ],
)
def test_wrong_text_is_refused(text):
    with pytest.raises(ValueError):
        parse_policy(text)


def estimate(policy, config=LLAMA, **options):
    return keepwise.estimate(config, checkpointing=policy, **{"batch": 4, "sequence": 1024, **options})


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_less_is_held_and_more_is_rebuilt(config):
    ladder = ["none", "selective:mlp.activation,moe.experts.activation", "selective:pointwise", "full"]
    answers = [estimate(policy, config) for policy in ladder]
    kept = [answer.kept_bytes for answer in answers]
    rebuilt = [answer.ranks[0].rebuilt_flops for answer in answers]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)
    assert rebuilt[0] == 0
    assert rebuilt[-1] == max(rebuilt)
    assert all(answer.static_bytes == answers[0].static_bytes for answer in answers)


def test_selective_pointwise_runs_no_product_again_unless_it_is_needed():
    """Only products whose results nobody saved (the up projection of a rotated query) have to run."""
    fused = estimate("selective:mlp.activation", kernels="fused")
    assert fused.ranks[0].rebuilt_flops == 0
    assert fused.kept_bytes < estimate("none", kernels="fused").kept_bytes


def test_first_and_nth_are_mixtures_of_none_and_full():
    none, full = estimate("none"), estimate("full")
    for policy, layers in (("first:3", 3), ("nth:3", 3), ("nth:8", 1), ("first:8", 8)):
        answer = estimate(policy)
        share = layers / 8
        expected = none.kept_bytes + share * (full.kept_bytes - none.kept_bytes)
        assert answer.kept_bytes == pytest.approx(expected, rel=1e-6)
        assert answer.ranks[0].rebuilt_flops == pytest.approx(share * full.ranks[0].rebuilt_flops)


def test_segments_hold_one_input_each():
    input_bytes = 4 * 1024 * 1024 * 2
    head = estimate("full").kept_bytes - 8 * input_bytes
    for length, segments in ((2, 4), (3, 3), (8, 1)):
        assert estimate(f"every:{length}").kept_bytes - head == segments * input_bytes
    assert estimate("sqrt").kept_bytes == estimate("every:3").kept_bytes


def test_longer_segments_run_more_again():
    """All blocks of a segment but the last run to their very end."""
    one, two, eight = (estimate(f"every:{n}").ranks[0].rebuilt_flops for n in (1, 2, 8))
    assert one < two < eight < estimate("none").ranks[0].forward_flops


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["dense", "mixture"])
def test_keepwise_keeps_every_budget_between_floor_and_plain(config):
    none, full = estimate("none", config), estimate("full", config)
    times = []
    for step in range(11):
        budget = full.peak_bytes + (none.peak_bytes - full.peak_bytes) * step // 10
        answer = estimate(f"keepwise:{budget}", config)
        assert answer.peak_bytes <= budget
        times.append(answer.ranks[0].rebuilt_seconds)
    assert times == sorted(times, reverse=True)
    assert times[-1] == 0


@pytest.mark.parametrize("config", [LLAMA, MIXTURE], ids=["dense", "mixture"])
@pytest.mark.parametrize(
    "policy", ["selective:pointwise", "sac", "sac:2", "first:4", "every:2", "save:query,key,value,output"]
)
def test_keepwise_is_no_slower_than_any_policy_at_its_peak(policy, config):
    other = estimate(policy, config)
    ours = estimate(f"keepwise:{other.peak_bytes}", config)
    assert ours.peak_bytes <= other.peak_bytes
    assert ours.ranks[0].rebuilt_seconds <= other.ranks[0].rebuilt_seconds * 1.02


def test_keepwise_below_the_floor_says_so():
    answer = estimate("keepwise:1MiB")
    assert answer.peak_bytes == estimate("full").peak_bytes
    assert any("no plan fits 1 MiB" in note for note in answer.notes)


def test_the_menu_is_a_lower_hull():
    estimator = Estimator(architecture_of(LLAMA))
    setup = make_setup(checkpointing="none", sequence=1024)
    graph = next(p.graph for p in estimator._layouts.pieces(setup) if p.kind == "block")
    points = menu(graph, graph.walk(), lambda g, op: op.flops + 1e6)
    assert len(points) >= 3
    kept = [p.kept_bytes for p in points]
    assert kept == sorted(kept, reverse=True)
    prices = [(b.rebuilt_seconds - a.rebuilt_seconds) / (a.kept_bytes - b.kept_bytes) for a, b in pairwise(points)]
    assert prices == sorted(prices)
    assert lower_hull(points) == points


def test_recomputation_repeats_collectives():
    parallel = {"tensor_parallel": 4, "sequence_parallel": True}
    plain = {t.reason: t for t in estimate("none", **parallel).traffic}
    full = {t.reason: t for t in estimate("full", **parallel).traffic}
    assert set(full) - set(plain) == {"tensor parallel, again for recomputation"}
    again = full["tensor parallel, again for recomputation"]
    # Each block gathers twice and scatters twice; the last scatter is not needed again.
    assert again.count == 8 * 3
    assert plain["tensor parallel, forward"].count == 8 * 4 + 1


def test_offload_moves_what_is_held():
    full, moved = estimate("full"), estimate("full", offload="activations")
    input_bytes = 4 * 1024 * 1024 * 2
    assert moved.ranks[0].host_bytes == 8 * input_bytes
    assert full.kept_bytes - moved.kept_bytes == (8 - 2) * input_bytes
    assert moved.peak_bytes < full.peak_bytes
    assert any("offload of activations" in t.reason for t in moved.traffic)
