"""What a step changes in Python: attributes, containers, closures, and how they are put back.

Notes:
1. From the modules of a model everything is visited that user code can reach: their attributes, what lists, dicts, sets, queues and
   tuples among them hold, objects of the user's own classes, and the closures of the user's own functions (hooks). Objects get
   their attributes back, containers their contents, closures their cells, arrays their elements, random generators their states.
2. *The user's own* are classes and functions of the packages that the model's modules come from. What belongs to other libraries
   is left alone: a progress bar or a logger may have a thread of its own, which must not lose what it did meanwhile. What only
   holds attributes (`SimpleNamespace`) and torch's own state of a training loop (`TRAINING`) are as good as the user's.
3. Out of reach are globals, files, and iterators that a step moves on: `left` names the iterators.
4. Some attributes say how far an object outside of Python has come that cannot be put back (DDP's reducer counts its iterations,
   and with a static graph learns from the first one). They stay as the traced steps left them: the two must agree.
"""

from __future__ import annotations

import argparse
import collections
import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from keepwise._functions import bound_cells

Tensor = torch.Tensor
PutBack = Callable[[], object]

_CONTAINERS = (list, dict, set, collections.deque, bytearray)
LIBRARIES = frozenset(("torch", "builtins", "numpy")) | sys.stdlib_module_names
"""Packages whose objects are no state of the user's."""
_MIRRORS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": frozenset(("_static_graph_delay_allreduce_enqueued",))
}
"""Class -> attributes of note 4."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HOLDERS = (types.SimpleNamespace, argparse.Namespace)
TRAINING = (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)
"""Torch's own objects that a training loop moves on and that no optimizer holds: schedulers of rates, scalers of losses."""
MAX_THINGS = 200_000
"""So many objects are visited at most."""


class PythonState:
    """The state of everything in note 1.

    Attributes:
        tensors: tensors met on the way that are neither parameters nor buffers; their contents are for the caller to save.
        left: paths of attributes that a step may change and that cannot be put back (note 3).
        hooked: paths of modules with hooks; what those write to globals is out of reach.
    """

    def __init__(self, model: nn.Module | None, beside: Iterable[nn.Module] = (), training: Iterable[Any] = ()) -> None:
        """`beside`: modules besides the model's; `training`: objects of `TRAINING` that are found elsewhere."""
        self.tensors: list[Tensor] = []
        self.left: list[str] = []
        self.hooked: list[str] = []
        self._undo: list[PutBack] = []
        self._seen: set[int] = set()
        self._held: list[Any] = []
        """What was visited stays alive, so that no id is used twice."""
        self._stack: list[tuple[Any, str]] = []
        modules = list(model.named_modules()) if model is not None else []
        modules += [
            (f"({type(m).__name__}).{name}".rstrip("."), inner) for m in beside for name, inner in m.named_modules()
        ]
        self._packages = {type(m).__module__.partition(".")[0] for _, m in modules} - LIBRARIES | {"__main__"}
        for name, module in modules:  # before what they hold, so that each is met by its own path
            self._visit(module, name)
        self._stack += [(thing, f"({type(thing).__name__})") for thing in training]
        while self._stack and len(self._seen) < MAX_THINGS:
            self._visit(*self._stack.pop())

    def restore(self) -> None:
        """Put it back."""
        for put_back in self._undo:
            put_back()

    def _visit(self, thing: Any, path: str) -> None:
        if id(thing) in self._seen:
            return
        children = self._children(thing, path)
        if children is None:
            return
        self._seen.add(id(thing))
        self._held.append(thing)
        self._stack.extend(children)

    def _children(self, thing: Any, path: str) -> list[tuple[Any, str]] | None:
        """Note how to put a thing back; what to visit next, None where there is nothing to put back."""
        if thing is None or isinstance(thing, (str, int, float, complex, bytes, type, types.ModuleType)):
            return None
        if isinstance(thing, nn.Module):
            if any(thing.__dict__.get(name) for name in _HOOKS):
                self.hooked.append(path)
            return self._attributes(thing, path)
        if isinstance(thing, Tensor):
            self.tensors.append(thing)
            return self._attributes(thing, path)  # `weight.main_grad`
        if isinstance(thing, tuple):
            return [(x, path) for x in thing]
        if isinstance(thing, _CONTAINERS):
            return self._container(thing, path)
        if isinstance(thing, types.FunctionType):
            return self._closure(thing, path) if self._is_users(thing.__module__) else None
        if isinstance(thing, types.MethodType):
            return [(thing.__self__, path), (thing.__func__, path)]
        if isinstance(thing, functools.partial):
            return [(thing.func, path), (thing.args, path), (thing.keywords, path)]
        put_back = _state_of(thing)
        if put_back is not None:
            self._undo.append(put_back)
            return []
        if isinstance(thing, Iterator):
            self.left.append(path)
            return None
        known = isinstance(thing, (*_HOLDERS, *TRAINING)) or self._is_users(type(thing).__module__)
        return self._attributes(thing, path) if known else None

    def _is_users(self, module: str | None) -> bool:
        return bool(module) and str(module).partition(".")[0] in self._packages

    def _attributes(self, thing: Any, path: str) -> list[tuple[Any, str]]:
        found: dict[str, Any] = {}
        if isinstance(getattr(thing, "__dict__", None), dict):
            skipped = _mirrors(type(thing))
            found = {name: value for name, value in thing.__dict__.items() if name not in skipped}
            self._undo.append(functools.partial(_rebind, thing.__dict__, found, skipped))
        slots = {name: value for name in _slots(type(thing)) if (value := getattr(thing, name, self)) is not self}
        if slots:
            self._undo.append(functools.partial(_set_slots, thing, slots))
        return [(v, f"{path}.{k}" if path else str(k)) for k, v in {**found, **slots}.items()]

    def _container(self, thing: Any, path: str) -> list[tuple[Any, str]]:
        content = list(thing.items()) if isinstance(thing, dict) else list(thing)
        self._undo.append(functools.partial(_refill, thing, content))
        if isinstance(thing, bytearray):
            return []
        if isinstance(thing, dict):
            return [(v, path) for _, v in content] + [(k, path) for k, _ in content if not isinstance(k, (str, int))]
        return [(x, path) for x in content]

    def _closure(self, function: types.FunctionType, path: str) -> list[tuple[Any, str]]:
        found: list[tuple[Any, str]] = []
        for cell, content in bound_cells(function):
            self._undo.append(functools.partial(setattr, cell, "cell_contents", content))
            found.append((content, path))
        return found


