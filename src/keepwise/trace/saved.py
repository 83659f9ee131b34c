"""The hooks on saved tensors while a step is recorded.

Notes:
1. A saved tensor is copied away, so that its storage dies when the last holder *other than autograd* lets go. The handle that
   autograd holds instead dies exactly when autograd lets go.
2. A saved tensor may be written afterwards: by the op that saved it (RReLU's noise, running statistics), through a view with a
   version counter of its own (the gates of an LSTM cell), or behind autograd's back. Plain autograd reads what is there in
   backward, so every write renews the copies. The value that counts as saved is the one after the op that saved it.
3. A restored tensor that requires grad is detached by autograd right away. That op exists only because of our hooks: it is not
   written down.
4. `torch.func` transforms switch hooks off, and refuse to where some are active: ours step aside for their duration.
5. Of several pairs only the innermost sees a tensor. Where the user's own are active around the model, ours go on top for the
   duration of its forward, as they do under a plan, and pass on what they are given; a tensor that comes back changed (a lossy
   store) must be kept. What `torch.utils.checkpoint` put there is left alone: it counts what it sees.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from keepwise.ir import NO_OP
from keepwise.runtime import originals
from keepwise.runtime.beneath import our_modes_off
from keepwise.runtime.calls import in_shadow
from keepwise.runtime.digest import digest
from keepwise.runtime.foreign import identity_of
from keepwise.runtime.holding import TracedSave
from keepwise.runtime.hooks import Hooks, innermost_hooks, pop, push
from keepwise.runtime.packing import packed_price
from keepwise.runtime.unseen import unseen
from keepwise.trace.admission import same_bytes
from keepwise.trace.drafts import OpDraft, Saved, SaveDraft, Visits, WeakTensor, current_node
from keepwise.trace.paths import PathTracker, source_line
from keepwise.trace.spill import Copy, Geometry, can_spill
from keepwise.trace.values import Incarnation, StorageDraft, TensorObject, ValueTable, storage_of

Tensor = torch.Tensor

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_PLAIN_TYPES = (torch.Tensor, nn.Parameter, nn.Buffer)
_WRITTEN_LATER = "written after the user's own hooks got it"
_DETACH = torch.ops.aten.detach.default


class SavedTensors:
    """Packs and unpacks, and knows which saved tensor is which value."""

    def __init__(self, *, table: ValueTable, ops: list[OpDraft], paths: PathTracker, spill: bool) -> None:
        self.saves: list[SaveDraft] = []
        self.visits = Visits()
        self.functorch_paths: dict[str, None] = {}
        self._table = table
        self._ops = ops
        self._paths = paths
        self._spill = spill
        self._fresh: list[tuple[Saved, WeakTensor]] = []
        """Saved since the last op returned."""
        self._packed: dict[int, weakref.WeakSet[Saved]] = {}
        """Storage -> the handles that stand for copies of it."""
        self._thread = threading.get_ident()
        self._restored: tuple[WeakTensor, TensorObject] | None = None
        self._copies: weakref.WeakValueDictionary[tuple[int, int], Copy] = weakref.WeakValueDictionary()
        self._handles: set[weakref.ref[Saved]] = set()
        self.pairs: dict[str, bool] = {}
        """Pairs of the user's that were around the model -> whether all that they gave back was what they had been given."""
        self._passed: dict[int, StorageDraft] = {}
        """Storages of what they were given."""
        self._outer: list[Hooks | None] = []
        """For each running call of the model: the user's hooks that ours lie on."""

    # ------------------------------------------------------------------ for the mode

    def are_innermost(self) -> bool:
        """Whether these hooks see what is saved now."""
        top = innermost_hooks()
        return top is not None and getattr(top[0], "__self__", None) is self

    def other(self) -> Any:
        """The pack hook of somebody else that sees what is saved now; None if there is none."""
        top = innermost_hooks()
        if top is None or getattr(top[0], "__self__", None) is self:
            return None
        return top[0]

    def builds_graph(self) -> bool:
        """Whether what runs now, in backward or not, is recorded by autograd under these hooks."""
        return torch.is_grad_enabled() and self.are_innermost()

    def detach_of_restored(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Note 3: the result of such a detach; None for any other op."""
        restored, self._restored = self._restored, None
        if restored is None or func is not _DETACH or args[0] is not restored[0]():
            return None
        result: Tensor = func(*args, **kwargs)
        incarnation = self._table.find(result)
        if incarnation is not None:
            self._table.bind(result, incarnation, producer=NO_OP, like=restored[1])
        return result

    def op_returned(self, written: dict[int, Incarnation]) -> None:
        """An op is over: renew what it wrote after it was saved (note 2)."""
        for incarnation in written.values():
            storage = incarnation.ref() if incarnation.ref is not None else None
            if incarnation.is_copy or not isinstance(storage, torch.UntypedStorage):
                continue
            incarnation.draft.packed = None
            for saved in tuple(self._packed.get(incarnation.draft.id, ())):
                saved.copy = self._copy(storage, incarnation)
                if saved.foreign is not None:
                    incarnation.draft.keep(_WRITTEN_LATER)
        if written:
            for saved, ref in self._fresh:
                t = ref()
                if t is not None and saved.incarnation.draft.id in written:
                    self.saves[saved.index].value = self._table.read(t)
        self._fresh.clear()

    def model_begins(self) -> bool:
        """The model's forward begins: be innermost (note 5). Whether hooks of the user's were."""
        top = innermost_hooks()
        if (
            top is None
            or self.are_innermost()
            or is_checkpoint(top[0])
            or not _autograd._saved_tensors_hooks_is_enabled()
        ):
            self._outer.append(None)
            return False
        self._outer.append(top)
        self.pairs.setdefault(identity_of(top), True)
        push(self.pack, self.unpack)
        return True

    def model_ends(self) -> None:
        """The model's forward is over, or has failed."""
        if self._outer and self._outer.pop() is not None and self.are_innermost():
            pop()

    # ------------------------------------------------------------------ hooks

    @unseen
    def pack(self, t: Tensor) -> Saved | TracedSave:
        """Hook: copy the tensor away and let autograd hold a handle."""
        if in_shadow():
            return TracedSave(t)
        with self._table.clock_stops(), torch._C.DisableTorchFunction():
            table = self._table
            value = table.read(t)
            incarnation = table.known_incarnation(t)
            draft = incarnation.draft
            saved = Saved(len(self.saves), incarnation)
            self.saves.append(
                SaveDraft(value=value, at=len(self._ops), storage=draft, path=self._paths.path, source=source_line())
            )
            if draft.category.is_static:
                saved.kept = _detached(t)
            elif not can_spill(t):
                saved.kept = _detached(t)
                draft.keep(f"saved as {_kind(t)}")
                self._keep_parts(t)
            else:
                saved.geometry = Geometry(t)
                saved.copy = self._copy(t.untyped_storage(), incarnation)
                self._packed.setdefault(draft.id, weakref.WeakSet()).add(saved)
                if draft.packed is None:
                    with torch._C._DisableTorchDispatch():
                        draft.packed = packed_price(t)
            self._fresh.append((saved, weakref.ref(t)))
            self._handles.add(weakref.ref(saved, self._on_release(saved.index)))
            outer = self._outer[-1] if self._outer else None
            if outer is not None:
                self._passed[draft.id] = draft
                with our_modes_off():
                    saved.foreign = (outer, outer[0](t))
            return saved

    @unseen
    def unpack(self, saved: Saved | TracedSave) -> Tensor:
        """Hook: the saved tensor again."""
        if isinstance(saved, TracedSave):
            return saved.unpack()
        with self._table.clock_stops(), torch._C.DisableTorchFunction():
            save = self.saves[saved.index]
            if threading.get_ident() != self._thread:
                saved.incarnation.draft.keep("read in another thread than the one that was recorded")
            node = current_node()
            if node is None:
                save.in_forward = True
            else:
                visit = self.visits.at(node, self._table.clock)
                visit.saves.append(saved.index)
                if visit not in save.visits:
                    save.visits.append(visit)
                if self._paths.is_running() or self.builds_graph():
                    save.in_forward = True
            t, entry = self._restore(saved, save)
            if saved.foreign is not None:
                t, entry = self._returned(saved, t, entry)
            self._restored = (weakref.ref(t), entry)
            return t

    def _restore(self, saved: Saved, save: SaveDraft) -> tuple[Tensor, TensorObject]:
        table = self._table
        value = table.values[save.value]
        like = TensorObject(saved.incarnation, value.view, save.value, value.version, None)
        t = saved.kept
        if t is not None:
            entry = table.known(t)
            return t, entry if entry is not None else table.bind(
                t, table.find(t) or saved.incarnation, producer=NO_OP, like=like
            )
        assert saved.copy is not None
        assert saved.geometry is not None
        with torch._C._DisableTorchDispatch():
            storage, is_new = saved.copy.back()
            t = saved.geometry.on(storage)
        incarnation = table.find(t)
        if is_new or incarnation is None:
            draft = saved.incarnation.draft
            incarnation = table.add_copy(t, draft, len(draft.writers))
        return t, table.bind(t, incarnation, producer=NO_OP, like=like)

    def _returned(self, saved: Saved, t: Tensor, entry: TensorObject) -> tuple[Tensor, TensorObject]:
        """What the user's own hooks give back (note 5)."""
        assert saved.foreign is not None
        hooks, packed = saved.foreign
        with our_modes_off():
            back = hooks[1](packed)
        with _disable_current_modes():
            if _is_same(t, back):
                return t, entry
            draft, table = saved.incarnation.draft, self._table
            is_lossy = draft.keep_reason != _WRITTEN_LATER and not _has_same_values(t, back)
        draft.keep("the user's own hooks on saved tensors change it")
        if is_lossy:  # then it is by accident that other tensors come back as they were
            self.pairs[identity_of(hooks)] = False
            for passed in self._passed.values():
                passed.keep("the user's own hooks on saved tensors change others")
        incarnation = table.find(back) or table.add_copy(back, draft, len(draft.writers))
        return back, table.bind(back, incarnation, producer=NO_OP, like=entry)

    def _copy(self, storage: torch.UntypedStorage, incarnation: Incarnation) -> Copy:
        key = (incarnation.draft.id, incarnation.version)
        copy = self._copies.get(key)
        if copy is None:
            with torch._C._DisableTorchDispatch():
                copy = Copy(storage, to_disk=self._spill)
            self._copies[key] = copy
        return copy

    def _on_release(self, index: int) -> Callable[[weakref.ref[Saved]], None]:
        this = weakref.ref(self)

        def released(ref: weakref.ref[Saved]) -> None:
            me = this()
            if me is None:
                return
            me._handles.discard(ref)
            me.saves[index].released = me._table.clock
            visit = me.visits.current
            if visit is not None and index in visit.saves and torch._C._current_graph_task_id() != -1:
                visit.released = True

        return released

    def _keep_parts(self, t: Tensor) -> None:
        """The plain tensors in a saved subclass, and those that a sparse one consists of, live as long as it does."""
        anything: Any = t
        names = anything.__tensor_flatten__()[0] if hasattr(type(t), "__tensor_flatten__") else ()
        for name in names:
            part = getattr(t, name)
            found = self._table.find(part) if isinstance(part, Tensor) and storage_of(part) is not None else None
            if found is not None:
                found.draft.keep(f"part of a saved {type(t).__name__}")

    # ------------------------------------------------------------------ installing

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Be the hooks of this thread; note 4."""
        originals.install()
        disable, enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable
        aside = False

        def step_aside(*args: Any) -> None:
            nonlocal aside
            if self.are_innermost():
                pop()
                aside = True
                self.functorch_paths[self._paths.path] = None
            try:
                disable(*args)
            except BaseException:
                come_back()
                raise

        def come_back() -> None:
            nonlocal aside
            if aside:
                aside = False
                push(self.pack, self.unpack)

        def step_in() -> None:
            enable()
            come_back()

        _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = step_aside, step_in
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                try:
                    yield
                finally:
                    while self._outer:
                        self.model_ends()
        finally:
            _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = disable, enable


def is_checkpoint(hook: Any) -> bool:
    """Whether a hook belongs to `torch.utils.checkpoint`."""
    return getattr(hook, "__module__", "") == "torch.utils.checkpoint"


def _is_same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same bit for bit, strides included."""
    if a is b:
        return True
    if not can_spill(a) or not can_spill(b) or a.shape != b.shape or a.dtype != b.dtype or a.device != b.device:
        return False
    return a.stride() == b.stride() and same_bytes(a, b)


def _has_same_values(a: Tensor, b: Tensor) -> bool:
    """Whether only their strides differ."""
    return can_spill(a) and can_spill(b) and a.device == b.device and digest(a) == digest(b)


def _detached(t: Tensor) -> Tensor:
    """An alias without grad_fn: the tensor itself would hold the graph that holds it."""
    if not t.requires_grad or t.is_leaf:
        return t
    if type(t) in _PLAIN_TYPES:
        with torch._C._DisableTorchDispatch():
            return t.detach()
    with _disable_current_modes():
        return t.detach()


def _kind(t: Tensor) -> str:
    if type(t) not in _PLAIN_TYPES:
        return f"a {type(t).__name__}"
    if t.is_nested:
        return "a nested tensor"
    if t.is_quantized:
        return "a quantised tensor"
    if t.layout is not torch.strided:
        return f"a {str(t.layout).removeprefix('torch.')} tensor"
    return "a conjugate or negative view"
