"""The operator model against figures from papers. Sources stand beside them."""

import pytest

import keepwise
from keepwise.estimator.api import architecture_of, make_setup
from keepwise.estimator.layout import Layouts
from keepwise.estimator.policy import selective_kept
from keepwise.estimator.rule import gpt_model_flops, layer_bytes_per_unit, selective_overhead

# Korthikanti et al. 2022, table 3: heads, hidden, layers, tensor and pipeline degree, interleaved chunks, micro-batch.
MODELS = {
    "22B": (64, 6144, 48, 8, 1, 1, 4),
    "175B": (96, 12288, 96, 8, 8, 3, 1),
    "530B": (128, 20480, 105, 8, 35, 3, 1),
    "1T": (160, 25600, 128, 8, 64, 1, 1),
}
SEQUENCE, VOCAB = 2048, 51200


def gpt(name, **changes):
    heads, width, layers, *_ = MODELS[name]
    config = {
        "model_type": "gpt2", "n_embd": width, "n_layer": layers, "n_head": heads, "vocab_size": VOCAB, "activation_function": "gelu",
        "n_positions": SEQUENCE, "resid_pdrop": 0.1, "attn_pdrop": 0.1, "embd_pdrop": 0.1,
    }  # fmt: skip
    setup = make_setup(
        checkpointing="none", sequence=SEQUENCE, attention="eager", kernels="fused", precision="fp16",
        **{"batch": MODELS[name][6], **changes},
    )  # fmt: skip
    return config, setup


def block_of(config, setup):
    return next(p.graph for p in Layouts(architecture_of(config)).pieces(setup) if p.kind == "block")


def without_statistics(graph, values):
    """Papers leave out a number or two a row (means, reciprocal deviations)."""
    return sum(graph.values[v].num_bytes for v in values if graph.values[v].kind != "statistic")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tensor", [1, 2, 8])
def test_bytes_of_a_layer(name, tensor, sequence_parallel):
    """Equations 1, 2 and 4."""
    heads, width, *_ = MODELS[name]
    config, setup = gpt(name, tensor_parallel=tensor, sequence_parallel=sequence_parallel)
    graph = block_of(config, setup)
    formula = layer_bytes_per_unit(
        heads=heads, sequence=SEQUENCE, width=width, fused_attention=False, tensor_parallel=tensor,
        sequence_parallel=sequence_parallel and tensor > 1,
    )  # fmt: skip
    assert without_statistics(graph, graph.saved()) == pytest.approx(
        formula * SEQUENCE * setup.batch * width, rel=1e-12
    )


@pytest.mark.parametrize("name", MODELS)
def test_selective_recomputation_drops_the_square_term(name):
    """Equation 6: with the core attention rebuilt 34*s*b*h/t remain."""
    config, setup = gpt(name, tensor_parallel=8, sequence_parallel=True)
    graph = block_of(config, setup)
    kept = selective_kept(graph, ("attention.core",))
    assert without_statistics(graph, kept) == pytest.approx(
        34 * SEQUENCE * setup.batch * MODELS[name][1] / 8, rel=1e-12
    )


