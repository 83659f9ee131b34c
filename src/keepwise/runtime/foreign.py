"""The user's own hooks on saved tensors, where they are active around ours.

Notes:
1. What is kept passes through them as in a plain step. What is dropped does not: its replay gives what was saved, and so does a pair
   of hooks that only stores tensors elsewhere. A pair may also change them: their strides, or their values (a lossy store). So a tensor
   is dropped only after this pair has given it back as it was, in the step that `fit` recorded or in one that kept it for that reason,
   and under a pair that changed the values of any tensor nothing is: others may come back as they were by accident.
2. Under hooks plain autograd compares no versions. What was saved may be written, and backward reads what the pack hook made of it
   before: of a copy the old values, of an alias the new ones. So that hook gets a dropped tensor after all, with the content that was
   saved, before anything can be written: when a write comes that we see, or, where its storage is still alive then, when we stop
   watching.
3. What is known to be written after it was saved is kept from the beginning: dropping it would have to be taken back.
4. Pairs are known by their code and by the plain values that it has at hand: most are made anew in each step.
"""

from __future__ import annotations

import functools
import hashlib
import types
import weakref
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from keepwise._functions import bound_cells
from keepwise.runtime.beneath import our_modes_off
from keepwise.runtime.calls import storage_key
from keepwise.runtime.digest import digest
from keepwise.runtime.holding import ForeignSave, VersionStub
from keepwise.runtime.hooks import Hooks
from keepwise.runtime.replay import DroppedSave

Tensor = torch.Tensor
_PLAIN = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_DEEPEST = 4


class Trust:
    """Which saved tensors which pairs of hooks give back as they were (note 1)."""

    def __init__(self, pairs: Iterable[tuple[str, bool]] = ()) -> None:
        """`pairs` were around the model when the step was recorded, and were lossless or not."""
        seen = dict(pairs)
        self.pairs = {pair for pair, is_lossless in seen.items() if is_lossless}
        """What these gave back in another form is kept anyway."""
        self.lossy = seen.keys() - self.pairs
        """Gave back other values at least once: where they did not, it was by accident."""
        self.same: set[tuple[str, int]] = set()
        """(pair, view) that came back."""
        self.changed: set[tuple[str, int]] = set()
        """(pair, view) that came back as something else, at least once."""
        self.has_grown = False
        """Whether a step showed that more may be dropped than in the steps before it."""

    def came_back(self, pair: str, view: int, *, is_same: bool, is_lossy: bool) -> None:
        """Note what a pair made of a view."""
        seen = self.same if is_same else self.changed
        self.has_grown |= is_same and (pair, view) not in seen
        seen.add((pair, view))
        if is_lossy:
            self.lossy.add(pair)

    def __contains__(self, item: tuple[str, int]) -> bool:
        if item[0] in self.lossy:
            return False
        return item[0] in self.pairs or (item in self.same and item not in self.changed)


class WitnessedSave(ForeignSave):
    """A kept tensor whose way through the user's hooks is watched (note 1)."""

    __slots__ = ("digest", "form", "pair", "trust", "version", "view")

    def __init__(self, save: ForeignSave, t: Tensor, trust: Trust, pair: str, view: int) -> None:
        super().__init__(save.packed, save.foreign_unpack)
        self.trust, self.pair, self.view = trust, pair, view
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.version = VersionStub(t)
            self.form = _form(t)
            self.digest = digest(t)

    def unpack(self) -> Tensor:
        """What the user's unpack hook returns."""
        t = super().unpack()
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            if self.version.is_current():  # else nobody knows what had to come back, and the tensor stays kept (note 3)
                form = _form(t)
                is_lossy = form[:3] != self.form[:3] or digest(t) != self.digest
                is_same = form == self.form and not is_lossy
                self.trust.came_back(self.pair, self.view, is_same=is_same, is_lossy=is_lossy)
        return t


def _form(t: Tensor) -> tuple[Any, ...]:
    is_usual = t.layout is torch.strided and not t.is_quantized
    return (t.shape, t.dtype, t.device, t.stride(), type(t), t.is_conj(), t.is_neg()) if is_usual else (t.layout,)


class _Entry(NamedTuple):
    """A dropped tensor that the user's hooks have not seen."""

    storage: StorageWeakRef
    save: weakref.ref[DroppedSave]
    tensor: weakref.ref[Tensor]
    place: tuple[Any, ...]
    """(offset, shape, stride) on its storage."""
    dtype: torch.dtype
    hooks: Hooks

    def is_alive(self) -> bool:
        """Whether somebody may write it and somebody read it."""
        return self.save() is not None and not self.storage.expired()


