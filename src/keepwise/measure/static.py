"""Tensors that live across steps, by role: parameters, gradients, buffers, optimizer state, and what a step holds as input."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from keepwise._functions import bound_cells

PARAMETER, GRADIENT, OPTIMIZER, BUFFER, INPUT = "parameter", "gradient", "optimizer state", "buffer", "input"

_DEPTH = 6
"""How deep functions and containers that a step holds are looked into."""


@dataclass(slots=True)
class Holdings:
    """Models, optimizers and other tensors that a step works on."""

    models: list[nn.Module] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def storages(self, device: str) -> dict[int, tuple[str, int]]:
        """Address -> (role, bytes) of each storage on `device` that is alive now; a shared storage has its first role."""
        found: dict[int, tuple[str, int]] = {}

        def add(role: str, tensor: Tensor | None) -> None:
            for address, size in storage_sizes(tensor, device):
                found.setdefault(address, (role, size))

        parameters = [p for model in self.models for p in model.parameters()]
        parameters += [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            add(PARAMETER, parameter)
        for parameter in parameters:
            add(GRADIENT, parameter.grad)
        for model in self.models:
            for buffer in model.buffers():
                add(BUFFER, buffer)
        for optimizer in self.optimizers:
            for tensor in _tensors(dict(optimizer.state), _DEPTH):
                add(OPTIMIZER, tensor)
        for tensor in self.tensors:
            add(INPUT, tensor)
            if tensor.is_leaf:
                add(GRADIENT, tensor.grad)
        return found

    def any_tensors(self) -> list[Tensor]:
        """Some tensors, parameters first: enough to see which device a step runs on."""
        return [p for model in self.models for p in model.parameters()] + self.tensors


def holdings(step: Callable[[], object], model: nn.Module | None, optimizer: Optimizer | None) -> Holdings:
    """What `step` works on: `model` and `optimizer`, and what is found in the function itself.

    Looked into are closure cells, defaults, bound arguments of `functools.partial`, the globals that the function names, the
    object that a method is bound to, and containers and dataclasses in them; not objects of other kinds.
    """
    found = Holdings()
    seen: set[int] = set()

    def sort(thing: object, depth: int) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, nn.Module):
            found.models.append(thing)
        elif isinstance(thing, Optimizer):
            found.optimizers.append(thing)
        elif isinstance(thing, Tensor):
            found.tensors.append(thing)
        elif depth:
            for item in list(_items(thing)):
                sort(item, depth - 1)

    sort((model, optimizer, step), _DEPTH)
    return found


def _items(thing: Any) -> Iterator[object]:
    """What a container or a function holds."""
    if isinstance(thing, Mapping):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set):
        yield from thing
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        yield from (getattr(thing, each.name, None) for each in dataclasses.fields(thing))
    elif isinstance(thing, functools.partial):
        yield from (thing.func, thing.args, thing.keywords)
    elif isinstance(thing, types.MethodType):
        yield from (thing.__self__, thing.__func__, getattr(thing.__self__, "__dict__", None))
    elif isinstance(thing, types.FunctionType):
        yield from (thing.__defaults__, thing.__kwdefaults__)
        yield from (content for _, content in bound_cells(thing))
        for name in thing.__code__.co_names:
            value = thing.__globals__.get(name)
            # Functions of other modules are not the user's step.
            if not isinstance(value, types.FunctionType) or value.__globals__ is thing.__globals__:
                yield value


def _tensors(thing: object, depth: int) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif depth:
        for item in _items(thing):
            yield from _tensors(item, depth - 1)


def storage_sizes(tensor: Tensor | None, device: str) -> Iterator[tuple[int, int]]:
    """(address, bytes) of the storages of a tensor on `device`; several for a subclass made of tensors, none for others."""
    if tensor is None:
        return
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is not None:
        for name in flatten()[0]:
            yield from storage_sizes(getattr(tensor, name), device)
        return
    if tensor.layout is not torch.strided:
        parts = {
            torch.sparse_coo: ("_indices", "_values"),
            torch.sparse_csr: ("crow_indices", "col_indices", "values"),
            torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
        }.get(tensor.layout, ())
        for part in parts:
            yield from storage_sizes(getattr(tensor, part)(), device)
        return
    if str(tensor.device) != device:
        return
    storage = tensor.untyped_storage()
    if storage.nbytes():
        yield storage.data_ptr(), storage.nbytes()
