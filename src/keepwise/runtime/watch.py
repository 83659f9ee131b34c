"""`Watch`: what the guard of a plan and the recorder of `checkpoint` share.

Notes:
1. Tensor objects are known by weak reference. An entry lives as long as its object: a reused `id` is never believed. What replays
   make is also known by its storage, because `t.data = other` gives an object another one.
2. `lying` says which of the objects that replays make lie on which storage. It is asked when something is written that the
   recording does not explain (another wiring, an alias made by `.data`), and when a view that is not replayed shall be
   described by numbers. A storage's address is only believed while one of its objects is alive.
3. Hooks on saved tensors do not stack: only the innermost pair sees a tensor. The user's own hooks inside the model win; around it,
   ours come first and pass on what they keep.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from keepwise.runtime import aside, originals
from keepwise.runtime.beneath import our_modes_off
from keepwise.runtime.calls import in_shadow, is_shadow, storage_key, tensors_out
from keepwise.runtime.foreign import Withheld
from keepwise.runtime.geometry import Geometry
from keepwise.runtime.holding import ForeignSave, KeptSave, Namer, TracedSave
from keepwise.runtime.hooks import Hooks, innermost_hooks, pop, push
from keepwise.runtime.replay import DroppedSave
from keepwise.runtime.stats import StepStats
from keepwise.runtime.unseen import unseen

Tensor = torch.Tensor

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
_dispatch_mode: Any = torch._C._get_dispatch_mode  # type: ignore[attr-defined]
_TRACERS: tuple[Any, ...] = tuple(torch._C._TorchDispatchModeKey.__members__.values())  # type: ignore[attr-defined]
_ref = weakref.ref


class Watch(TorchDispatchMode):
    """Identities of tensors, and hooks on saved tensors."""

    supports_higher_order_operators: ClassVar[bool] = True
    is_of_keepwise: ClassVar[bool] = True
    looks_away = False
    """Whether the mode is off while the engine runs a backward pass (`passes`)."""

    def __init__(self, stats: StepStats, namer: Namer | None) -> None:
        super().__init__()
        self.stats = stats
        self.namer = namer
        self.ids: dict[int, tuple[weakref.ref[Tensor], int, int | None]] = {}
        """id of a tensor object -> (the object, its view id, its storage if replays make it)."""
        self.lying: dict[int, list[tuple[weakref.ref[Tensor], int]]] = {}
        """Storage -> objects on it that replays make (note 2)."""
        self.foreign: Hooks | None = None
        """The hooks around ours."""
        self.passes_on = False
        """Whether they must see every saved tensor."""
        self.withheld = Withheld()
        """What was dropped under the user's hooks (see `foreign`)."""
        self.is_entered = False
        self.num_pushed = 0
        """How often our pair is on the stack."""

    def users_hooks(self) -> Hooks | None:
        """The user's pair that sees what we keep; None if there is none."""
        hooks = self.foreign
        while hooks is not None and hooks[1] is unpack:  # of a region or plan around us
            hooks = hooks[0].__self__.foreign  # type: ignore[attr-defined]
        return hooks

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled submodules stay compiled under it."""
        return True

    def __enter__(self) -> Any:
        aside.install()
        originals.install()
        self.foreign = innermost_hooks()
        self.passes_on = _clones_before_writes(self.foreign)
        self._push()
        try:
            self.is_entered = True
            return super().__enter__()
        except BaseException:
            self.is_entered = False
            self._take_off()
            raise

    def __exit__(self, *exc: Any) -> None:
        self.close(*exc)

    def close(self, *exc: Any) -> None:
        """Leave; does what is left to do of it, as an interrupt by hand may come before `__exit__` has begun, or in it."""
        self.is_entered = False
        try:
            modes = _get_current_dispatch_mode_stack()
            if modes and modes[-1] is self:
                super().__exit__(*exc)
        finally:
            while self.num_pushed:
                self._take_off()
            self.ids.clear()
            self.lying.clear()

    @contextlib.contextmanager
    def on_top(self) -> Iterator[None]:
        """Our hooks innermost again, where the user's own were pushed inside `with plan:` around the model: note 3."""
        top = innermost_hooks()
        if top is None or top[1] is unpack:
            yield
            return
        outer, self.foreign, self.passes_on = self.foreign, top, _clones_before_writes(top)
        self._push()
        try:
            yield
        finally:
            self._take_off()
            self.foreign, self.passes_on = outer, _clones_before_writes(outer)

    def withhold(self, save: DroppedSave, t: Tensor) -> None:
        """A tensor was dropped: the user's hooks around ours, if there are any, do not see it."""
        hooks = self.users_hooks() if self.foreign is not None else None
        if hooks is not None:
            self.withheld.add(save, t, hooks)

    def lies_on(self, hooks: Hooks | None) -> None:
        """What is around ours is this pair from now on."""
        self.foreign, self.passes_on = hooks, _clones_before_writes(hooks)

    def _push(self) -> None:
        self.num_pushed += 1
        push(self.pack, unpack)

    def _take_off(self) -> None:
        """Take our innermost pair off, also from under pairs that the user pushed in forward and left there.

        Where an interrupt by hand came between, it is off the stack already: then nothing but the count changes.
        """
        above: list[Hooks] = []
        try:
            while (top := innermost_hooks()) is not None:
                pop()
                if top[1] is unpack and getattr(top[0], "__self__", None) is self:
                    break
                above.append(top)
        finally:
            for hooks in reversed(above):
                push(*hooks)
        self.num_pushed -= 1

    def view_of(self, t: Tensor) -> int:
        """View id of a tensor object that was made or bound in this frame; -1 if unknown."""
        entry = self.ids.get(id(t))
        if entry is not None and entry[0]() is t:
            return entry[1]
        return -1

    def is_itself(self, t: Tensor) -> bool:
        """Whether an object that is known to be made by replays still has the storage that it was made with."""
        return self.ids[id(t)][2] == storage_key(t)

    def bind(self, outs: tuple[int, ...], result: Any, *, made: bool) -> None:
        """Remember the results of an op.

        Args:
            outs: view id of each result, -1 for none.
            result: what the op returned.
            made: whether a replay makes them.
        """
        if isinstance(result, Tensor):
            if outs:
                self._bind_one(outs[0], result, made)
            return
        for view, t in zip(outs, tensors_out(result), strict=False):
            if t is not None and view >= 0:
                self._bind_one(view, t, made)

    def _bind_one(self, view: int, t: Tensor, made: bool) -> None:
        ref = _ref(t)
        key = storage_key(t) if made else None
        self.ids[id(t)] = (ref, view, key)
        if key is not None:
            self.lying.setdefault(key, []).append((ref, view))

    def forget_all(self) -> None:
        """Nothing that was seen so far has an identity any more."""
        self.ids = {}
        self.lying = {}

    def look_away(self) -> None:
        """A backward pass begins or ends during which the mode is off: what it writes is not seen, so nothing is known any more."""
        self.forget_all()

    def views_on(self, t: Tensor) -> list[int]:
        """Views that replays make on the storage of `t`, those of dead objects included."""
        key = storage_key(t)
        return [view for _, view in self.lying.get(key, ())] if key is not None else []

    def geometry(self, t: Tensor, root: int) -> Geometry | None:
        """`t` described over the object `root`, if that object is alive and `t` lies within it (note 2)."""
        key = storage_key(t)
        if key is None or t.is_conj() or t.is_neg():
            return None
        for ref, view in self.lying.get(key, ()):
            if view == root:
                base = ref()
                if base is not None:
                    return Geometry.over(base, t, root)
        return None

    @unseen
    def pack(self, t: Tensor) -> Any:
        """Hook: what autograd holds instead of a saved tensor; what is asked of it here no mode of the user's sees."""
        with torch._C.DisableTorchFunction():
            save = self.dropped(t)
            if save is not None:
                return save
            if self.foreign is None and not in_shadow():
                return self.hold(t)
        return self.keep(t)

    def dropped(self, t: Tensor) -> DroppedSave | None:
        """A handle on the replay of a saved tensor; None: it is kept."""
        raise NotImplementedError

    def hold(self, t: Tensor) -> KeptSave:
        """A saved tensor that nobody else's hooks see, held."""
        return KeptSave(t, self.namer)

    def keep(self, t: Tensor) -> Any:
        """Hold a saved tensor as plain autograd would."""
        if in_shadow():
            return TracedSave(t)
        foreign = self.foreign
        if foreign is None:
            return self.hold(t)
        if foreign[1] is unpack:  # a region inside a planned model: the plan decides
            return foreign[0](t)
        with torch._C.DisableTorchFunction():
            self.stats.foreign_bytes += t.nbytes if t.layout is torch.strided else 0
        with our_modes_off():  # what the user's hook does is no part of the step that was recorded
            return ForeignSave(foreign[0](t), foreign[1])


