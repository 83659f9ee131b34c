"""What exists before and after a step, whether an op touches it or not."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from keepwise.ir import NO_OP, Category
from keepwise.runtime.geometry import storage_bytes
from keepwise.trace.values import ValueTable

Tensor = torch.Tensor
Leaf = weakref.ref[Any]
"""A storage that no recorded op made."""


def register(
    table: ValueTable,
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    leaves: Iterable[Leaf],
) -> list[Tensor]:
    """Write down what exists before the step. What is returned must be held until it is over."""

    def add(t: Tensor | None, category: Category, *, name: str = "", holder: str = "") -> None:
        for part in parts_of(t) if t is not None else ():
            if table.find(part) is None:
                table.add_storage(part, category=category, birth=NO_OP, name=name, holder=holder)

    if model is not None:
        for name, p in model.named_parameters():
            add(p, Category.PARAMETER, name=name, holder="the model")
            add(p.grad, Category.GRADIENT, name=name, holder="the parameter's .grad")
        for name, b in model.named_buffers():
            add(b, Category.BUFFER, name=name, holder="the model")
    if optimizer is not None:
        for t in optimizer_tensors(optimizer):
            add(t, Category.OPTIMIZER, holder="the optimizer's state")
    for t in tree_leaves(inputs):
        if isinstance(t, Tensor):
            add(t, Category.INPUT, holder="the caller")
            add(t.grad if t.is_leaf else None, Category.GRADIENT, holder="the caller")
    windows: list[Tensor] = []
    for ref in leaves:
        storage = ref()
        if not isinstance(storage, torch.UntypedStorage):
            continue
        with torch._C.DisableTorchFunction():
            t = storage_bytes(storage)
        windows.append(t)
        if table.find(t) is None:
            found = table.add_storage(t, category=Category.INPUT, birth=NO_OP, holder="code outside of the step")
            found.draft.is_leaf = True
    return windows


def classify(table: ValueTable, *, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Find the gradients and the optimizer state that the step itself made."""

    def name_it(t: Tensor | None, category: Category, *, name: str = "", holder: str) -> None:
        for part in parts_of(t) if t is not None else ():
            found = table.find(part)
            if found is not None and not found.draft.category.is_static:
                found.draft.category, found.draft.name, found.draft.holder = category, name, holder

    if model is not None:
        for name, p in model.named_parameters():
            name_it(p.grad, Category.GRADIENT, name=name, holder="the parameter's .grad")
    for draft in table.storages:
        if draft.is_leaf and draft.category is Category.INPUT and draft.held_until is not None:
            draft.category = Category.ACTIVATION  # Left over from the step before, and let go in this one.
            draft.keep("made before the step")
    if optimizer is not None:
        for t in optimizer_tensors(optimizer):
            name_it(t, Category.OPTIMIZER, holder="the optimizer's state")


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Tensors in the state and in the options of an optimizer; not the parameters."""
    found = [t for t in tree_leaves([dict(s) for s in optimizer.state.values()]) if isinstance(t, Tensor)]
    for group in optimizer.param_groups:
        found.extend(v for k, v in group.items() if k != "params" and isinstance(v, Tensor))
    return found


def parts_of(t: Tensor) -> list[Tensor]:
    """A plain tensor itself; the plain tensors that a wrapper subclass is made of."""
    if not hasattr(type(t), "__tensor_flatten__"):
        return [t]
    inner: Any = t
    names = inner.__tensor_flatten__()[0]
    found = [getattr(t, name) for name in names]
    return [p for x in found if isinstance(x, Tensor) for p in parts_of(x)]


def main_device(model: nn.Module | None, inputs: Any) -> torch.device:
    """Device of the first parameter, else of the first input, else the CPU."""
    if model is not None:
        for p in model.parameters():
            return p.device
    for t in tree_leaves(inputs):
        if isinstance(t, Tensor):
            return t.device
    return torch.device("cpu")
