"""DeepSpeed's JSON: `activation_checkpointing`, and the ZeRO part that goes with it.

The section only configures `deepspeed.checkpointing.checkpoint`: model code has to call that. Hugging Face models do not; there the
switch is the Trainer's.
"""

from __future__ import annotations

import json
from typing import Any

from keepwise.estimator.emit.choice import PARALLEL, Option, System
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    shared = setup.tensor_parallel > 1
    return [
        Option(policy="none", values={}),
        Option(policy="full", values={"partition_activations": shared, "number_checkpoints": architecture.num_layers}),
        Option(
            policy="full",
            values={
                "partition_activations": shared,
                "cpu_checkpointing": True,
                "contiguous_memory_optimization": shared,
                "number_checkpoints": architecture.num_layers,
            },
            offload=True,
        ),
    ]


def configuration(option: Option, setup: Setup) -> dict[str, Any]:
    """The configuration as plain data."""
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": setup.batch,
        "gradient_accumulation_steps": setup.accumulation,
    }
    if option.values:
        values["activation_checkpointing"] = dict(option.values)
    if setup.zero:
        zero: dict[str, Any] = {"stage": setup.zero}
        if "optimizer" in setup.offload:
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if "parameters" in setup.offload and setup.zero == 3:
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        values["zero_optimization"] = zero
    if setup.precision.startswith("bf16"):
        values["bf16"] = {"enabled": True}
    elif setup.precision.startswith("fp16"):
        values["fp16"] = {"enabled": True}
    return values


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    return json.dumps(configuration(option, setup), indent=2)


SYSTEM = System(
    title="DeepSpeed",
    options=_options,
    write=_write,
    limits=(
        "the section has an effect only where the model calls deepspeed.checkpointing.checkpoint; each such call is rebuilt whole",
    ),
    unwritten=tuple(name for name in PARALLEL if name != "zero"),
    checked="DeepSpeed's configuration reference",
)