def _clones_before_writes(hooks: Hooks | None) -> bool:
    """Whether hooks are those of `allow_mutation_on_saved_tensors`, under which what is saved may be written afterwards."""
    return hooks is not None and "_swap_with_cloned" in getattr(hooks[0], "__qualname__", "")


def can_watch() -> bool:
    """Whether what runs now is a step of training that hooks and a mode may watch.

    It is not where no gradients are recorded, where hooks are forbidden, in a functorch transform, or where a tracer runs the
    model on tensors without contents (a compiler, fake tensors, `make_fx`).
    """
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and _autograd._saved_tensors_hooks_is_enabled()
        and _functorch_stack() is None
        and not torch.compiler.is_compiling()
        and all(_dispatch_mode(key) is None for key in _TRACERS)
    )


def foreign_modes() -> frozenset[type]:
    """Dispatch modes around us that are no part of PyTorch's own machinery."""
    return frozenset(type(m) for m in _get_current_dispatch_mode_stack() if not type(m).is_infra_mode())


def of_subclass(func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    """What a mode of ours does with a call on tensor subclasses: the plain ops that it consists of come to us next.

    Not so where it belongs to a mode below ours, which `NotImplemented` would leave out: shapes on fake tensors, the user's own modes.
    """
    if is_shadow(types) or foreign_modes():
        return func(*args, **(kwargs or {}))
    return NotImplemented


@unseen
def unpack(saved: KeptSave | DroppedSave | ForeignSave | TracedSave) -> Tensor:
    """Hook: the saved tensor again."""
    if type(saved) is DroppedSave and saved.pending is not None:
        saved = saved.pending
    if isinstance(saved, ForeignSave):
        return saved.unpack()
    with torch._C.DisableTorchFunction():
        return saved.unpack()


aside.ours = unpack
