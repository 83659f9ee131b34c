"""Sharding, pipelines, experts, precision, optimizers, adapters."""

import itertools

import pytest

import keepwise
from keepwise.estimator.api import make_setup
from keepwise.estimator.pipeline import bubble, in_flight

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 4096,
}


def estimate(config=LLAMA, **options):
    return keepwise.estimate(config, **{"batch": 1, "sequence": 512, **options})


def most_in_flight(schedule, stage, stages, batches, chunks):
    """Forward passes without their backward, counted while the schedule's own order of work is played."""
    if schedule == "gpipe":
        order = ["F"] * batches + ["B"] * batches
    elif schedule == "1f1b":
        warmup = min(stages - stage - 1, batches)
        order = ["F"] * warmup + ["F", "B"] * (batches - warmup) + ["B"] * warmup
    else:  # interleaved, as Megatron-Core: 2 (p - r - 1) + (v - 1) p warm-up passes of chunks, then one forward, one backward
        total = batches * chunks
        warmup = total if batches == stages else min(2 * (stages - stage - 1) + (chunks - 1) * stages, total)
        order = ["F"] * warmup + ["F", "B"] * (total - warmup) + ["B"] * warmup
    live = most = 0
    for work in order:
        live += 1 if work == "F" else -1
        most = max(most, live)
    assert live == 0
    return most


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("batches", [1, 2, 4, 16])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_in_flight(schedule, batches, stages):
    for stage in range(stages):
        setup = make_setup(checkpointing="none", pipeline_parallel=stages, accumulation=batches, schedule=schedule)
        assert in_flight(stage, setup) == most_in_flight(schedule, stage, stages, batches, 1)


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3), (8, 3)])
def test_interleaved_chunks_in_flight(stages, chunks):
    batches = 4 * stages
    for stage in range(stages):
        setup = make_setup(
            checkpointing="none",
            pipeline_parallel=stages,
            accumulation=batches,
            schedule="interleaved",
            virtual_stages=chunks,
        )
        assert in_flight(stage, setup) * chunks == most_in_flight("interleaved", stage, stages, batches, chunks)
    # Korthikanti et al. 2022, section 4.2.3: the first stage holds (1 + (p - 1)/(p m)) times all layers, of L/p it has.
    first = make_setup(
        checkpointing="none",
        pipeline_parallel=stages,
        accumulation=batches,
        schedule="interleaved",
        virtual_stages=chunks,
    )
    assert in_flight(0, first) / stages == pytest.approx(1 + (stages - 1) / (stages * chunks))


def test_bubbles():
    def of(**options):
        return bubble(make_setup(checkpointing="none", pipeline_parallel=4, accumulation=8, **options))

    assert of() == pytest.approx(3 / 11)
    assert of(schedule="interleaved", virtual_stages=2) < of() < 0.3
    assert of(schedule="zb-h1") < of()
    assert bubble(make_setup(checkpointing="none")) == 0


def test_stages_differ():
    answer = estimate(pipeline_parallel=4, accumulation=8)
    assert [rank.in_flight for rank in answer.ranks] == [4, 3, 2, 1]
    assert sum(rank.layers * len(rank.stages) for rank in answer.ranks) == 8
    assert answer.ranks[0].name == "stage 1 of 4"
    assert answer.worst is max(answer.ranks, key=lambda rank: rank.peak_bytes)
    assert any(t.reason.startswith("pipeline") for t in answer.traffic)
    whole = estimate()
    assert sum(rank.peak.categories.parameters for rank in answer.ranks) == whole.categories.parameters


def test_leftover_layers_go_to_the_first_stages():
    answer = keepwise.estimate({**LLAMA, "num_hidden_layers": 10}, sequence=512, pipeline_parallel=4, accumulation=4)
    layers = [rank.layers for rank in answer.ranks for _ in rank.stages]
    assert layers == [3, 3, 2, 2]


@pytest.mark.parametrize("tensor", [2, 4, 8])
def test_tensor_parallelism_divides_matrices(tensor):
    whole, part = estimate(), estimate(tensor_parallel=tensor)
    vectors = 2 * 1024 * (2 * 8 + 1)  # norms are whole on every rank
    assert part.categories.parameters - vectors == pytest.approx(
        (whole.categories.parameters - vectors) / tensor, rel=1e-9
    )
    shared = estimate(tensor_parallel=tensor, sequence_parallel=True)
    assert shared.kept_bytes < part.kept_bytes < whole.kept_bytes
    assert shared.kept_bytes == pytest.approx(whole.kept_bytes / tensor, rel=0.02)


