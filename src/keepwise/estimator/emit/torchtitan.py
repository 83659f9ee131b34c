"""torchtitan: the `[activation_checkpoint]` section."""

from __future__ import annotations

from keepwise.estimator.emit.choice import Option, System, numbered
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del setup
    options = [Option(policy="none", values={"mode": "none"}), Option(policy="full", values={"mode": "full"})]
    options.append(Option(policy="sac:2", values={"mode": "selective", "selective_ac_option": "op"}))
    options += [
        Option(policy=f"nth:{n}", values={"mode": "selective", "selective_ac_option": str(n)})
        for n in numbered("nth", architecture.num_layers)
    ]
    return options


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    lines = ["[activation_checkpoint]", *(f'{name} = "{value}"' for name, value in option.values.items())]
    lines += ["", "[training]", f"local_batch_size = {setup.batch}", f"seq_len = {setup.sequence}"]
    degrees = {
        "tensor_parallel_degree": setup.tensor_parallel,
        "context_parallel_degree": setup.context_parallel,
        "pipeline_parallel_degree": setup.pipeline_parallel,
        "expert_parallel_degree": setup.expert_parallel,
    }
    if any(degree > 1 for degree in degrees.values()):
        lines += ["", "[parallelism]", *(f"{name} = {degree}" for name, degree in degrees.items() if degree > 1)]
    return "\n".join(lines)


SYSTEM = System(
    title="torchtitan",
    options=_options,
    write=_write,
    limits=(
        'selective "op" keeps attention and every second matrix product of every layer, a number whole layers; '
        "nothing between, and memory_budget needs torch.compile",
    ),
    kernels="fused",
    checked="torchtitan's ActivationCheckpointConfig",
)
