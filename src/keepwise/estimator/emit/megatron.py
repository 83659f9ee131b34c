"""Megatron-Core: `--recompute-granularity`, `--recompute-method`, `--recompute-num-layers`, `--recompute-modules`.

`full` with `uniform` rebuilds chunks of N layers, with `block` the first N layers of each stage; `selective` rebuilds parts:
`core_attn`, `mlp`, `moe`, `shared_experts` inside a checkpoint, `layernorm`, `moe_act`, `mla_up_proj` together with their results.
"""

from __future__ import annotations

import importlib.util
from itertools import combinations
from typing import Any

from keepwise.estimator.emit.choice import Option, System, has_dense, has_experts, layers_a_stage
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture, Experts

_PARTS = {
    "core_attn": "attention.core",
    "layernorm": "norm",
    "mlp": "mlp",
    "moe": "moe",
    "moe_act": "moe.experts.activation",
    "shared_experts": "moe.shared",
    "mla_up_proj": "attention.latent_up",
}


def _parts(architecture: Architecture, setup: Setup) -> list[str]:
    """Modules that this model has; the core attention only where it stores its matrix."""
    block = architecture.stacks[-1].blocks[-1]
    parts = ["layernorm"]
    if setup.attention == "eager":
        parts.append("core_attn")
    if has_dense(architecture):
        parts.append("mlp")
    if has_experts(architecture):
        parts += ["moe_act", "moe"]
        mixture = block.feed_forward
        if isinstance(mixture, Experts) and mixture.shared is not None:
            parts.append("shared_experts")
    if block.attention.latent is not None:
        parts.append("mla_up_proj")
    return parts


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    stage = layers_a_stage(architecture, setup)
    options = [Option(policy="none", values={})]
    for count in (1, 2, 3):
        for chosen in combinations(_parts(architecture, setup), count):
            if "moe" in chosen and ({"moe_act", "shared_experts"} & set(chosen)):
                continue
            policy = "selective:" + ",".join(_PARTS[name] for name in chosen)
            options.append(Option(policy=policy, values={"granularity": "selective", "modules": list(chosen)}))
    for layers in range(1, min(stage, 4) + 1):
        values = {"granularity": "full", "method": "uniform", "num_layers": layers}
        options.append(Option(policy=f"every:{layers}", values=values))
    if setup.pipeline_parallel == 1:  # `block` counts layers of each stage, the policy counts those of the model
        for layers in range(1, stage):
            values = {"granularity": "full", "method": "block", "num_layers": layers}
            options.append(Option(policy=f"first:{layers}", values=values))
    return options


def flags(option: Option, setup: Setup) -> list[str]:
    """Command-line flags."""
    result: list[str] = []
    values = option.values
    if values:
        result.append(f"--recompute-granularity {values['granularity']}")
    if "method" in values:
        result += [f"--recompute-method {values['method']}", f"--recompute-num-layers {values['num_layers']}"]
    if "modules" in values:
        result.append(f"--recompute-modules {' '.join(values['modules'])}")
    result.append(f"--micro-batch-size {setup.batch}")
    for name, degree in (
        ("tensor-model-parallel-size", setup.tensor_parallel),
        ("pipeline-model-parallel-size", setup.pipeline_parallel),
        ("context-parallel-size", setup.context_parallel),
        ("expert-model-parallel-size", setup.expert_parallel),
    ):
        if degree > 1:
            result.append(f"--{name} {degree}")
    if setup.sequence_parallel:
        result.append("--sequence-parallel")
    if setup.zero >= 1:
        result.append("--use-distributed-optimizer")
    return result


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    return " \\\n".join(flags(option, setup))


def config_arguments(option: Option, architecture: Architecture, setup: Setup) -> dict[str, Any]:
    """Keyword arguments of `megatron.core.transformer.TransformerConfig`."""
    attention = architecture.stacks[-1].blocks[-1].attention
    values: dict[str, Any] = {
        "num_layers": architecture.num_layers,
        "hidden_size": architecture.width,
        "num_attention_heads": attention.heads,
        "num_query_groups": attention.kv_heads,
        "tensor_model_parallel_size": setup.tensor_parallel,
        "sequence_parallel": setup.sequence_parallel and setup.tensor_parallel > 1,
    }
    chosen = option.values
    if chosen:
        values["recompute_granularity"] = chosen["granularity"]
        values["recompute_method"] = chosen.get("method")
        values["recompute_num_layers"] = chosen.get("num_layers")
        values["recompute_modules"] = chosen.get("modules")
    if has_experts(architecture):
        mixtures = [b.feed_forward for s in architecture.stacks for b in s.blocks]
        mixture = next(m for m in mixtures if isinstance(m, Experts))
        values.update(
            num_moe_experts=mixture.num, moe_router_topk=mixture.active, moe_grouped_gemm=True, add_bias_linear=False
        )
    return values


def _validate(option: Option, architecture: Architecture, setup: Setup) -> str:
    """Build a `TransformerConfig`, which checks its recomputation fields, where Megatron-Core is installed."""
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        return "not validated: megatron-core is not installed"
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import __version__  # type: ignore[import-not-found]
        from megatron.core.transformer.transformer_config import (  # type: ignore[import-not-found]
            MLATransformerConfig,
            TransformerConfig,
        )

        latent = architecture.stacks[-1].blocks[-1].attention.latent is not None
        try:
            (MLATransformerConfig if latent else TransformerConfig)(**config_arguments(option, architecture, setup))
        except (ValueError, AssertionError, TypeError) as error:
            return f"megatron-core {__version__} refuses it: {error}"
    return f"accepted by the configuration class of megatron-core {__version__}"


SYSTEM = System(
    title="Megatron-Core",
    options=_options,
    write=_write,
    limits=("whole modules, the same in each layer of a stage; the last layers of a `block` keep everything",),
    kernels="fused",
    checked="megatron-core 0.16.1",
    validate=_validate,
)
