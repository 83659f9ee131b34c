"""Configurations that are not known by name: read as what they resemble, with the right number of parameters, and said so."""

import pytest

import keepwise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the libraries; ours are errors elsewhere

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 128,
}  # fmt: skip
MIXTURES = {
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", {"num_local_experts": 4}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", {"num_local_experts": 4}),
    "glm4_moe": (
        "Glm4MoeForCausalLM", "Glm4MoeConfig",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_shared_experts": 1},
    ),
    "llama4": (
        "Llama4ForCausalLM", "Llama4TextConfig",
        {"num_local_experts": 4, "intermediate_size_mlp": 160, "interleave_moe_layer_step": 2, "head_dim": 8},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_other_mixtures_have_their_experts(name):
    model_class, config_class, more = MIXTURES[name]
    if not hasattr(transformers, config_class):
        pytest.skip(f"this transformers has no {config_class}")
    config = getattr(transformers, config_class)(**{**SIZES, **more})
    with torch.device("meta"):
        model = getattr(transformers, model_class)(config)
    answer = keepwise.estimate(config.to_dict(), sequence=64)
    assert answer.num_parameters == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.01)
    assert any("read as a Llama with experts" in note for note in answer.notes)
    assert "experts" in answer.model


@pytest.mark.parametrize(("name", "family"), [("qwen2_vl_text", "qwen2"), ("qwen3_vl_text", "qwen3")])
def test_text_parts_of_composite_models(name, family):
    inside = keepwise.estimate({"model_type": "composite", "text_config": {**SIZES, "model_type": name}}, sequence=64)
    alone = keepwise.estimate({**SIZES, "model_type": family}, sequence=64)
    assert inside.num_parameters == alone.num_parameters
    assert inside.peak_bytes == alone.peak_bytes
    assert any("other towers are not counted" in note for note in inside.notes)


def test_what_an_unknown_encoder_is_read_as():
    like = {**SIZES, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    answer = keepwise.estimate({**like, "model_type": "new-encoder"}, sequence=64)
    assert answer.num_parameters == keepwise.estimate({**like, "model_type": "bert"}, sequence=64).num_parameters
    assert any("read as a BERT" in note for note in answer.notes)


def test_layers_that_are_no_attention_are_named():
    types = ["linear_attention", "full_attention"] * 2
    answer = keepwise.estimate({**SIZES, "model_type": "new", "layer_types": types}, sequence=64)
    assert "layers of type linear_attention are counted as attention layers" in answer.notes