def test_key_heads_are_repeated_beyond_their_number():
    grouped = {**LLAMA, "num_key_value_heads": 2}
    four, eight = (keepwise.estimate(grouped, sequence=512, tensor_parallel=n) for n in (4, 8))
    key_value = 2 * 1024 * 256 * 8  # parameters of both projections in all layers
    matrices = four.num_parameters - 1024 * 17 - key_value
    for n, answer in ((4, four), (8, eight)):
        assert answer.categories.parameters == 2 * (matrices // n + key_value // 2 + 1024 * 17)


def test_context_parallelism_divides_tokens():
    whole, part = estimate(sequence=4096), estimate(sequence=4096, context_parallel=4)
    assert part.kept_bytes == pytest.approx(whole.kept_bytes / 4, rel=0.02)
    assert any(t.reason.startswith("context") for t in part.traffic)
    with pytest.raises(ValueError, match="context_parallel"):
        estimate(sequence=510, context_parallel=4)


def test_sharding_stages():
    plain = estimate(data_parallel=8)
    answers = {zero: estimate(data_parallel=8, zero=zero) for zero in (1, 2, 3)}
    assert answers[1].categories.optimizer == pytest.approx(plain.categories.optimizer / 8, abs=8)
    assert answers[1].categories.gradients == plain.categories.gradients
    assert answers[2].categories.gradients == pytest.approx(plain.categories.gradients / 8, abs=8)
    assert answers[2].categories.parameters == plain.categories.parameters
    assert answers[3].categories.parameters == pytest.approx(plain.categories.parameters / 8, abs=8)
    assert answers[3].categories.communication > answers[2].categories.communication > 0


def test_experts_are_divided_among_fewer_replicas():
    mixture = {"model_type": "mixtral", "num_hidden_layers": 2, "vocab_size": 1000}
    one = keepwise.estimate(mixture, sequence=256, data_parallel=8, zero=1)
    four = keepwise.estimate(mixture, sequence=256, data_parallel=8, zero=1, expert_parallel=4)
    experts = 2 * 8 * 3 * 4096 * 14336
    assert one.categories.parameters - four.categories.parameters == 2 * experts * 3 // 4
    # Four times fewer experts on a rank, four times fewer replicas to share their state: the same bytes.
    assert four.categories.optimizer == pytest.approx(one.categories.optimizer, rel=1e-6)
    assert any(t.reason.startswith("expert") for t in four.traffic)
    with pytest.raises(ValueError, match="expert"):
        keepwise.estimate(mixture, sequence=256, data_parallel=16, expert_parallel=16)


BYTES = {"fp32": 16, "bf16": 16, "bf16-fp32-grads": 18, "bf16-pure": 8, "bf16-autocast": 16, "fp16": 16}


@pytest.mark.parametrize("precision", BYTES)
def test_bytes_a_parameter(precision):
    answer = estimate(precision=precision)
    assert answer.static_bytes == BYTES[precision] * answer.num_parameters


OPTIMIZERS = {"adamw": 8, "lion": 4, "sgd-momentum": 4, "sgd": 0}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_bytes_of_state(optimizer):
    answer = estimate(optimizer=optimizer)
    assert answer.categories.optimizer == (4 + OPTIMIZERS[optimizer]) * answer.num_parameters


def test_other_optimizers_lie_between():
    state = {
        o: estimate(optimizer=o, precision="fp32").categories.optimizer
        for o in ("sgd", "adafactor", "adamw8bit", "muon", "adamw")
    }
    assert list(state.values()) == sorted(state.values())
    assert len(set(state.values())) == 5
    tables = 2 * 4096 * 1024
    vectors = 1024 * 17
    matrices = estimate().num_parameters - tables - vectors
    assert state["muon"] == 4 * matrices + 8 * (tables + vectors)


def test_eight_bit_blocks():
    answer = estimate(optimizer="adamw8bit", precision="fp32")
    small = 1024 * 17
    assert answer.categories.optimizer == 2 * ((answer.num_parameters - small) * (1 + 4 / 256) + 4 * small)


def test_adapters_leave_the_base_without_gradients():
    full, lora = estimate(), estimate(lora_rank=8, lora_targets="all-linear")
    shapes = [(1024, 1024)] * 4 + [(1024, 2816)] * 2 + [(2816, 1024)]
    trained = 8 * sum(8 * (a + b) for a, b in shapes)
    assert lora.num_trained == trained
    assert lora.num_parameters == full.num_parameters + trained
    assert lora.categories.gradients == 4 * trained
    assert lora.categories.optimizer == 8 * trained
    assert lora.categories.parameters == 2 * full.num_parameters + 4 * trained


def test_quantised_bases():
    base, small = estimate(lora_rank=8), estimate(lora_rank=8, quantised="nf4")
    matrices = sum((4 * 1024**2, 3 * 1024 * 2816)) * 8
    saved = base.categories.parameters - small.categories.parameters
    assert saved == pytest.approx(matrices * (2 - 4.127 / 8), rel=1e-6)
    with pytest.raises(ValueError, match="lora_rank"):
        estimate(quantised="nf4")


def test_gradients_that_appear_and_vanish():
    """Fresh gradients are not there while activations are highest; the end of backward is then a moment of its own."""
    held, fresh = estimate(batch=8), estimate(batch=8, gradients="fresh")
    assert fresh.peak_bytes < held.peak_bytes
    after = {m.name: m.categories for m in fresh.ranks[0].moments}["after backward"]
    assert after.gradients == held.categories.gradients
    assert (
        estimate(batch=8, gradients="fresh", accumulation=2).peak_bytes == estimate(batch=8, accumulation=2).peak_bytes
    )


def test_loops_that_copy_parameters():
    names = [m.name for m in estimate(optimizer_kernel="foreach").ranks[0].moments]
    assert "optimizer step" in names


def test_losses_without_logits():
    big = {**LLAMA, "vocab_size": 128_000}
    eager, chunked, fused = (keepwise.estimate(big, sequence=4096, loss=loss) for loss in ("eager", "chunked", "fused"))
    assert fused.peak_bytes < chunked.peak_bytes < eager.peak_bytes


def test_everything_together_is_consistent():
    """Any mixture of degrees gives categories that add up and a peak among its moments."""
    for tensor, pipeline, zero, policy in itertools.product(
        (1, 2), (1, 2), (0, 3), ("none", "full", "sac", "keepwise")
    ):
        answer = estimate(
            tensor_parallel=tensor, pipeline_parallel=pipeline, data_parallel=2, zero=zero, checkpointing=policy, accumulation=4,
            sequence_parallel=True,
        )  # fmt: skip
        for rank in answer.ranks:
            assert all(value >= 0 for m in rank.moments for value in m.categories.as_dict().values())
            assert rank.peak_bytes == max(m.categories.total for m in rank.moments)
            assert rank.peak_bytes == sum(rank.peak.categories.as_dict().values())
        assert answer.num_devices == tensor * pipeline * 2


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"batch": 0}, "batch"), ({"precision": "fp64"}, "precision"), ({"optimizer": "magic"}, "optimizer"), ({"zero": 4}, "zero"),
        ({"attention": "slow"}, "attention"), ({"offload": "moon"}, "moon"), ({"tensor_parallel": 3}, "tensor_parallel"),
        ({"pipeline_parallel": 9}, "pipeline"), ({"colour": "red"}, "colour"), ({"device": "abacus"}, "abacus"),
        ({"lora_rank": 8, "lora_targets": "ears"}, "ears"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_by_name(wrong, word):
    with pytest.raises(ValueError, match=word):
        estimate(**wrong)


def test_the_batch_is_counted():
    assert estimate(batch=3).categories.inputs == 3 * 512 * 16
    images = keepwise.estimate({"model_type": "vit"}, batch=4)
    assert images.categories.inputs == 4 * (3 * 224 * 224 * 2 + 8)
    sound = keepwise.estimate({"model_type": "whisper"}, batch=2, sequence=100, precision="fp32")
    assert sound.categories.inputs == 2 * (80 * 3000 * 4 + 100 * 8 + 100 * 8)


def test_a_tied_table_has_a_copy_on_the_last_stage():
    """Megatron and DeepSpeed keep one on both; its gradient waits for nothing there."""
    tied = {**LLAMA, "tie_word_embeddings": True}
    table = 4096 * 1024
    whole = estimate(tied)
    assert whole.num_parameters == estimate().num_parameters - table
    stages = estimate(tied, pipeline_parallel=2, accumulation=2)
    held = sum(rank.peak.categories.parameters for rank in stages.ranks)
    assert held == 2 * (whole.num_parameters + table)
    # On one rank the head's part of the gradient is alive until the embeddings' backward adds its own.
    names = {m.name: m.categories for m in whole.ranks[0].moments}
    apart = {m.name: m.categories for m in estimate().ranks[0].moments}
    difference = names["backward of a block"].temporaries - apart["backward of a block"].temporaries
    assert difference == 2 * table
