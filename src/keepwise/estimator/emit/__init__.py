"""Settings for the systems people run: the nearest that each can express to a wanted peak, and what is lost against our plan.

One file a system; each says which policies it can express and writes the chosen one down in its own words. The choice is the same
for all: the fastest that stays at or under the wanted peak, else the one with the smallest peak.
"""

from __future__ import annotations

from keepwise._errors import UsageError
from keepwise.estimator.compute import Estimator
from keepwise.estimator.emit import accelerate, deepspeed, huggingface, jax, keras, maxtext, megatron, torchtitan
from keepwise.estimator.emit.choice import Setting, System, choose
from keepwise.estimator.setup import Setup

SYSTEMS: dict[str, System] = {
    "transformers": huggingface.SYSTEM,
    "accelerate": accelerate.SYSTEM,
    "deepspeed": deepspeed.SYSTEM,
    "megatron": megatron.SYSTEM,
    "torchtitan": torchtitan.SYSTEM,
    "maxtext": maxtext.SYSTEM,
    "jax": jax.SYSTEM,
    "keras": keras.SYSTEM,
}
"""All systems by the name that `--emit` takes."""


def emit(estimator: Estimator, setup: Setup, budget: int, systems: tuple[str, ...]) -> list[Setting]:
    """The nearest setting of each system.

    Args:
        estimator: of the architecture.
        setup: the run; its own checkpointing policy is replaced.
        budget: wanted peak, bytes on one device.
        systems: names of `SYSTEMS`, or "all".

    Raises:
        UsageError: when a system is not known.
    """
    names = tuple(SYSTEMS) if "all" in systems else systems
    for name in names:
        if name not in SYSTEMS:
            raise UsageError(f"system {name!r} is not known; known: all, {', '.join(SYSTEMS)}")
    return [choose(name, SYSTEMS[name], estimator, setup, budget) for name in names]


__all__ = ["SYSTEMS", "Setting", "System", "emit"]
