"""Everything that a traced step may change, and how it is put back bit for bit.

Notes:
1. Parameters and buffers are copied into files (`spill.Copy`), compared afterwards and written back only where they differ, in
   place: storages, views and hooks stay what they were. Version counters are put back too, so that a graph the user holds
   does not complain.
2. A parameter's `.grad` is taken off and the same object put back; gradients of the traced steps are others.
3. Attributes of modules are rebound to what they were; lists, dicts, sets and queues among them get their old contents, one level
   deep, and random generators among them their old states. What they refer to beyond that is not copied.
4. Some attributes say how far an object outside of Python has come that cannot be put back (DDP's reducer counts its iterations,
   and with a static graph learns from the first one). They stay as the traced steps left them: the two must agree.
"""

from __future__ import annotations

import collections
import functools
import random
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from keepwise.trace.spill import Copy, can_spill

Tensor = torch.Tensor

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_CONTAINERS = (list, dict, set, collections.deque)
_MIRRORS = {
    "torch.nn.parallel.distributed.DistributedDataParallel": frozenset(("_static_graph_delay_allreduce_enqueued",))
}
"""Class -> attributes of note 4."""


class Generators:
    """States of all global generators: torch on every device in use, Python, NumPy."""

    def __init__(self) -> None:
        self.torch = torch.get_rng_state()
        self.cuda = (
            torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
        )
        self.python = random.getstate()
        numpy = _numpy()
        self.numpy: Any = numpy.random.get_state() if numpy is not None else None

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self.torch)
        if self.cuda is not None:
            torch.cuda.set_rng_state_all(self.cuda)
        random.setstate(self.python)
        numpy = _numpy()
        if numpy is not None and self.numpy is not None:
            numpy.random.set_state(self.numpy)


def _numpy() -> Any:
    """NumPy, if anyone has imported it."""
    return sys.modules.get("numpy")


class Bytes:
    """Contents of tensors, each storage once (note 1)."""

    def __init__(self, tensors: Iterable[Tensor], *, to_disk: bool = True) -> None:
        self._saved: dict[int, tuple[Tensor, Copy]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        for t in tensors:
            if not can_spill(t):
                continue
            storage = t.untyped_storage()
            if not t.is_inference():
                self._versions.append((t, t._version))
            if storage._cdata not in self._saved:
                self._saved[storage._cdata] = (t, Copy(storage, to_disk=to_disk))

    def restore(self) -> int:
        """Write back what differs; the number of storages that did."""
        changed = 0
        with torch.no_grad(), torch._C.DisableTorchFunction():
            for t, copy in self._saved.values():
                storage = t.untyped_storage()
                if storage.nbytes() != copy.nbytes:
                    storage.resize_(copy.nbytes)
                if not copy.equals(storage):
                    changed += 1
                    copy.into(storage)
            for t, version in self._versions:
                if t._version != version:
                    _autograd._unsafe_set_version_counter((t,), (version,))
        return changed


class Attributes:
    """Python attributes of every module (note 3)."""

    def __init__(self, model: nn.Module | None) -> None:
        self._saved: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._generators: list[Callable[[], object]] = []
        for module in model.modules() if model is not None else ():
            skipped = _mirrors(type(module))
            values = {name: value for name, value in module.__dict__.items() if name not in skipped}
            contents = {name: value.copy() for name, value in values.items() if isinstance(value, _CONTAINERS)}
            self._saved.append((module, values, contents))
            self._generators.extend(put_back for v in values.values() if (put_back := _generator_state(v)) is not None)

    def restore(self) -> None:
        """Rebind and refill."""
        for module, values, contents in self._saved:
            now = module.__dict__
            skipped = _mirrors(type(module))
            for name in [n for n in now if n not in values and n not in skipped]:
                del now[name]
            for name, value in values.items():
                if now.get(name, self) is not value:
                    now[name] = value
            for name, content in contents.items():
                value = values[name]
                if _identities(value) != _identities(content):
                    value.clear()
                    value.update(content) if isinstance(value, (dict, set)) else value.extend(content)
        for put_back in self._generators:
            put_back()


def _mirrors(kind: type) -> frozenset[str]:
    """Names of attributes that are not put back (note 4)."""
    found = (_MIRRORS.get(f"{c.__module__}.{c.__qualname__}", frozenset()) for c in kind.__mro__)
    return frozenset[str]().union(*found)


def _identities(container: Any) -> Any:
    """What a container holds, by identity: tensors have no plain equality."""
    if isinstance(container, dict):
        return [(id(k), id(v)) for k, v in container.items()]
    found = [id(x) for x in container]
    return set(found) if isinstance(container, set) else found


def _generator_state(thing: Any) -> Callable[[], object] | None:
    """A function that puts a random generator back into its present state; None for anything else."""
    if isinstance(thing, torch.Generator):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, random.Random):
        return functools.partial(thing.setstate, thing.getstate())
    numpy = _numpy()
    if numpy is None:
        return None
    if isinstance(thing, numpy.random.RandomState):
        return functools.partial(thing.set_state, thing.get_state())
    if isinstance(thing, numpy.random.Generator):
        bits = thing.bit_generator
        return functools.partial(setattr, bits, "state", bits.state)
    return None


class Gradients:
    """The `.grad` objects of parameters and arguments (note 2), and whether they ask for one."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._saved = [(t, t.grad, t.requires_grad) for t in tensors if t.is_leaf]

    def clear(self) -> None:
        """Take them off."""
        for t, _, _ in self._saved:
            t.grad = None

    def restore(self) -> None:
        """Put the same objects back."""
        for t, grad, requires_grad in self._saved:
            t.grad = grad
            if t.requires_grad != requires_grad:
                t.requires_grad_(requires_grad)


def tensors_of(tree: Any) -> list[Tensor]:
    """The tensors in a pytree."""
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]
