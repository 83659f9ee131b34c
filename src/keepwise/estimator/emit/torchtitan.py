"""torchtitan: `activation_checkpoint` of the trainer's configuration.

From 0.3 on a configuration is Python, and the choice is among `FullAC`, `SelectiveAC` (attention, and the first, third, ... matrix
product of each block) and `MemoryBudgetAC`, which leaves it to the compiler. Before, it was a TOML section, which could also
rebuild each n-th block.
"""

from __future__ import annotations

from keepwise.estimator.emit.choice import Option, System
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture

_CLASSES = {"full": "FullAC", "selective": "SelectiveAC"}


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del architecture, setup
    return [
        Option(policy="none", values={"mode": "none"}),
        Option(policy="full", values={"mode": "full"}),
        Option(policy="sac:2", values={"mode": "selective"}),
    ]


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    mode = option.values["mode"]
    chosen = f"{_CLASSES[mode]}.Config()" if mode in _CLASSES else "None"
    lines = [f"activation_checkpoint={chosen},"]
    if mode in _CLASSES:
        lines.insert(0, f"from torchtitan.distributed.activation_checkpoint import {_CLASSES[mode]}\n")
    lines.append(f"training=TrainingConfig(local_batch_size={setup.batch}, seq_len={setup.sequence}),")
    degrees = {
        "tensor_parallel_degree": setup.tensor_parallel,
        "context_parallel_degree": setup.context_parallel,
        "pipeline_parallel_degree": setup.pipeline_parallel,
        "expert_parallel_degree": setup.expert_parallel,
    }
    given = ", ".join(f"{name}={degree}" for name, degree in degrees.items() if degree > 1)
    if given:
        lines.append(f"parallelism=ParallelismConfig({given}),")
    old = f'mode = "{mode}"' + (', selective_ac_option = "op"' if mode == "selective" else "")
    lines.append(f"# before 0.3, in TOML: [activation_checkpoint] {old}")
    return "\n".join(lines)


SYSTEM = System(
    title="torchtitan",
    options=_options,
    write=_write,
    limits=("one of three modes for all blocks; memory_budget is a ratio, not bytes, and needs torch.compile",),
    kernels="fused",
    checked="torchtitan 0.3.0",
)
