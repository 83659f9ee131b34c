"""What a step trains beside the model: modules and leaves that the user's function reaches by its closure, its globals and its objects.

A critic of its own, a head in the loss, a temperature: a step that `fit` makes gives them gradients and moves their buffers, as the
user's own steps do, so that both must be put back; so must be schedulers and loss scalers. Only such are looked for; everything else
that is found on the way is left alone.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from keepwise._functions import bound_cells
from keepwise.trace.python_state import LIBRARIES, TRAINING

Tensor = torch.Tensor

MAX_THINGS = 20_000
"""So many objects are visited at most, near ones first."""


class Reached(NamedTuple):
    """What was found."""

    modules: list[nn.Module]
    """Outside of the model."""
    leaves: list[Tensor]
    """They ask for a gradient and belong to no module found."""
    training: list[Any]
    """Schedulers and loss scalers."""


def reached(function: Any, model: nn.Module | None) -> Reached:
    """Look for all of it."""
    own: set[int] = {id(m) for m in model.modules()} if model is not None else set()
    modules: list[nn.Module] = []
    leaves: list[Tensor] = []
    training: list[Any] = []
    queue: collections.deque[Any] = collections.deque([function])
    seen: dict[int, Any] = {}  # holds them, so that no id is used twice
    while queue and len(seen) < MAX_THINGS:
        thing = queue.popleft()
        if id(thing) in seen or thing is None or isinstance(thing, (str, bytes, int, float, type, types.ModuleType)):
            continue
        seen[id(thing)] = thing
        if isinstance(thing, nn.Module):
            if id(thing) not in own:
                modules.append(thing)
                own.update(id(m) for m in thing.modules())
        elif isinstance(thing, Tensor):
            if thing.requires_grad and thing.is_leaf:
                leaves.append(thing)
        elif isinstance(thing, TRAINING):
            training.append(thing)
        else:
            queue.extend(_behind(thing))
    parameters = {id(p) for m in (model, *modules) if m is not None for p in m.parameters()}
    return Reached(modules, [t for t in leaves if id(t) not in parameters], training)


def _behind(thing: Any) -> Iterator[Any]:
    if isinstance(thing, types.FunctionType):
        yield from (content for _, content in bound_cells(thing))
        yield from thing.__defaults__ or ()
        yield from (thing.__kwdefaults__ or {}).values()
        if not _is_library(thing.__module__):
            yield from (thing.__globals__[name] for name in _names(thing.__code__) if name in thing.__globals__)
    elif isinstance(thing, types.MethodType):
        yield thing.__self__
        yield thing.__func__
    elif isinstance(thing, functools.partial):
        yield from (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, dict):
        yield from list(thing.values())
    elif isinstance(thing, (list, tuple, set, frozenset, collections.deque)):
        yield from list(thing)
    elif not _is_library(type(thing).__module__):
        yield from list(getattr(thing, "__dict__", {}).values())


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_library(module: str | None) -> bool:
    package = str(module).partition(".")[0]
    return package in LIBRARIES or package == "keepwise"
