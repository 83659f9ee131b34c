"""JAX: `jax.checkpoint` of each block with a policy of `jax.checkpoint_policies`."""

from __future__ import annotations

from keepwise.estimator.emit.choice import PARALLEL, Option, System
from keepwise.estimator.emit.maxtext import POLICIES
from keepwise.estimator.setup import Setup
from keepwise.estimator.spec import Architecture

_PRODUCTS = POLICIES["minimal"][0]

NAMES = {
    "everything_saveable": "none",
    "dots_saveable": POLICIES["minimal_with_context"][0],
    "dots_with_no_batch_dims_saveable": _PRODUCTS,
    "nothing_saveable": "full",
}
"""Policies of `jax.checkpoint_policies` and what they keep of a block (`dots_saveable` keeps the attention products too)."""


def _options(architecture: Architecture, setup: Setup) -> list[Option]:
    del architecture, setup
    options = [Option(policy=policy, values={"policy": name}) for name, policy in NAMES.items()]
    offload = "offload_dot_with_no_batch_dims"
    options.append(Option(policy=_PRODUCTS, values={"policy": offload}, offload=True))
    return options


def _write(option: Option, architecture: Architecture, setup: Setup) -> str:
    del architecture, setup
    name = option.values["policy"]
    if option.offload:
        name = f'{name}("device", "pinned_host")'
    return f"block = jax.checkpoint(block, policy=jax.checkpoint_policies.{name})"


SYSTEM = System(
    title="JAX",
    options=_options,
    write=_write,
    limits=("one rule for all products of a block; XLA may fuse or rebuild further on its own",),
    kernels="fused",
    unwritten=PARALLEL,
    checked="jax 0.10.2",
)
