"""Everything about a run that is not the architecture, checked."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from keepwise._errors import UsageError
from keepwise.estimator.context import AttentionKernel
from keepwise.estimator.ends import Loss
from keepwise.estimator.policy import Policy, parse_policy
from keepwise.estimator.precision import PRECISIONS, QUANTISATIONS, check_optimizer, precision_of

Schedule = Literal["gpipe", "1f1b", "interleaved", "zb-h1", "dualpipe"]
Kernels = Literal["eager", "fused"]
Offload = Literal["optimizer", "parameters", "activations"]

_ALL_TARGETS = frozenset({"q", "k", "v", "o", "gate", "up", "down"})
_TARGET_NAMES = {
    "attention": frozenset({"q", "k", "v", "o"}),
    "mlp": frozenset({"gate", "up", "down"}),
    "all-linear": _ALL_TARGETS,
    **{name: frozenset({name}) for name in _ALL_TARGETS},
    **{f"{name}_proj": frozenset({name}) for name in _ALL_TARGETS},
}


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """How the model is trained, and on what."""

    batch: int = 1
    """sequences in one micro-batch on one data-parallel rank."""
    sequence: int = 2048
    """tokens in one sequence."""
    source_sequence: int | None = None
    """tokens in one source sequence of an encoder-decoder; as `sequence` by default."""
    precision: str = "bf16"
    """key of `precision.PRECISIONS`."""
    attention: AttentionKernel = "sdpa"
    """attention kernel."""
    kernels: Kernels = "eager"
    """`eager`: operators as the Hugging Face code calls them; `fused`: one kernel a norm, activation and rotation."""
    loss: Loss = "eager"
    """how logits and loss are computed."""
    checkpointing: Policy = msgspec.field(default_factory=Policy)
    """what of the activations is rebuilt."""
    budget_bytes: int | None = None
    """bytes that the `keepwise` policy plans for."""
    optimizer: str = "adamw"
    """key of `precision.OPTIMIZERS`."""
    optimizer_kernel: Literal["fused", "foreach"] = "fused"
    """`foreach` makes temporary copies of the size of the parameters while it steps."""
    gradients: Literal["held", "fresh"] = "held"
    """gradient buffers exist all the time, or appear during backward and are freed before the next forward."""
    output_held: bool = True
    """user code keeps the model's output (the logits) until the step ends."""
    accumulation: int = 1
    """micro-batches a step."""
    lora_rank: int = 0
    """rank of the adapters; 0 trains all parameters."""
    lora_targets: frozenset[str] = frozenset({"q", "v"})
    """projections with adapters."""
    lora_dropout: float = 0.0
    """dropout before the adapters."""
    quantised: str | None = None
    """key of `precision.QUANTISATIONS`: the frozen base in few bits."""
    tensor_parallel: int = 1
    """ranks that share each matrix."""
    sequence_parallel: bool = False
    """whether they share norms, dropouts and residuals too."""
    context_parallel: int = 1
    """ranks that share each sequence."""
    pipeline_parallel: int = 1
    """stages."""
    schedule: Schedule = "1f1b"
    """order of micro-batches in the pipeline."""
    virtual_stages: int = 2
    """model chunks a rank under the interleaved schedule."""
    data_parallel: int = 1
    """replicas."""
    expert_parallel: int = 1
    """ranks that share the experts; divides `data_parallel`."""
    zero: int = 0
    """what the replicas share: 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    offload: frozenset[Offload] = frozenset()
    """what lies in host memory."""
    device: str = "h100"
    """device that costs are computed for; "cpu" changes which kernels run."""
    efficiency: float = 0.5
    """share of the device's peak rate that matrix products reach."""

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            UsageError: with the field, its value and what is accepted.
        """
        for name in (
            "batch", "sequence", "accumulation", "tensor_parallel", "context_parallel", "pipeline_parallel",
            "virtual_stages", "data_parallel", "expert_parallel",
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"{name} must be a whole number of at least 1, not {value!r}")
        for name, kind in (
            ("attention", AttentionKernel), ("kernels", Kernels), ("loss", Loss), ("schedule", Schedule),
        ):  # fmt: skip
            value = getattr(self, name)
            if value not in get_args(kind):
                raise UsageError(f"{name} must be one of {', '.join(get_args(kind))}, not {value!r}")
        precision_of(self.precision)
        check_optimizer(self.optimizer)
        if self.gradients not in ("held", "fresh"):
            raise UsageError(f"gradients must be held or fresh, not {self.gradients!r}")
        if self.optimizer_kernel not in ("fused", "foreach"):
            raise UsageError(f"optimizer_kernel must be fused or foreach, not {self.optimizer_kernel!r}")
        if self.zero not in (0, 1, 2, 3):
            raise UsageError(f"zero must be 0, 1, 2 or 3, not {self.zero!r}")
        if self.lora_rank < 0:
            raise UsageError(f"lora_rank must be 0 or more, not {self.lora_rank}")
        if self.quantised is not None and self.quantised not in QUANTISATIONS:
            raise UsageError(f"quantised must be one of {', '.join(QUANTISATIONS)}, not {self.quantised!r}")
        if self.quantised is not None and not self.lora_rank:
            raise UsageError("a quantised base cannot be trained itself: give lora_rank too")
        if self.sequence % self.context_parallel:
            raise UsageError(f"sequence {self.sequence} is not divisible by context_parallel {self.context_parallel}")
        if self.data_parallel % self.expert_parallel:
            raise UsageError(
                f"data_parallel {self.data_parallel} is not divisible by expert_parallel {self.expert_parallel}"
            )
        unknown = self.offload - set(get_args(Offload))
        if unknown:
            raise UsageError(
                f"offload {', '.join(sorted(unknown))} is not known; known: {', '.join(get_args(Offload))}"
            )
        if not 0 < self.efficiency <= 1:
            raise UsageError(f"efficiency must be above 0 and at most 1, not {self.efficiency}")

    @property
    def num_devices(self) -> int:
        """Devices of the whole run."""
        return self.tensor_parallel * self.context_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def shards(self) -> int:
        """Ranks that hold the same parameters: data and context parallel ones."""
        return self.data_parallel * self.context_parallel


def lora_targets(text: str) -> frozenset[str]:
    """Targets from "q,v", "all-linear", "attention" or PEFT's module names.

    Raises:
        UsageError: when a name is not known.
    """
    chosen: set[str] = set()
    for name in text.replace(" ", "").split(","):
        if name not in _TARGET_NAMES:
            raise UsageError(f"adapter target {name!r} is not known; known: {', '.join(sorted(_TARGET_NAMES))}")
        chosen |= _TARGET_NAMES[name]
    return frozenset(chosen)


__all__ = ["PRECISIONS", "Kernels", "Offload", "Policy", "Schedule", "Setup", "lora_targets", "parse_policy"]
