"""MaxText: `remat_policy`, by the names of what is kept (`save_only_these_names`)."""

from __future__ import annotations

from keepwise.estimator.emit.choice import PARALLEL, Option, System
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture

_PROJECTIONS = "query,key,value,qkv"
_INNER = "gate,up,gate_up"

POLICIES: dict[str, tuple[str, bool]] = {
    "none": ("none", False),
    "minimal_with_context": (f"save:{_PROJECTIONS},kernel,output,{_INNER},down", False),
    "minimal": (f"save:{_PROJECTIONS},output,{_INNER},down", False),
    "save_dot_with_context_except_mlp": (f"save:{_PROJECTIONS},kernel,output", False),
    "save_dot_except_mlpwi": (f"save:{_PROJECTIONS},output,down", False),
    "save_dot_except_mlp": (f"save:{_PROJECTIONS},output", False),
    "save_qkv_proj": (f"save:{_PROJECTIONS}", False),
    "save_out_proj": ("save:output", False),
    "full": ("full", False),
    "minimal_offloaded": (f"save:{_PROJECTIONS},output,{_INNER},down", True),
    "qkv_proj_offloaded": (f"save:{_PROJECTIONS}", True),
}
"""Names of policies: what each keeps, and whether that goes to the host."""


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del architecture, setup
    return [
        Option(policy=policy, values={"remat_policy": name}, offload=offload)
        for name, (policy, offload) in POLICIES.items()
    ]


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture
    lines = [f"remat_policy={option.values['remat_policy']}", f"per_device_batch_size={setup.batch}"]
    lines.append(f"max_target_length={setup.sequence}")
    return " ".join(lines)


SYSTEM = System(
    title="MaxText",
    options=_options,
    write=_write,
    limits=(
        "named projections only, the same in every layer; the custom policy places each of them on device, host or nowhere by hand",
    ),
    kernels="fused",
    unwritten=PARALLEL,
    checked="MaxText 0.2.5",
)
