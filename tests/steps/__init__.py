"""Synthetic `Step`s for tests: a builder, a few families, and a strategy for random ones."""

from __future__ import annotations

from tests.steps.builder import StepBuilder, Tensor, check_step, msgspec_replace
from tests.steps.families import accumulated, chain, gpt_like, in_place_stream, moe_like, read_twice, unet_like
from tests.steps.random import random_steps

__all__ = [
    "StepBuilder",
    "Tensor",
    "accumulated",
    "chain",
    "check_step",
    "gpt_like",
    "in_place_stream",
    "moe_like",
    "msgspec_replace",
    "random_steps",
    "read_twice",
    "unet_like",
]
