"""Who is who: storages by the live storage object, tensor objects by the live tensor object, and the versions of both.

Notes:
1. Nothing here holds a tensor or a storage: all are known by weak reference, whose callback fires exactly at death.
   Addresses (`data_ptr`) never identify anything; `StorageImpl` addresses do only while the weak reference is alive.
2. A storage of the step can have several *incarnations*: the allocation itself, and copies that came back from the spill. Only
   the death of the first says how long it was held; a copy that outlives its autograd node shows that somebody took it.
3. Tensors without storage (sparse, nested, wrapper subclasses) get an anonymous storage of no bytes for each object.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from keepwise.ir import NO_OP, Category, Value

Tensor = torch.Tensor


@dataclass(slots=True, eq=False)
class StorageDraft:
    """What becomes an `ir.Storage`."""

    id: int
    nbytes: int
    device: str
    category: Category
    birth: int
    held_until: int | None = None
    """None while it lives."""
    saved_until: int = NO_OP
    writers: list[int] = field(default_factory=list)
    """Ops that wrote it after its birth, in order."""
    name: str = ""
    holder: str = ""
    keep_reason: str = ""
    packed: tuple[int, float] | None = None
    """Bytes of a packed form, and seconds to pack and unpack."""
    is_leaf: bool = False
    """Whether it is neither of the model nor an argument, and no recorded op made it."""

    def keep(self, reason: str) -> None:
        """Give the first reason why it must not be dropped."""
        if not self.keep_reason:
            self.keep_reason = reason


class Incarnation:
    """One live allocation that stands for a storage of the step (note 2)."""

    __slots__ = ("__weakref__", "draft", "is_copy", "is_superseded", "ref", "version")

    def __init__(self, draft: StorageDraft, *, version: int, is_copy: bool) -> None:
        self.draft = draft
        self.version = version
        self.is_copy = is_copy
        self.is_superseded = False
        self.ref: weakref.ref[object] | None = None


class TensorObject:
    """One live tensor object."""

    __slots__ = ("geometry", "incarnation", "ref", "value", "version", "view")

    def __init__(self, incarnation: Incarnation, view: int, value: int, version: int, geometry: object) -> None:
        self.incarnation = incarnation
        self.view = view
        self.value = value
        self.version = version
        self.geometry = geometry
        self.ref: weakref.ref[Tensor] | None = None


def _geometry(t: Tensor) -> tuple[object, ...]:
    if t.layout is not torch.strided or t.is_nested:
        return (t.layout,)
    return (t.shape, t.stride(), t.storage_offset(), t.dtype)


class ValueTable:
    """All storages, tensor objects and values of a step."""

    def __init__(self) -> None:
        self.clock = NO_OP
        """Index of the last op that began."""
        self.storages: list[StorageDraft] = []
        self.values: list[Value] = []
        self.late_copies: list[tuple[StorageDraft, int]] = []
        """Deaths of copies, as (storage, moment): note 2."""
        self.overhead = 0.0
        """Seconds spent on measuring and writing down."""
        self._incarnations: dict[int, Incarnation] = {}
        self._objects: dict[int, TensorObject] = {}
        self._closed = False

    # ------------------------------------------------------------------ storages

    def add_storage(
        self, t: Tensor, *, category: Category, birth: int, name: str = "", holder: str = ""
    ) -> Incarnation:
        """Write down the storage of `t`; the caller knows that it is new."""
        storage = storage_of(t)
        draft = StorageDraft(
            id=len(self.storages),
            nbytes=storage.nbytes() if storage is not None else 0,
            device=str(t.device),
            category=category,
            birth=birth,
            name=name,
            holder=holder,
        )
        self.storages.append(draft)
        incarnation = Incarnation(draft, version=0, is_copy=False)
        self._watch(incarnation, storage if storage is not None else t)
        if storage is None:
            draft.keep("a tensor without a strided storage")
        return incarnation

    def replace(self, incarnation: Incarnation, t: Tensor) -> Incarnation:
        """Let the storage of `t` stand for a known storage from now on, instead of `incarnation`."""
        fresh = Incarnation(incarnation.draft, version=incarnation.version, is_copy=False)
        incarnation.is_superseded = True  # The engine's operand dies now: plainly it is the same memory.
        self._watch(fresh, storage_of(t) or t)
        return fresh

    def add_copy(self, t: Tensor, draft: StorageDraft, version: int) -> Incarnation:
        """A spilled storage came back as the storage of `t`."""
        copy = Incarnation(draft, version=version, is_copy=True)
        self._watch(copy, storage_of(t) or t)
        return copy

    def find(self, t: Tensor) -> Incarnation | None:
        """The incarnation that `t` lies on, if its storage was seen before."""
        return self._incarnations.get(_key(t))

    def _watch(self, incarnation: Incarnation, target: object) -> None:
        key = target._cdata if isinstance(target, torch.UntypedStorage) else -id(target)
        table = self._incarnations
        this = weakref.ref(self)

        def died(ref: weakref.ref[object]) -> None:
            if table.get(key) is incarnation:
                del table[key]
            me = this()
            if me is None or me._closed or incarnation.is_superseded:
                return
            if incarnation.is_copy:
                me.late_copies.append((incarnation.draft, me.clock))
            else:
                incarnation.draft.held_until = me.clock

        table[key] = incarnation
        incarnation.ref = weakref.ref(target, died)

    def close(self) -> None:
        """The step is over: deaths from now on mean nothing."""
        self._closed = True

    def copies_alive(self) -> list[StorageDraft]:
        """Storages of which somebody still holds a copy that came back from the spill."""
        return [i.draft for i in self._incarnations.values() if i.is_copy and not i.is_superseded]

    def leaves_alive(self) -> tuple[weakref.ref[object], ...]:
        """The storages that outlive the step although nothing says that they do: somebody outside holds them."""
        found = [i for i in self._incarnations.values() if i.draft.is_leaf or not i.draft.category.is_static]
        return tuple(i.ref for i in found if i.ref is not None and not i.is_copy)

    def known_incarnation(self, t: Tensor) -> Incarnation:
        """The incarnation of a tensor that was read before."""
        found = self._incarnations.get(_key(t))
        assert found is not None
        return found

    @contextlib.contextmanager
    def clock_stops(self) -> Iterator[None]:
        """What happens inside is our doing and costs the step nothing."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.overhead += time.perf_counter() - began

    # ------------------------------------------------------------------ values

    def known(self, t: Tensor) -> TensorObject | None:
        """The object `t`, if it was seen before."""
        found = self._objects.get(id(t))
        if found is not None and found.ref is not None and found.ref() is t:
            return found
        return None

    def read(self, t: Tensor) -> int:
        """Value of a tensor object as it is now; makes one if the object is new or its storage was written since."""
        entry = self.known(t)
        incarnation = self.find(t)
        if incarnation is None:
            # Rule for the unknown: made by code that no mode sees. The recorder judges later whether it existed before.
            incarnation = self.add_storage(t, category=Category.ACTIVATION, birth=NO_OP)
            incarnation.draft.is_leaf = True
        if entry is None or entry.incarnation.draft is not incarnation.draft:
            return self.bind(t, incarnation, producer=NO_OP).value
        if entry.version != incarnation.version:
            writers = incarnation.draft.writers
            producer = writers[incarnation.version - 1] if 0 < incarnation.version <= len(writers) else NO_OP
            self._next_value(t, entry, incarnation, producer)
        return entry.value

    def returned(self, t: Tensor, op: int, *, category: Category) -> int:
        """Value of a result of op `op`."""
        incarnation = self.find(t)
        if incarnation is None:
            incarnation = self.add_storage(t, category=category, birth=op)
        entry = self.known(t)
        if entry is None or entry.incarnation.draft is not incarnation.draft:
            return self.bind(t, incarnation, producer=op).value
        if entry.version != incarnation.version or entry.geometry != _geometry(t):
            self._next_value(t, entry, incarnation, op)
        return entry.value

    def bind(
        self, t: Tensor, incarnation: Incarnation, *, producer: int, like: TensorObject | None = None
    ) -> TensorObject:
        """Make `t` known. With `like` it is another name for that object at its present value."""
        if like is None:
            value = len(self.values)
            self._append(t, incarnation, view=value, producer=producer)
            entry = TensorObject(incarnation, value, value, incarnation.version, _geometry(t))
        else:
            entry = TensorObject(incarnation, like.view, like.value, like.version, _geometry(t))
        key = id(t)
        this = weakref.ref(self)

        def died(
            ref: weakref.ref[Tensor],
        ) -> None:  # holds nothing: else parameters had weak references until a collection
            me = this()
            found = me._objects.get(key) if me is not None else None
            if me is not None and found is not None and found.ref is ref:
                del me._objects[key]

        entry.ref = weakref.ref(t, died)
        self._objects[key] = entry
        return entry

    def _next_value(self, t: Tensor, entry: TensorObject, incarnation: Incarnation, producer: int) -> None:
        entry.value = len(self.values)
        entry.version = incarnation.version
        entry.incarnation = incarnation
        entry.geometry = _geometry(t)
        self._append(t, incarnation, view=entry.view, producer=producer)

    def _append(self, t: Tensor, incarnation: Incarnation, *, view: int, producer: int) -> None:
        strided = t.layout is torch.strided and not t.is_nested
        self.values.append(
            Value(
                id=len(self.values),
                storage=incarnation.draft.id,
                version=incarnation.version,
                view=view,
                shape=tuple(t.shape) if not t.is_nested else (),
                stride=t.stride() if strided else (),
                offset=int(t.storage_offset()) if strided else 0,
                dtype=str(t.dtype).removeprefix("torch."),
                producer=producer,
            )
        )

    def written(self, incarnation: Incarnation, op: int) -> None:
        """Op `op` wrote a storage that it did not make."""
        draft = incarnation.draft
        draft.writers.append(op)
        incarnation.version = len(draft.writers)


def storage_of(t: Tensor) -> torch.UntypedStorage | None:
    """The storage of `t`; None where it has none of its own (note 3)."""
    if t.layout is not torch.strided or t.is_nested or hasattr(type(t), "__tensor_flatten__"):
        return None
    try:
        return t.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _key(t: Tensor) -> int:
    storage = storage_of(t)
    return storage._cdata if storage is not None else -id(t)
