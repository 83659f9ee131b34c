"""Settings for other systems: they are what those systems accept, and the choice among them is the best there is."""

import json
from itertools import product

import pytest
from msgspec.structs import replace

import keepwise
from keepwise.estimator.api import architecture_of, make_setup
from keepwise.estimator.compute import Estimator
from keepwise.estimator.emit import SYSTEMS, accelerate, deepspeed, emit, huggingface, maxtext, megatron
from keepwise.estimator.policy import parse_policy

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 4096,
}
MIXTURE = {"model_type": "qwen2_moe", "num_hidden_layers": 4, "vocab_size": 4096}
CONFIGS = {"dense": LLAMA, "mixture": MIXTURE}


def options(system, config=LLAMA, **setup):
    architecture = architecture_of(config)
    made = make_setup(checkpointing="none", **{"batch": 4, "sequence": 1024, **setup})
    return architecture, made, SYSTEMS[system].options(architecture, made)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_each_option_is_a_policy_that_does_something_else(system, config):
    architecture, setup, found = options(system, config)
    estimator = Estimator(architecture)
    results = {}
    for option in found:
        offload = frozenset({"activations"}) if option.offload else frozenset()
        asked = replace(
            setup,
            checkpointing=parse_policy(option.policy),
            offload=offload,
            kernels=SYSTEMS[system].kernels or "eager",
        )
        results[option.policy, option.offload] = estimator.run(asked).peak_bytes
        assert SYSTEMS[system].write(option, architecture, setup)
    assert len(set(results.values())) >= 2
    assert ("none", False) in results


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
def test_the_nearest_setting(system, share):
    """Against trying all: at or under the wanted peak the fastest, else the smallest."""
    architecture, setup, found = options(system)
    setup = replace(setup, kernels=SYSTEMS[system].kernels or setup.kernels)
    estimator = Estimator(architecture)
    none = estimator.run(setup)
    full = estimator.run(replace(setup, checkpointing=parse_policy("full")))
    budget = int(full.peak_bytes + share * (none.peak_bytes - full.peak_bytes))
    (setting,) = emit(estimator, setup, budget, (system,))
    answers = []
    for option in found:
        offload = frozenset({"activations"}) if option.offload else frozenset()
        answers.append(estimator.run(replace(setup, checkpointing=parse_policy(option.policy), offload=offload)))
    fitting = [a.step_seconds for a in answers if a.peak_bytes <= budget]
    assert setting.fits == bool(fitting)
    if fitting:
        assert setting.peak_bytes <= budget
        assert setting.time_overhead == pytest.approx(min(fitting) / none.step_seconds - 1)
        assert setting.ours_time_overhead <= setting.time_overhead + 0.005
    else:
        assert setting.peak_bytes == min(a.peak_bytes for a in answers)
        assert any("over the wanted peak" in line for line in setting.lost)
    assert setting.lost


def test_all_systems_at_once_and_unknown_ones():
    architecture, setup, _ = options("jax")
    estimator = Estimator(architecture)
    assert [s.system for s in emit(estimator, setup, 1 << 40, ("all",))] == list(SYSTEMS)
    with pytest.raises(ValueError, match="caffe"):
        emit(estimator, setup, 1 << 40, ("caffe",))


def test_where_everything_fits_nothing_is_switched_on():
    architecture, setup, _ = options("jax")
    for setting in emit(Estimator(architecture), setup, 1 << 40, ("all",)):
        assert setting.policy == "none"
        assert setting.time_overhead == 0
    texts = {s.system: s.text for s in emit(Estimator(architecture), setup, 1 << 40, ("all",))}
    assert "activation_checkpointing=False" in texts["transformers"]
    assert "--recompute" not in texts["megatron"]
    assert "activation_checkpointing" not in json.loads(texts["deepspeed"])


