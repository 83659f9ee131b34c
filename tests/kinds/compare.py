"""Bit for bit: copies of state, and what differs between two of them."""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def frozen(value: Any) -> Any:
    """A deep copy that later steps cannot reach."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: frozen(item) for key, item in value.items()}
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(frozen(item) for item in value)
    return copy.deepcopy(value)


def _parts(tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
    """The plain tensors that a tensor with another layout or class is made of; None for a plain one."""
    if tensor.is_nested:
        return {"values": tensor.values(), "offsets": tensor.offsets()}  # pyright: ignore[reportAttributeAccessIssue]
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return {name: getattr(tensor, name) for name in names}
    if tensor.layout is torch.sparse_coo:
        tensor = tensor.coalesce()
        return {"indices": tensor.indices(), "values": tensor.values()}
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return {"crow": tensor.crow_indices(), "col": tensor.col_indices(), "values": tensor.values()}
    if tensor.is_quantized:
        return {"int": tensor.int_repr(), "scale": torch.tensor(tensor.q_scale())}
    return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def tensor_difference(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Say how two tensors differ, or None: class, layout, shape, dtype, device, strides, bytes (NaN and -0 included)."""
    if type(a) is not type(b):
        return f"{type(a).__name__} is now {type(b).__name__}"
    if a.layout != b.layout or a.dtype != b.dtype or a.device != b.device:
        return f"{a.layout} {a.dtype} {a.device} is now {b.layout} {b.dtype} {b.device}"
    parts, other = _parts(a), _parts(b)
    if parts is not None and other is not None:
        found = [f"{name}: {text}" for name, part in parts.items() if (text := tensor_difference(part, other[name]))]
        return "; ".join(found) or None
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} is now {tuple(b.shape)}"
    if a.stride() != b.stride() and a.numel():
        return f"strides {a.stride()} are now {b.stride()}"
    if torch.equal(_bytes(a), _bytes(b)):
        return None
    if a.dtype.is_floating_point or a.dtype.is_complex:
        worst = (a.double() - b.double()).abs().max() if not a.is_complex() else (a - b).abs().max()
        return f"{int((a != b).sum())} of {a.numel()} elements, largest by {float(worst):.3g}"
    return f"{int((a != b).sum())} of {a.numel()} elements"


def difference(a: Any, b: Any) -> str | None:
    """Say how two values differ, or None."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return tensor_difference(a, b)
    if type(a) is not type(b):
        return f"{_short(a)} is now {_short(b)}"
    if isinstance(a, dict):
        return "; ".join(mapping_differences(a, b)) or None
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return f"{len(a)} entries are now {len(b)}"
        found = [f"[{i}] {text}" for i, (x, y) in enumerate(zip(a, b, strict=True)) if (text := difference(x, y))]
        return "; ".join(found) or None
    if isinstance(a, np.ndarray):
        return None if a.tobytes() == b.tobytes() else "array"
    if isinstance(a, float) and a != a and b != b:
        return None
    return None if a == b else f"{_short(a)} is now {_short(b)}"


def mapping_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Every name whose values differ, and how."""
    found = [f"{name} is gone" for name in a.keys() - b.keys()] + [f"{name} is new" for name in b.keys() - a.keys()]
    found += [f"{name}: {text}" for name in a if name in b and (text := difference(a[name], b[name]))]
    return found


def generator_states() -> dict[str, Any]:
    """States of the global generators."""
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": hash(random.getstate()),
        "numpy": hash(str(np.random.get_state())),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _short(value: Any) -> str:
    return f"tensor{tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)[:70]