@pytest.mark.parametrize(("name", "share", "overhead"), [("175B", 0.70, 0.027), ("530B", 0.65, 0.016)])
def test_selective_recomputation_saves_and_costs_what_the_paper_says(name, share, overhead):
    """Section 5: it saves 70 % and 65 % of the activations of GPT-3 and MT-NLG for 2.7 % and 1.6 % more operations."""
    config, setup = gpt(name)
    graph = block_of(config, setup)
    saved = 1 - without_statistics(graph, selective_kept(graph, ("attention.core",))) / without_statistics(
        graph, graph.saved()
    )
    assert saved == pytest.approx(share, abs=0.006)
    width = MODELS[name][1]
    assert int(1000 * selective_overhead(width=width, sequence=SEQUENCE)) / 1000 == overhead
    # By operators it costs less than the paper's approximation: the product with the values is not run again.
    answer = keepwise.estimate(
        config, sequence=SEQUENCE, attention="eager", kernels="fused", precision="fp16", checkpointing="selective"
    )
    step = gpt_model_flops(layers=MODELS[name][2], width=width, sequence=SEQUENCE, batch=1, vocab=VOCAB)
    scores = MODELS[name][2] * 2 * SEQUENCE**2 * width
    assert answer.recompute_overhead == pytest.approx(scores / step, rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_the_last_stage(name):
    """Section 4.3: norm and projection inputs 2*s*b*h each and fp32 logits 4*s*b*v, all divided by t: 4*s*b*h/t * (1 + v/h)."""
    config, setup = gpt(name, tensor_parallel=8, sequence_parallel=True)
    head = Layouts(architecture_of(config)).pieces(setup)[-1].graph
    kept = [v for v in head.saved() if head.values[v].kind != "index"]
    width, batch = MODELS[name][1], setup.batch
    formula = 4 * SEQUENCE * batch * width / 8 * (1 + VOCAB / width)
    assert without_statistics(head, kept) == pytest.approx(formula, rel=1e-12)


def test_together_less_than_a_fifth():
    """Figure 7: sequence parallelism and selective recomputation together need under 20 % of tensor parallelism alone, full under 10 %."""
    for name in MODELS:
        config, tensor = gpt(name, tensor_parallel=8)
        _, both = gpt(name, tensor_parallel=8, sequence_parallel=True)
        base, other = block_of(config, tensor), block_of(config, both)
        whole = without_statistics(base, base.saved())
        assert without_statistics(other, selective_kept(other, ("attention.core",))) / whole < 0.215
        assert (
            other.values[other.entry].num_bytes * 8 / whole < 0.11
        )  # the input is not divided when whole layers are rebuilt


def test_model_flops():
    """Equation 7 against the operators: forward once, backward twice, matrix products alone."""
    heads, width, layers, *_ = MODELS["22B"]
    del heads
    config, setup = gpt("22B")
    pieces = Layouts(architecture_of(config)).pieces(setup)
    forward = sum(op.flops for p in pieces for op in p.graph.ops)
    formula = gpt_model_flops(layers=layers, width=width, sequence=SEQUENCE, batch=setup.batch, vocab=VOCAB)
    assert 3 * forward == pytest.approx(formula, rel=1e-9)


@pytest.mark.parametrize(
    ("zero", "gigabytes"),
    [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)],
    ids=["none", "optimizer", "gradients", "parameters"],
)
def test_zero_table(zero, gigabytes):
    """Rajbhandari et al. 2020 (ZeRO), figure 1: 7.5 B parameters on 64 ranks, 16 bytes a parameter."""
    answer = keepwise.estimate(layers=1, width=1, tokens=1, parameters=7.5e9, data_parallel=64, zero=zero)
    assert round(answer.static_bytes / 1e9, 1) == gigabytes


PARAMETERS = {
    "llama-2-7b": ({"model_type": "llama"}, 6_738_415_616),
    "llama-3-8b": (
        {"model_type": "llama", "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256},
        8_030_261_248,
    ),
    "mistral-7b": ({"model_type": "mistral"}, 7_241_732_096),
    "mixtral-8x7b": ({"model_type": "mixtral"}, 46_702_792_704),
    "gpt2": ({"model_type": "gpt2"}, 124_439_808),
    "gpt-neox-20b": ({"model_type": "gpt_neox"}, 20_554_567_680),
    "gemma-7b": ({"model_type": "gemma"}, 8_537_680_896),
    "phi-2": (
        {"model_type": "phi", "hidden_size": 2560, "num_hidden_layers": 32, "intermediate_size": 10240},
        2_779_683_840,
    ),
    "deepseek-v3": ({"model_type": "deepseek_v3"}, 671_026_404_352),
    "whisper-tiny": ({"model_type": "whisper"}, 37_760_640),
    "t5-small": ({"model_type": "t5"}, 60_506_624),
}
"""Sizes as on the models' cards (the configuration classes' defaults, where no size is given)."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_sizes(name):
    config, size = PARAMETERS[name]
    assert keepwise.estimate(config, sequence=256).num_parameters == size