@pytest.mark.filterwarnings("ignore")
def test_training_arguments_accept_every_option(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    _, setup, found = options("transformers", precision="bf16-autocast")
    for option in found:
        given = huggingface.arguments(option, setup)
        given.pop("bf16", None)  # needs hardware
        try:
            arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
        except TypeError:
            pytest.skip("an older transformers has other names")
        assert bool(arguments.activation_checkpointing) == (option.policy != "none")


@pytest.mark.filterwarnings("ignore")
def test_transformers_rebuild_each_nth_layer():
    """What `every_n_layers` does in a real model is what the policy says: the same number of layers is checkpointed."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=5,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=16,
    )
    for n in (1, 2, 3):
        model = transformers.LlamaForCausalLM(config)
        if not hasattr(model, "activation_checkpointing_enable"):
            pytest.skip("an older transformers has no every_n_layers")
        model.activation_checkpointing_enable(every_n_layers=n)
        real = sum(bool(layer.gradient_checkpointing) for layer in model.model.layers)
        assert real == sum(index % n == 0 for index in range(5))


@pytest.mark.filterwarnings("ignore")
def test_accelerate_accepts_every_option():
    library = pytest.importorskip("accelerate")
    yaml = pytest.importorskip("yaml")
    _, setup, found = options("accelerate", data_parallel=8, zero=3)
    known = set(library.FullyShardedDataParallelPlugin.__dataclass_fields__) | {
        "version",
        "offload_params",
        "auto_wrap_policy",
    }
    for option in found:
        loaded = yaml.safe_load(accelerate.SYSTEM.write(option, architecture_of(LLAMA), setup))
        assert loaded["num_processes"] == 8
        names = {name.removeprefix("fsdp_") for name in loaded["fsdp_config"]}
        assert names <= known


@pytest.mark.filterwarnings("ignore")
def test_accelerate_reads_degrees_of_parallelism():
    pytest.importorskip("accelerate")
    yaml = pytest.importorskip("yaml")
    from accelerate.parallelism_config import ParallelismConfig

    _, setup, found = options("accelerate", data_parallel=4, zero=3, tensor_parallel=2, context_parallel=2)
    loaded = yaml.safe_load(accelerate.SYSTEM.write(found[0], architecture_of(LLAMA), setup))
    given = {name.removeprefix("parallelism_config_"): size for name, size in loaded["parallelism_config"].items()}
    assert given == {"dp_shard_size": 4, "tp_size": 2, "cp_size": 2}
    assert set(given) <= set(ParallelismConfig.__dataclass_fields__)


def test_degrees_that_a_setting_does_not_say_are_named():
    architecture, setup, _ = options("jax", pipeline_parallel=2, accumulation=4, tensor_parallel=2)
    found = {s.system: s for s in emit(Estimator(architecture), setup, 1 << 40, ("all",))}
    notes = {name: next((n for n in s.notes if "set elsewhere" in n), "") for name, s in found.items()}
    assert "tensor_parallel 2, pipeline_parallel 2" in notes["transformers"]
    assert notes["accelerate"].endswith("pipeline_parallel 2")
    assert notes["megatron"] == notes["torchtitan"] == ""


def test_torchtitan_writes_python():
    architecture, setup, found = options("torchtitan", tensor_parallel=2)
    texts = [SYSTEMS["torchtitan"].write(option, architecture, setup) for option in found]
    for text in texts:
        lines = [line for line in text.splitlines() if not line.startswith("from ")]
        compile("dict(" + "\n".join(lines) + "\n)", "setting", "eval")
        assert "tensor_parallel_degree=2" in text
    assert [("FullAC" in t, "SelectiveAC" in t) for t in texts] == [(False, False), (True, False), (False, True)]


@pytest.mark.filterwarnings("ignore")
def test_jax_knows_the_names():
    """Where it is installed: the policies exist."""
    jax = pytest.importorskip("jax")
    for option in options("jax")[2]:
        assert hasattr(jax.checkpoint_policies, option.values["policy"])


def test_deepspeed_writes_json():
    _, setup, found = options("deepspeed", data_parallel=8, zero=3, offload="optimizer,parameters")
    known = {
        "partition_activations", "cpu_checkpointing", "contiguous_memory_optimization", "number_checkpoints",
        "synchronize_checkpoint_boundary", "profile",
    }  # fmt: skip
    for option in found:
        values = json.loads(deepspeed.SYSTEM.write(option, architecture_of(LLAMA), setup))
        assert set(values.get("activation_checkpointing", {})) <= known
        assert values["zero_optimization"]["stage"] == 3
        assert values["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_megatron_flags(config):
    architecture, setup, found = options(
        "megatron", config, attention="eager", tensor_parallel=2, sequence_parallel=True
    )
    allowed = {"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"}
    for option in found:
        values = option.values
        assert set(values.get("modules", ())) <= allowed
        assert ("method" in values) == ("num_layers" in values) == (values.get("granularity") == "full")
        assert "--sequence-parallel" in megatron.flags(option, setup)
        given = megatron.config_arguments(option, architecture, setup)
        assert given["num_layers"] == architecture.num_layers
    modules = {name for option in found for name in option.values.get("modules", ())}
    assert modules == (
        {"layernorm", "core_attn", "mlp"}
        if config is LLAMA
        else {"layernorm", "core_attn", "moe_act", "moe", "shared_experts"}
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_megatron_accepts_every_option(config):
    pytest.importorskip("megatron.core")
    architecture, setup, found = options("megatron", config, attention="eager")
    for option in found:
        assert megatron._validate(option, architecture, setup).startswith("accepted")


def test_megatron_says_when_it_could_not_ask():
    architecture, setup, found = options("megatron")
    verdict = megatron._validate(found[0], architecture, setup)
    assert verdict.startswith(("not validated", "accepted"))


def test_maxtext_ladder():
    """The named policies hold less and less, in the order in which MaxText's guide lists them."""
    kept = []
    for name in (
        "none",
        "minimal_with_context",
        "save_dot_with_context_except_mlp",
        "save_dot_except_mlp",
        "save_qkv_proj",
        "full",
    ):
        answer = keepwise.estimate(LLAMA, sequence=1024, kernels="fused", checkpointing=maxtext.POLICIES[name][0])
        kept.append(answer.kept_bytes)
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == len(kept)


def test_keras_names_existing_layers():
    architecture, setup, found = options("keras")
    for option, system in product(found, (SYSTEMS["keras"],)):
        text = system.write(option, architecture, setup)
        compile(text, "setting", "exec")
        assert option.values["mode"] is None or "RematScope" in text
