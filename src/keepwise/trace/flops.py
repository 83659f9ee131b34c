"""Floating-point operations of one call, by torch's own table."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry


def flops_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    """FLOPs of a call; 0 for ops that the table does not list (they are bound by memory)."""
    formula = flop_registry.get(getattr(func, "_overloadpacket", None))
    if formula is None:
        return 0
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except (
        TypeError,
        ValueError,
        AssertionError,
        IndexError,
        torch.cuda.CudaError,
    ):  # an overload that the formula does not know
        return 0
