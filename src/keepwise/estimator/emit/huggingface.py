"""Hugging Face `TrainingArguments`.

`activation_checkpointing_kwargs` knows `every_n_layers` (each n-th layer is rebuilt, the others keep everything) and `offload`. In
older versions the names begin with `gradient_`, and both keys are missing.
"""

from __future__ import annotations

from typing import Any

from keepwise.estimator.emit.choice import PARALLEL, Option, System, numbered
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture

_OPTIMIZERS = {
    "adamw": "adamw_torch_fused",
    "adamw8bit": "adamw_bnb_8bit",
    "lion": "lion_32bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    options = [Option(policy="none", values={})]
    options += [
        Option(policy=f"nth:{n}", values={"every_n_layers": n}) for n in numbered("nth", architecture.num_layers)
    ]
    options.append(Option(policy="full", values={"every_n_layers": 1, "offload": True}, offload=True))
    del setup
    return options


def arguments(option: Option, setup: Setup) -> dict[str, Any]:
    """Keyword arguments of `TrainingArguments`."""
    values: dict[str, Any] = {
        "per_device_train_batch_size": setup.batch,
        "gradient_accumulation_steps": setup.accumulation,
        "activation_checkpointing": bool(option.values),
    }
    if option.values:
        extra = {k: v for k, v in option.values.items() if (k, v) != ("every_n_layers", 1)}
        values["activation_checkpointing_kwargs"] = {"use_reentrant": False, **extra}
    if setup.precision in ("bf16", "bf16-autocast", "bf16-fp32-grads"):
        values["bf16"] = True
    elif setup.precision.startswith("fp16"):
        values["fp16"] = True
    if setup.optimizer in _OPTIMIZERS:
        values["optim"] = _OPTIMIZERS[setup.optimizer]
    if setup.loss == "fused":
        values["use_liger_kernel"] = True
    return values


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    lines = ",\n    ".join(f"{name}={value!r}" for name, value in arguments(option, setup).items())
    del architecture
    return f"TrainingArguments(\n    {lines},\n)"


SYSTEM = System(
    title="Hugging Face TrainingArguments",
    options=_options,
    write=_write,
    limits=("whole layers only: no choice of tensors inside a layer",),
    unwritten=PARALLEL,
    checked="transformers 5.24",
)
