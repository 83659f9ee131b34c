"""Ops that are replayed with other arguments than they were called with, whose results have gaps, or that must not be replayed.

Batch normalisation in training mode moves its running statistics, although the schemas of the older overloads do not say so
and no version counter shows it. Its results do not depend on them: the replay passes none.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

# op -> (positions of the running statistics, position of the `training` flag)
_STATISTICS: dict[Any, tuple[tuple[int, int], int]] = {}
for _name, _where in {
    "native_batch_norm": ((3, 4), 5),
    "cudnn_batch_norm": ((3, 4), 5),
    "miopen_batch_norm": ((3, 4), 5),
}.items():
    if hasattr(aten, _name):
        _STATISTICS[getattr(aten, _name).default] = _where


def replay_arguments(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any] | None]:
    """Arguments with which a replay gives the same results and writes nothing that it does not own."""
    where = _STATISTICS.get(func)
    if where is None:
        return args, kwargs
    statistics, training = where
    if len(args) <= training or not args[training]:
        return args, kwargs
    new = list(args)
    for i in statistics:
        new[i] = None
    return tuple(new), kwargs


# op -> positions of results that are the kernel's own notes for its backward, laid out in rows that it does not fill
_WITH_GAPS: dict[Any, frozenset[int]] = {
    aten._ctc_loss.default: frozenset((1,)),  # a row has room for the longest text
    aten._ctc_loss.Tensor: frozenset((1,)),
}
if hasattr(aten, "mkldnn_rnn_layer"):
    _WITH_GAPS[aten.mkldnn_rnn_layer.default] = frozenset((3,))


def results_with_gaps(func: Any) -> frozenset[int]:
    """Results that hold bytes which nobody wrote and nobody reads: two runs differ there, and what follows does not."""
    return _WITH_GAPS.get(func, frozenset())


_COMMUNICATES = frozenset(
    ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "symm_mem")
)


@functools.cache
def is_opaque(func: Any) -> str:
    """Why an op must not run a second time, whatever it computes; empty if it may.

    A higher-order operator runs functions of the user's, and so does an operator that was registered from Python.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return "a higher-order operator"
    if func.namespace in _COMMUNICATES:
        return "it talks to other processes"
    if is_python(func):
        return "an operator written in Python, whose code runs once"
    return ""


@functools.cache
def is_python(func: Any) -> bool:
    """Whether an operator was registered from Python."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    name = func._schema.name
    known = getattr(getattr(torch, "_library", None), "custom_ops", None)
    if name in getattr(known, "OPDEFS", ()):
        return True
    prefix = f"{name.replace('::', '/')}/"
    registered: Any = getattr(torch.library, "_impls", ())
    return func.namespace not in ("aten", "prims", "prim") and any(key.startswith(prefix) for key in registered)