def _rebind(now: dict[str, Any], values: dict[str, Any], skipped: frozenset[str]) -> None:
    for name in [n for n in now if n not in values and n not in skipped]:
        del now[name]
    for name, value in values.items():
        if now.get(name, values) is not value:
            now[name] = value


def _slots(kind: type) -> list[str]:
    found: list[str] = []
    for c in kind.__mro__:
        names = c.__dict__.get("__slots__", ())
        found += [names] if isinstance(names, str) else list(names)
    return [n for n in found if n not in ("__dict__", "__weakref__") and not n.startswith("__")]


def _set_slots(thing: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        if getattr(thing, name, values) is not value:
            object.__setattr__(thing, name, value)


def _refill(container: Any, content: list[Any]) -> None:
    if isinstance(container, dict):
        if [(id(k), id(v)) for k, v in container.items()] != [(id(k), id(v)) for k, v in content]:
            container.clear()
            container.update(content)
    elif isinstance(container, set):
        if {id(x) for x in container} != {id(x) for x in content}:
            container.clear()
            container.update(content)
    elif [id(x) for x in container] != [id(x) for x in content]:
        container.clear()
        container.extend(content)


def _state_of(thing: Any) -> PutBack | None:
    """A function that puts a random generator, a counter of calls or an array back into its present state; None for anything else."""
    if isinstance(thing, torch.Generator):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, random.Random):
        return functools.partial(thing.setstate, thing.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(thing, numpy.random.RandomState):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, numpy.random.Generator):
        bits = thing.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    if isinstance(thing, numpy.ndarray) and thing.flags.writeable:
        return functools.partial(_write_back, thing, thing.copy())
    return None


def _write_back(array: Any, content: Any) -> None:
    if array.shape == content.shape:
        array[...] = content


def _mirrors(kind: type) -> frozenset[str]:
    """Names of attributes that are not put back (note 4)."""
    found = (_MIRRORS.get(f"{c.__module__}.{c.__qualname__}", frozenset()) for c in kind.__mro__)
    return frozenset[str]().union(*found)
