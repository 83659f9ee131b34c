"""Arguments of dispatcher-level calls: where the tensors are, and how to put others in their place.

The flattened order of tensor arguments is fixed here for trace and runtime alike: positional arguments first, then keyword
arguments in the order given; lists and tuples (`Tensor[]`, `Tensor?[]`) are entered one level deep, as in every aten schema.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from typing import Any

import torch

Tensor = torch.Tensor

_dispatch_mode: Any = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
_MODE_KEYS: Any = torch._C._TorchDispatchModeKey  # type: ignore[attr-defined]
_SHADOW_MODES = (_MODE_KEYS.FAKE, _MODE_KEYS.FUNCTIONAL)
_SHADOWS = frozenset(("FakeTensor", "FunctionalTensor"))


def tensors_in(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Tensor arguments in flattened order."""
    found: list[Tensor] = []
    for a in args:
        if isinstance(a, Tensor):
            found.append(a)
        elif type(a) is list or type(a) is tuple:
            found.extend(b for b in a if isinstance(b, Tensor))
    if kwargs:
        for a in kwargs.values():
            if isinstance(a, Tensor):
                found.append(a)
            elif type(a) is list or type(a) is tuple:
                found.extend(b for b in a if isinstance(b, Tensor))
    return found


def tensors_out(result: Any) -> list[Tensor | None]:
    """Results of a call in flattened order, `None` where an entry is no tensor; one level of nesting as in aten schemas."""
    if isinstance(result, Tensor):
        return [result]
    if type(result) is tuple or type(result) is list:
        found: list[Tensor | None] = []
        for r in result:
            if type(r) is list or type(r) is tuple:
                found.extend(x if isinstance(x, Tensor) else None for x in r)
            else:
                found.append(r if isinstance(r, Tensor) else None)
        return found
    return [None]


def storage_key(t: Tensor) -> int | None:
    """Identity of the storage of `t` for as long as it lives; None where it has none of its own."""
    if t.layout is not torch.strided:
        return None
    try:
        return t.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


def device_of(args: tuple[Any, ...], kwargs: dict[str, Any] | None, tensors: list[Tensor]) -> torch.device:
    """The device on which a call draws random numbers."""
    given = kwargs.get("device") if kwargs else None
    if isinstance(given, torch.device):
        return given
    for a in args:
        if isinstance(a, torch.device):
            return a
    return tensors[0].device if tensors else torch.device("cpu")


@functools.cache
def _write_positions(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and names of the schema's arguments that an op writes."""
    written = [
        (i, a.name) for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    ]
    return tuple(i for i, _ in written), tuple(name for _, name in written)


def mutates(func: Any) -> bool:
    """Whether an op may write its arguments; True for whatever has no schema (higher-order operators)."""
    schema = getattr(func, "_schema", None)
    return schema is None or schema.is_mutable


@functools.cache
def returns_view(func: Any) -> bool:
    """Whether a result of an op may share memory with an argument; True for whatever has no schema."""
    schema = getattr(func, "_schema", None)
    return schema is None or any(r.alias_info is not None for r in schema.returns)


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[Tensor]:
    """Tensors among the arguments that an op writes according to its schema; all of them where it has none."""
    if getattr(func, "_schema", None) is None:
        from torch.utils._pytree import tree_leaves

        return [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not func._schema.is_mutable:
        return []
    positions, names = _write_positions(func)
    given = [args[i] for i in positions if i < len(args)]
    if kwargs:
        given += [kwargs[name] for name in names if name in kwargs]
    return tensors_in(tuple(given), None)


def with_tensors(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, new: list[Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call with its k-th tensor argument replaced by `new[k]`."""
    k = 0

    def put(a: Any) -> Any:
        nonlocal k
        if isinstance(a, Tensor):
            k += 1
            return new[k - 1]
        if type(a) is list or type(a) is tuple:
            return [put(b) for b in a]
        return a

    placed = tuple(put(a) for a in args)
    return placed, {name: put(a) for name, a in kwargs.items()} if kwargs else {}


def skeleton(
    args: tuple[Any, ...], kwargs: dict[str, Any] | None, put: list[Any]
) -> tuple[list[Any], dict[str, Any] | None, list[tuple[Any, Any]]]:
    """A copy of a call's arguments with `put[k]` for the k-th tensor, and where each of them is.

    Returns:
        The arguments, the keyword arguments, and `(container, key)` of each tensor: `container[key] = t` puts another one there.
    """
    places: list[tuple[Any, Any]] = []
    new_args = list(args)
    k = 0
    for i, a in enumerate(args):
        if isinstance(a, Tensor):
            new_args[i] = put[k]
            places.append((new_args, i))
            k += 1
        elif (type(a) is list or type(a) is tuple) and a:
            inner = list(a)
            new_args[i] = inner
            for j, b in enumerate(a):
                if isinstance(b, Tensor):
                    inner[j] = put[k]
                    places.append((inner, j))
                    k += 1
    if not kwargs:
        return new_args, None, places
    new_kwargs = dict(kwargs)
    for name, a in kwargs.items():
        if isinstance(a, Tensor):
            new_kwargs[name] = put[k]
            places.append((new_kwargs, name))
            k += 1
        elif (type(a) is list or type(a) is tuple) and a:
            inner = list(a)
            new_kwargs[name] = inner
            for j, b in enumerate(a):
                if isinstance(b, Tensor):
                    inner[j] = put[k]
                    places.append((inner, j))
                    k += 1
    return new_args, new_kwargs, places


def target_name(func: Any) -> str:
    """`aten.mm.default`, `higher_order.cond`: what `resolve` finds."""
    return str(func) if isinstance(func, torch._ops.OpOverload) else f"{func.namespace}.{func.name()}"


def resolve(target: str) -> Any:
    """The op overload, or the higher-order operator, called `target`.

    Raises:
        AttributeError: no such op is registered in this process.
    """
    found = None
    with contextlib.suppress(AttributeError):
        found = operator.attrgetter(target)(torch.ops)
    if not isinstance(found, torch._ops.OpOverload | torch._ops.HigherOrderOperator):
        raise AttributeError(f"no op {target!r} is registered in this process")
    return found


def has_subclass(types: Any) -> bool:
    """Whether a call's overloaded argument types hold a tensor subclass with a dispatch rule of its own."""
    return any(c.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl for c in types)


def is_shadow(types: Any) -> bool:
    """Whether a call only works out shapes or is being traced: it belongs to the mode below ours, and is no part of the step."""
    return any(c.__name__ in _SHADOWS and c.__module__.startswith("torch._subclasses") for c in types)


def in_shadow() -> bool:
    """The same for a call that may have no argument to tell by."""
    return any(_dispatch_mode(key) is not None for key in _SHADOW_MODES)
