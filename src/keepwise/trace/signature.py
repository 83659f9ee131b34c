"""The key under which ops cost the same and behave the same: target, shapes, dtypes, strides and literals."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor

_dtype_names: dict[torch.dtype, str] = {}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    name = _dtype_names.get(dtype)
    if name is None:
        name = _dtype_names[dtype] = str(dtype).removeprefix("torch.")
    return name


def signature_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """One line of text that is equal for equal calls, whatever the numbers in the tensors."""
    parts = [str(func)]
    parts.extend(_describe(a) for a in args)
    parts.extend(f"{name}={_describe(a)}" for name, a in kwargs.items())
    return "|".join(parts)


def _describe(a: Any) -> str:
    if isinstance(a, Tensor):
        if a.layout is not torch.strided or a.is_nested:
            return f"{dtype_name(a.dtype)}:{a.layout}"
        shape = ",".join(map(str, a.shape))
        where = "" if a.device.type == "cpu" else f"@{a.device}"
        if a.is_contiguous():
            return f"{dtype_name(a.dtype)}[{shape}]{where}"
        return f"{dtype_name(a.dtype)}[{shape}]({','.join(map(str, a.stride()))}){where}"
    if type(a) is list or type(a) is tuple:
        return f"({' '.join(map(_describe, a))})"
    if isinstance(a, torch.Generator):
        return f"generator@{a.device}"
    if a is None or isinstance(a, (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)):
        return repr(a)
    return type(a).__qualname__
