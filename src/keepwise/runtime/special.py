"""Ops that must be replayed with other arguments than they were called with.

Batch normalisation in training mode moves its running statistics, although the schemas of the older overloads do not say so
and no version counter shows it. Its results do not depend on them: the replay passes none.
"""

from __future__ import annotations

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
