"""Results that are written into the memory of dead ones.

A result normally goes into a new allocation, whose first touch costs more than many elementwise ops do (on the CPU, pages;
measured: 9.9 ms against 2.1 ms for a product of two 24 MiB tensors). A plan drops hundreds of tensors in forward and makes them
again in backward, so each of them would pay twice. Instead an op writes into memory that nobody reads any more:

1. of a replayed argument that is read for the last time by this very op, if the op is pointwise: its element is read before the
   result's is written;
2. of a result that is dead: its storage has no owner but our handle: no tensor, no view, no saved tensor, no handle of the user's.

Here stands which ops can do that and how; `recycler` holds the memory.

Only ops of the lists below, in their `out=` form or as their kernel is written. Both run the same code on an output of the same shape
and strides, so the bits are equal (every plan is compared with the plain step before it is used).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from keepwise.ir import spare

Tensor = torch.Tensor
aten = torch.ops.aten

POINTWISE = frozenset(
    (
        "mul",
        "add",
        "sub",
        "div",
        "pow",
        "tanh",
        "sigmoid",
        "exp",
        "log",
        "log2",
        "log1p",
        "expm1",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "neg",
        "abs",
        "sin",
        "cos",
        "erf",
        "erfc",
        "silu",
        "gelu",
        "mish",
        "softplus",
        "hardtanh",
        "elu",
        "leaky_relu",
        "hardsigmoid",
        "hardswish",
        "logit",
        "maximum",
        "minimum",
        "clamp",
        "clamp_min",
        "clamp_max",
        "square",
        "sign",
        "floor",
        "ceil",
        "addcmul",
        "addcdiv",
        "sinh",
        "cosh",
        "tan",
        "atan",
        "lerp",
    )
)
"""Op packets each of whose result elements depends on the elements at the same place only."""
MATRIX = frozenset(("mm", "addmm", "bmm", "baddbmm"))
"""Products of the last two tensors among their arguments, with a dense result."""
ALIKE = frozenset(("_softmax", "_log_softmax"))
"""Op packets whose result looks like their first argument."""


def _rectified(x: Tensor, *, out: Tensor) -> Tensor:
    return aten.clamp_min.out(x, 0, out=out)


def _multiplied(x: Tensor, other: Any, *, out: Tensor) -> Tensor:
    return aten.mul.out(x, other, out=out)


def _divided(x: Tensor, other: Any, *, out: Tensor) -> Tensor:
    return aten.div.out(x, other, out=out)


def _copied(x: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    return aten.copy_.default(out, x)


def _unwritten(_x: Tensor, *, out: Tensor, **_: Any) -> Tensor:
    return out


def _normalised(x: Tensor, *rest: Any, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = x.shape[1] if rest[4] else 0  # rest[4]: training
    mean, scale = (torch.empty(size, dtype=x.dtype, device=x.device) for _ in range(2))
    return aten.native_batch_norm.out(x, *rest, out=out, save_mean=mean, save_invstd=scale)


_POINTWISE_FORMS: dict[Any, Callable[..., Any]] = {
    aten.relu.default: _rectified,
    aten.mul.Scalar: _multiplied,
    aten.div.Scalar: _divided,
}
"""Pointwise ops without a kernel of their own for `out=` -> what they are made of."""
_FORMS: dict[Any, Callable[..., Any]] = {
    aten.clone.default: _copied,
    aten.empty_like.default: _unwritten,
    aten.native_batch_norm.default: _normalised,
}
"""The same for others; what is large of their results is the first."""

use_count: Any = getattr(torch._C, "_storage_Use_Count", None)


@functools.cache
def out_form(func: Any) -> Any:
    """What makes the result of `func` in memory that is given as `out=`, if the op is on the lists; else None.

    It takes the arguments of `func` and returns what `func` does, its first result over that memory.
    """
    if not isinstance(func, torch._ops.OpOverload):
        return None
    if use_count is not None and (func in _POINTWISE_FORMS or func in _FORMS):
        return _POINTWISE_FORMS.get(func) or _FORMS[func]
    name = func._schema.name.removeprefix("aten::")
    if use_count is None or name not in POINTWISE | MATRIX | ALIKE or func._schema.is_mutable:
        return None
    plain = [(a.name, str(a.type)) for a in func._schema.arguments]
    packet = func.overloadpacket
    for overload in packet.overloads():
        found = getattr(packet, overload)
        arguments = found._schema.arguments
        if arguments and arguments[-1].name == "out" and [(a.name, str(a.type)) for a in arguments[:-1]] == plain:
            return found if _has_kernel(found) else None
    return None


def _has_kernel(func: Any) -> bool:
    """Whether an op is implemented as such, not by the functional form and a copy."""
    name = f"{func._schema.name}.{func._schema.overload_name}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")


@functools.cache
def overwrites(func: Any) -> bool:
    """Whether an op may write its result over its own argument."""
    return out_form(func) is not None and (
        func in _POINTWISE_FORMS or func._schema.name.removeprefix("aten::") in POINTWISE
    )


class Form:
    """How to make a result again in given memory."""

    __slots__ = ("dtype", "func", "nbytes", "pointwise", "shape", "stride")

    def __init__(self, func: Any, t: Tensor, pointwise: bool) -> None:
        self.func, self.pointwise = func, pointwise
        self.shape, self.stride, self.dtype, self.nbytes = t.shape, t.stride(), t.dtype, t.nbytes

    def fits(self, t: Tensor, num_handles: int) -> bool:
        """Whether a tensor's memory can be the result's, and no other tensor sees it.

        Args:
            t: the tensor.
            num_handles: handles of ours on its storage.
        """
        return (
            t.dtype is self.dtype
            and t.shape == self.shape
            and t.stride() == self.stride
            and _owns_whole_storage(t)
            and use_count(t.untyped_storage()._cdata) == 1 + num_handles
            and t.untyped_storage().resizable()  # not a NumPy array's, not a file's
        )


def form_of(func: Any, result: Any, *, is_dense: bool) -> Form | None:
    """How to replay `func` into given memory; None where that is not possible or not worth it. `is_dense`: see `is_dense_call`."""
    found = out_form(func)
    if found is None or (func in _FORMS and not is_dense):
        return None
    results = result if type(result) is tuple else (result,)
    first = results[0]
    if (
        not isinstance(first, Tensor)
        or first.nbytes < spare.MIN_BYTES
        or not _owns_whole_storage(first)
        or any(t.dtype is not first.dtype for t in results)
    ):
        return None
    return Form(found, first, overwrites(func))


def _owns_whole_storage(t: Tensor) -> bool:
    return t.storage_offset() == 0 and t.untyped_storage().nbytes() == t.numel() * t.element_size()


def result_geometry(func: Any, args: Any, kwargs: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and type of the dense result of an op that has an `out=` form.

    Returns:
        None where it does not follow from the arguments alone: they are of several types, not dense, or not on the CPU. For an op
        with several results, of the first.
    """
    tensors = [a for a in args if isinstance(a, Tensor)]
    first = tensors[0] if tensors else None
    if first is None or first is not args[0] or not first.dtype.is_floating_point:
        return None
    for t in tensors:
        if t.dtype is not first.dtype or t.layout is not torch.strided or t.device.type != "cpu" or t.is_nested:
            return None
    if any(isinstance(a, torch.dtype | complex) for a in args):
        return None
    if kwargs and any(isinstance(a, Tensor | torch.dtype | complex) for a in kwargs.values()):
        return None
    if func in _FORMS:
        return (tuple(first.shape), first.dtype) if _is_dense_form(func, first, args, kwargs or {}) else None
    name = func._schema.name.removeprefix("aten::")
    if name in MATRIX:
        left, right = tensors[-2:]
        return (*left.shape[:-1], right.shape[-1]), first.dtype
    if not all(t.is_contiguous() for t in tensors):
        return None
    shape = first.shape
    if any(t.shape != shape for t in tensors):
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    return tuple(shape), first.dtype