class Withheld:
    """Dropped tensors that the user's hooks have not seen, by their storages (note 2)."""

    def __init__(self) -> None:
        self.entries: dict[int, list[_Entry]] = {}
        self.is_used = False
        """Whether there ever were any."""

    def add(self, save: DroppedSave, t: Tensor, hooks: Hooks) -> None:
        """`save` stands for `t`, which these hooks would have got."""
        storage = t.untyped_storage()
        place = (int(t.storage_offset()), t.shape, t.stride())
        entry = _Entry(StorageWeakRef(storage), weakref.ref(save), weakref.ref(t), place, t.dtype, hooks)
        self.entries.setdefault(storage._cdata, []).append(entry)
        self.is_used = True

    def forget(self, storage: int) -> None:
        """A storage begins a new life."""
        self.entries.pop(storage, None)

    def prune(self) -> None:
        """Forget what nobody can write or read any more."""
        alive = {key: [e for e in entries if e.is_alive()] for key, entries in self.entries.items()}
        self.entries = {key: entries for key, entries in alive.items() if entries}

    def hand_over(self, tensors: list[Tensor]) -> list[Tensor]:
        """Give to the user's hooks what lies on the storages of tensors that are about to be written. Returns what was given."""
        keys = {key for t in tensors if (key := storage_key(t)) is not None}
        return [t for key in keys for entry in self.entries.pop(key, ()) if (t := _given(entry)) is not None]

    def hand_over_all(self) -> list[Tensor]:
        """The same for all that is still alive."""
        entries, self.entries = self.entries, {}
        return [t for several in entries.values() for entry in several if (t := _given(entry)) is not None]


def _given(entry: _Entry) -> Tensor | None:
    """The tensor of an entry, after the user's pack hook got it; None where it is not alive."""
    save = entry.save()
    if save is None or entry.storage.expired():
        return None
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        t = entry.tensor()
        if t is None or storage_key(t) != entry.storage.cdata:  # the object is gone, or was given another storage
            storage = torch.UntypedStorage._new_with_weak_ptr(entry.storage.cdata)
            if storage is None:
                return None
            t = torch.empty(0, dtype=entry.dtype, device=storage.device).set_(storage, *entry.place)  # type: ignore[arg-type]
    pack, unpack = entry.hooks
    # inside of an op function modes are off
    with our_modes_off(), torch._C.DisableTorchFunction(), torch.no_grad():
        save.pending = ForeignSave(pack(t), unpack)
    return t


def identity_of(hooks: Hooks) -> str:
    """What a pair of hooks is known by (note 4), in other processes, too."""
    return hashlib.sha256(repr([_identity(hook, 0) for hook in hooks]).encode()).hexdigest()[:16]


def _identity(value: Any, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if depth == _DEEPEST:
        return type(value)
    if isinstance(value, tuple):
        return [_identity(v, depth + 1) for v in value]
    if isinstance(value, functools.partial):
        return _identity(value.func, depth + 1), _identity((*value.args, *value.keywords.items()), depth + 1)
    if isinstance(value, types.MethodType):
        return _identity(value.__func__, depth + 1), _identity_of_object(value.__self__, depth + 1)
    if isinstance(value, types.FunctionType):
        values = (*(content for _, content in bound_cells(value)), *(value.__defaults__ or ()))
        values += tuple((value.__kwdefaults__ or {}).items())
        return value.__module__, _identity_of_code(value.__code__), [_identity(v, depth + 1) for v in values]
    if isinstance(value, types.BuiltinFunctionType | type):
        return value.__module__, value.__qualname__
    if callable(value) and not isinstance(value, torch.nn.Module):  # which hooks rather write notes to
        return _identity_of_object(value, depth)
    return type(value)


def _identity_of_code(code: types.CodeType) -> Any:
    constants = [_identity_of_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_qualname, code.co_names, code.co_code, constants


def _identity_of_object(value: Any, depth: int) -> Any:
    """A callable object, or the one that a method belongs to: its class and its plain attributes."""
    attributes = getattr(value, "__dict__", {})
    return type(value), [(k, _identity(v, max(depth, _DEEPEST - 1))) for k, v in attributes.items()]
