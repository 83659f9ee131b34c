"""Accelerate with FSDP2: `fsdp_config` of an Accelerate configuration file."""

from __future__ import annotations

from keepwise.estimator.emit.choice import Option, System
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del architecture, setup
    return [
        Option(policy="none", values={"fsdp_activation_checkpointing": False}),
        Option(policy="full", values={"fsdp_activation_checkpointing": True}),
        Option(
            policy="full",
            values={"fsdp_activation_checkpointing": True, "fsdp_activation_checkpointing_offload": True},
            offload=True,
        ),
    ]


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    precision = "no" if setup.precision == "fp32" else setup.precision.split("-")[0]
    lines = [
        "distributed_type: FSDP",
        f"mixed_precision: {precision}",
        f"num_processes: {setup.num_devices}",
        f"gradient_accumulation_steps: {setup.accumulation}",
        "fsdp_config:",
        "  fsdp_version: 2",
        f"  fsdp_reshard_after_forward: {str(setup.zero >= 3).lower()}",
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
        f"  fsdp_offload_params: {str('parameters' in setup.offload).lower()}",
    ]
    lines += [f"  {name}: {str(value).lower()}" for name, value in option.values.items()]
    sizes = {"tp_size": setup.tensor_parallel, "cp_size": setup.context_parallel}
    if any(size > 1 for size in sizes.values()):
        sizes = {"dp_shard_size" if setup.zero else "dp_replicate_size": setup.data_parallel, **sizes}
        lines.append("parallelism_config:")
        lines += [f"  parallelism_config_{name}: {size}" for name, size in sizes.items() if size > 1]
    return "\n".join(lines)


SYSTEM = System(
    title="Accelerate, FSDP2",
    options=_options,
    write=_write,
    limits=("every wrapped layer or none: no number of layers, no choice of tensors",),
    unwritten=("pipeline_parallel", "expert_parallel"),
    checked="accelerate 1.15",
)