def is_dense_call(func: Any, args: Any, kwargs: dict[str, Any] | None) -> bool:
    """Whether it is a call of one of `_FORMS` with dense arguments; on others (expanded ones) a kernel may compute something else."""
    if func not in _FORMS or not isinstance(args[0], Tensor) or args[0].layout is not torch.strided:
        return False
    return _is_dense_form(func, args[0], args, kwargs or {})


def _is_dense_form(func: Any, x: Tensor, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether the large result of one of `_FORMS` is as dense as a new tensor of the shape of `x`."""
    if x.is_neg() or kwargs.get("pin_memory") or any(kwargs.get(name) is not None for name in ("layout", "device")):
        return False
    if func is aten.clone.default and kwargs.get("memory_format") is torch.contiguous_format:
        return True
    if func is aten.native_batch_norm.default and not args[5]:
        return False
    if func is aten.empty_like.default and torch.are_deterministic_algorithms_enabled():  # then it is filled
        return False
    if kwargs.get("memory_format") not in (None, torch.preserve_format) or x.stride() != _row_major(x.shape):
        return False
    # where a tensor is dense in both orders, kernels ask for the other one
    return func is not aten.native_batch_norm.default or not _is_channels_last(x)


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    strides, n = [], 1
    for size in reversed(shape):
        strides.append(n)
        n *= max(size, 1)
    return tuple(reversed(strides))


def _is_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
