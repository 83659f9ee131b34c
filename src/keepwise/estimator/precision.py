"""Bytes of a parameter's copies under the usual precisions, and of optimizers' states."""

from __future__ import annotations

import msgspec

from keepwise._errors import UsageError
from keepwise.estimator.graph import Parameter


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """How numbers are stored."""

    weight: int
    """bytes of a stored weight."""
    gradient: int
    """bytes of a stored gradient."""
    master: int
    """bytes of the optimizer's own copy of a weight, 0 without one."""
    state: int
    """bytes of a number of the optimizer's state."""
    compute: int
    """bytes of a number that a matrix product makes."""
    autocast: bool = False
    """weights and norms are fp32 and matrix products cast their inputs (`torch.autocast`)."""
    fp8: bool = False
    """matrix products keep their inputs in 8 bit, and hold two 8-bit copies of each weight (Transformer Engine)."""
    summary: str = ""
    """one line for people."""


_BF16 = Precision(
    weight=2,
    gradient=2,
    master=4,
    state=4,
    compute=2,
    summary="16-bit weights and gradients, fp32 master copy and optimizer state",
)
_AUTOCAST = Precision(
    weight=4,
    gradient=4,
    master=0,
    state=4,
    compute=2,
    autocast=True,
    summary="fp32 weights, torch.autocast around forward",
)

PRECISIONS: dict[str, Precision] = {
    "fp32": Precision(weight=4, gradient=4, master=0, state=4, compute=4, summary="everything in fp32"),
    "bf16": _BF16,
    "fp16": _BF16,
    "bf16-pure": Precision(
        weight=2, gradient=2, master=0, state=2, compute=2, summary="everything in bf16, no master copy"
    ),
    "bf16-fp32-grads": Precision(
        weight=2,
        gradient=4,
        master=4,
        state=4,
        compute=2,
        summary="bf16 weights, gradients added up in fp32, fp32 master copy",
    ),
    "bf16-autocast": _AUTOCAST,
    "fp16-autocast": _AUTOCAST,
    "fp8": Precision(
        weight=2, gradient=2, master=4, state=4, compute=2, fp8=True, summary="as bf16, matrix products on 8-bit inputs"
    ),
}

_BLOCK = 256  # numbers that share one scale in 8-bit optimizer states
_SMALL = 4096  # parameters below this keep 32-bit states (bitsandbytes: min_8bit_size)

OPTIMIZERS: dict[str, str] = {
    "adamw": "two moments a parameter",
    "adamw8bit": "two moments of 8 bit in blocks with a scale, fp32 for small parameters",
    "lion": "one moment a parameter",
    "adafactor": "one number a row and column of a matrix, one a parameter of a vector; no momentum",
    "sgd": "nothing",
    "sgd-momentum": "one moment a parameter",
    "muon": "one moment a parameter of hidden matrices, AdamW for tables and vectors",
    "none": "no optimizer counted",
}

QUANTISATIONS: dict[str, float] = {
    # NF4 in blocks of 64 with double quantisation: 0.127 bits of scales a parameter (Dettmers et al. 2023, QLoRA, section 3).
    "nf4": (4 + 0.127) / 8,
    "int8": 1.0,
}
"""Bytes of a parameter of a quantised base."""


def precision_of(name: str) -> Precision:
    """The precision of that name.

    Raises:
        UsageError: when there is none.
    """
    if name not in PRECISIONS:
        raise UsageError(f"precision {name!r} is not known; known: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


def check_optimizer(name: str) -> str:
    """The name itself.

    Raises:
        UsageError: when there is no such optimizer.
    """
    if name not in OPTIMIZERS:
        raise UsageError(f"optimizer {name!r} is not known; known: {', '.join(OPTIMIZERS)}")
    return name


def optimizer_bytes(parameter: Parameter, optimizer: str, state: int) -> float:
    """Bytes of state of all elements of `parameter`, undivided."""
    numel = parameter.numel
    if optimizer == "adamw" or (optimizer == "muon" and parameter.role != "matrix"):
        return 2 * state * numel
    if optimizer == "adamw8bit":
        small = parameter.rows * parameter.columns * (parameter.count if parameter.expert else 1) < _SMALL
        return 2 * 4 * numel if small else 2 * (1 + 4 / _BLOCK) * numel
    if optimizer in ("lion", "sgd-momentum", "muon"):
        return state * numel
    if optimizer == "adafactor":
        if parameter.columns == 1:
            return 4 * numel
        return 4 * (parameter.rows + parameter.columns) * parameter.count
    return 0
