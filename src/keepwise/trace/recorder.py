"""`record`: run one step for real and write down what a dispatch mode and the hooks on saved tensors see.

Notes:
1. An op is one call of `__torch_dispatch__`: below autograd and autocast, above the kernels. The guard of the runtime is a mode of
   the same kind and sees the same stream.
2. Identity, versions and deaths are `values`' business; saved tensors are copied away (`spill`), so that storages die when the
   last holder *other than autograd* lets go. The handles that autograd holds instead die when it lets go itself.
3. A tensor can be saved before it is written (RReLU's noise, running statistics): an op that writes what was saved just
   before it renews the copy.
4. A restored tensor that requires grad is detached by autograd right away. That op exists only because of our hooks: it is
   not written down.
5. Under a mode the engine adds gradients out of place. Plainly it adds in place where nobody else holds the first: told
   by the reference counts, and by the node having let go of its saved tensors already (its own additions come before).
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from keepwise.ir import NO_OP, Category, Phase, Step
from keepwise.runtime.calls import tensors_in, tensors_out
from keepwise.runtime.special import replay_arguments
from keepwise.trace.accumulate import counts_of, is_dense, unshared_counts
from keepwise.trace.admission import Admission, Effects, schema_effects
from keepwise.trace.assemble import assemble
from keepwise.trace.paths import PathTracker, compiled_regions, source_line
from keepwise.trace.signature import signature_of
from keepwise.trace.spill import Copy, Geometry, can_spill
from keepwise.trace.values import Incarnation, StorageDraft, TensorObject, ValueTable

Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
_current_node = torch._C._current_autograd_node
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_aten = torch.ops.aten
_PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))


@dataclass(slots=True, eq=False)
class OpDraft:
    """What becomes an `ir.Op`."""

    target: str
    phase: Phase
    inputs: list[int]
    signature: str = ""
    outputs: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    is_view: bool = False
    effects: Effects | None = None
    why_not: str = ""
    seconds: float = 0.0
    """Of this one execution."""
    path: str = ""
    source: str = ""
    visit: Visit | None = None


@dataclass(slots=True, eq=False)
class Visit:
    """One execution of an autograd node."""

    key: object
    name: str
    began: int
    """Clock when it was first seen."""
    first: int = NO_OP
    last: int = NO_OP
    saves: list[int] = field(default_factory=list)
    released: bool = False
    """Whether it has let go of a saved tensor."""


@dataclass(slots=True, eq=False)
class SaveDraft:
    """What becomes an `ir.Save`."""

    value: int
    at: int
    storage: StorageDraft
    visits: list[Visit] = field(default_factory=list)
    released: int | None = None
    """Clock when autograd let go."""
    in_forward: bool = False
    """Whether it was unpacked while the model's forward was running, or by a backward that builds a graph."""
    path: str = ""
    source: str = ""


class Saved:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "copy", "geometry", "incarnation", "index", "kept", "object")

    def __init__(self, index: int, incarnation: Incarnation, entry: TensorObject) -> None:
        self.index = index
        self.incarnation = incarnation
        self.object = entry
        self.kept: Tensor | None = None
        self.copy: Copy | None = None
        self.geometry: Geometry | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One recorded step."""

    step: Step
    result: Any
    """What `run` returned."""
    calls: tuple[range, ...] = ()
    """Moments of each call of the model's forward: first op to one past the last."""
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()
    """The user's own generators that were drawn from, with their states before the first draw."""
    functorch_paths: tuple[str, ...] = ()
    """Modules in which `torch.func` transforms ran: no hooks on saved tensors are possible there."""
    compiled: tuple[str, ...] = ()
    """Modules that are `torch.compile`d."""
    foreign_hooks: tuple[str, ...] = ()
    """Modules in which the user's own hooks on saved tensors were active."""
    checkpoints: tuple[str, ...] = ()
    """Modules in which `torch.utils.checkpoint` was active."""
    leaves: tuple[weakref.ref[Any], ...] = ()
    """Storages that no recorded op made, where still alive: those that live on existed before the next step."""
    overhead_seconds: float = 0.0
    """Time spent on writing down."""
    wall_seconds: float = 0.0


class Recorder(TorchDispatchMode):
    """The mode and the hooks; use `record`."""

    supports_higher_order_operators: ClassVar[bool] = True

    def __init__(self, *, paths: PathTracker, admit: Admission | None, spill: bool) -> None:
        super().__init__()
        self.table = ValueTable()
        self.ops: list[OpDraft] = []
        self.saves: list[SaveDraft] = []
        self.paths = paths
        self.admit = admit
        self.spill = spill
        self.optimizer_depth = 0
        self.overhead = 0.0
        self.generators: dict[int, tuple[torch.Generator, Tensor]] = {}
        self.functorch_paths: dict[str, None] = {}
        self.foreign_hooks: dict[str, None] = {}
        self.checkpoints: dict[str, None] = {}
        self.hooks_off = 0
        self._visit: Visit | None = None
        self._fresh: list[tuple[Saved, weakref.ref[Tensor]]] = []
        self._restored: tuple[weakref.ref[Tensor], TensorObject] | None = None
        self._copies: weakref.WeakValueDictionary[tuple[int, int], Copy] = weakref.WeakValueDictionary()
        self._handles: set[weakref.ref[Saved]] = set()
        self._unshared = unshared_counts()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled submodules stay compiled under it."""
        return True

    # ------------------------------------------------------------------ ops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        if types and not _PLAIN_TYPES.issuperset(types) and any(_desugars(t) for t in types):
            return NotImplemented  # the plain ops that it consists of come next
        kwargs = kwargs or {}
        if torch._C._functorch.peek_interpreter_stack() is not None:
            self.functorch_paths[self.paths.path] = None
            return func(*args, **kwargs)
        detached = self._detach_of_restored(func, args, kwargs)
        if detached is not None:
            return detached
        with torch._C.DisableTorchFunction():
            op, tensors, incarnations = self._begin(func, args, kwargs)
        try:
            result, op.seconds, effects = self._execute(op, func, args, kwargs)
        except BaseException as error:
            op.why_not = f"it raised {type(error).__name__}"
            raise
        with torch._C.DisableTorchFunction():
            op.effects = effects
            index = self.table.clock
            if self._is_accumulation(func, op, tensors):
                self._accumulate(op, index, tensors, incarnations, result)
            else:
                self._results(op, index, tensors, incarnations, effects, result)
        self._fresh.clear()
        self.overhead += time.perf_counter() - began - op.seconds
        return result

    def _begin(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[OpDraft, list[Tensor], list[Incarnation | None]]:
        index = len(self.ops)
        tensors = tensors_in(args, kwargs)
        op = OpDraft(target=str(func), phase=self._phase(), inputs=[], signature=signature_of(func, args, kwargs))
        self._place(op, index)
        incarnations = [self._input(t, op) for t in tensors]
        op.inputs = self._replay_inputs(func, args, kwargs, op.inputs)
        self.ops.append(op)
        self.table.clock = index
        self._note_generator(args, kwargs)
        return op, tensors, incarnations

    def _phase(self) -> Phase:
        if self.optimizer_depth:
            return Phase.OPTIMIZER
        if _graph_task() == -1:
            return Phase.FORWARD
        if torch.is_grad_enabled() and self._hooks_are_ours():
            return Phase.FORWARD
        return Phase.BACKWARD

    def _hooks_are_ours(self) -> bool:
        top = _top_hooks(False)
        return top is not None and getattr(top[0], "__self__", None) is self

    def _place(self, op: OpDraft, index: int) -> None:
        node = _current_node() if _graph_task() != -1 else None
        if node is None:
            op.path = self.paths.path
            op.source = source_line()
            if op.phase is Phase.FORWARD and not self.hooks_off:
                self._note_foreign_hooks()
            return
        visit = self._at(node)
        if visit.first == NO_OP:
            visit.first = index
        op.visit = visit
        if not visit.released:
            visit.last = index
        if self.paths.depth:
            op.path = self.paths.path

    def _at(self, node: Any) -> Visit:
        """The visit of the autograd node that runs now."""
        key = (id(node), node._sequence_nr() if hasattr(node, "_sequence_nr") else -1, _graph_task())
        if self._visit is None or self._visit.key != key:
            self._visit = Visit(key=key, name=node.name(), began=self.table.clock)
        return self._visit

    def _note_foreign_hooks(self) -> None:
        top = _top_hooks(False)
        if top is None or getattr(top[0], "__self__", None) is self:
            return
        where = (
            self.checkpoints if getattr(top[0], "__module__", "") == "torch.utils.checkpoint" else self.foreign_hooks
        )
        where[self.paths.path] = None

    def _input(self, t: Tensor, op: OpDraft) -> Incarnation | None:
        table = self.table
        op.inputs.append(table.read(t))
        incarnation = table.find(t)
        if incarnation is not None:
            incarnation.draft.last_read = table.clock + 1
        return incarnation

    @staticmethod
    def _replay_inputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[int]) -> list[int]:
        """Inputs without those that a replay leaves out."""
        fewer, _ = replay_arguments(func, args, kwargs)
        if fewer is args:
            return inputs
        kept: list[int] = []
        k = 0
        for before, after in zip(args, fewer, strict=True):
            n = len(tensors_in((before,), None))
            if after is before:
                kept.extend(inputs[k : k + n])
            k += n
        return [*kept, *inputs[k:]]

    def _execute(self, op: OpDraft, func: Any, args: Any, kwargs: Any) -> tuple[Any, float, Effects]:
        effects = None
        if self.admit is not None:
            effects = self.admit.known(op.signature, op.phase)
            if effects is None:
                return self.admit.run(func, args, kwargs, signature=op.signature, phase=op.phase)
        began = time.perf_counter()
        result = func(*args, **kwargs)
        seconds = time.perf_counter() - began
        return result, seconds, effects if effects is not None else schema_effects(func, args, kwargs)

    def _results(
        self,
        op: OpDraft,
        index: int,
        tensors: list[Tensor],
        incarnations: list[Incarnation | None],
        effects: Effects,
        result: Any,
    ) -> None:
        table = self.table
        written: dict[int, Incarnation] = {}
        for i in effects.writes:
            incarnation = incarnations[i]
            if incarnation is not None:
                written.setdefault(incarnation.draft.id, incarnation)
        for incarnation in written.values():
            table.written(incarnation, index)
        op.writes = list(written)
        if written:
            self._renew_saves(written)
            self._resized(tensors, incarnations, op)
        category = {
            Phase.FORWARD: Category.ACTIVATION,
            Phase.BACKWARD: Category.TEMPORARY,
            Phase.OPTIMIZER: Category.TEMPORARY,
        }[op.phase]
        outputs = [t for t in tensors_out(result) if t is not None]
        op.outputs = [table.returned(t, index, category=category) for t in outputs]
        read = {i.draft.id for i in incarnations if i is not None}
        op.is_view = bool(outputs) and not written and all(table.values[v].storage in read for v in op.outputs)

    def _resized(self, tensors: list[Tensor], incarnations: list[Incarnation | None], op: OpDraft) -> None:
        for t, incarnation in zip(tensors, incarnations, strict=True):
            if incarnation is None or incarnation.draft.id not in op.writes or t.layout is not torch.strided:
                continue
            try:
                nbytes = t.untyped_storage().nbytes()
            except (NotImplementedError, RuntimeError):
                continue
            if nbytes != incarnation.draft.nbytes:
                incarnation.draft.nbytes = max(nbytes, incarnation.draft.nbytes)
                incarnation.draft.keep("its storage was resized")

    def _note_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for a in (*args, *kwargs.values()):
            if isinstance(a, torch.Generator) and id(a) not in self.generators:
                self.generators[id(a)] = (a, a.get_state())

    # ------------------------------------------------------------------ the engine's additions (note 5)

    def _is_accumulation(self, func: Any, op: OpDraft, tensors: list[Tensor]) -> bool:
        if func is not _aten.add.Tensor or op.phase is not Phase.BACKWARD or op.visit is None or len(tensors) != 2:
            return False
        if torch.is_grad_enabled() or (op.visit.saves and not op.visit.released):
            return False
        first, second = tensors
        if first is second or first.shape != second.shape or first.dtype != second.dtype:
            return False
        incarnation = self.table.find(first)
        if incarnation is None or incarnation.is_copy or not is_dense(first):
            return False
        return counts_of(first) == self._unshared

    def _accumulate(
        self, op: OpDraft, index: int, tensors: list[Tensor], incarnations: list[Incarnation | None], result: Tensor
    ) -> None:
        table = self.table
        incarnation, entry = incarnations[0], table.known(tensors[0])
        assert incarnation is not None and entry is not None
        table.written(incarnation, index)
        op.target = "aten.add_.Tensor"
        op.writes = [incarnation.draft.id]
        fresh = table.adopt(result, incarnation)
        table.bind(result, fresh, producer=index, like=entry)
        op.outputs = [table.returned(result, index, category=incarnation.draft.category)]

    # ------------------------------------------------------------------ saved tensors

    def pack(self, t: Tensor) -> Saved:
        """Hook: copy the tensor away and let autograd hold a handle."""
        began = time.perf_counter()
        with torch._C.DisableTorchFunction():
            saved = self._pack(t)
        self.overhead += time.perf_counter() - began
        return saved

    def _pack(self, t: Tensor) -> Saved:
        table = self.table
        value = table.read(t)
        entry, incarnation = table.known(t), table.find(t)
        assert entry is not None and incarnation is not None
        draft = incarnation.draft
        index = len(self.saves)
        saved = Saved(index, incarnation, entry)
        self.saves.append(
            SaveDraft(value=value, at=len(self.ops), storage=draft, path=self.paths.path, source=source_line())
        )
        if draft.category.is_static:
            saved.kept = _detached(t)
        elif not can_spill(t):
            saved.kept = _detached(t)
            draft.keep(f"a saved {type(t).__name__} that is not an ordinary strided tensor")
            self._keep_inner(t)
        else:
            saved.geometry = Geometry(t)
            saved.copy = self._copy(t, incarnation)
        self._fresh.append((saved, weakref.ref(t)))
        ref = weakref.ref(saved, self._released(index))
        self._handles.add(ref)
        return saved

    def unpack(self, saved: Saved) -> Tensor:
        """Hook: the saved tensor again."""
        began = time.perf_counter()
        save = self.saves[saved.index]
        node = _current_node() if _graph_task() != -1 else None
        if node is not None:
            visit = self._at(node)
            visit.saves.append(saved.index)
            if visit not in save.visits:
                save.visits.append(visit)
            if self.paths.depth or self._phase() is Phase.FORWARD:
                save.in_forward = True
        else:
            save.in_forward = True
        with torch._C.DisableTorchFunction():
            t, entry = self._restore(saved, save)
        self._restored = (weakref.ref(t), entry)
        self.overhead += time.perf_counter() - began
        return t

    def _restore(self, saved: Saved, save: SaveDraft) -> tuple[Tensor, TensorObject]:
        table = self.table
        t = saved.kept
        if t is not None:
            entry = table.known(t)
            if entry is None:
                incarnation = table.find(t)
                if incarnation is None:  # A tensor subclass: another object over the same parts.
                    incarnation = saved.incarnation
                entry = table.bind(t, incarnation, producer=NO_OP, like=self._as_saved(saved, save))
            return t, entry
        assert saved.copy is not None and saved.geometry is not None
        with torch._C._DisableTorchDispatch():
            storage, is_new = saved.copy.back()
            t = saved.geometry.on(storage)
        incarnation = table.find(t)
        if is_new or incarnation is None:
            incarnation = table.add_copy(t, saved.incarnation.draft, saved.copy.version)
        return t, table.bind(t, incarnation, producer=NO_OP, like=self._as_saved(saved, save))

    def _as_saved(self, saved: Saved, save: SaveDraft) -> TensorObject:
        """The saved object at the version at which it was saved."""
        value = self.table.values[save.value]
        return TensorObject(saved.incarnation, value.view, save.value, value.version, None)

    def _copy(self, t: Tensor, incarnation: Incarnation) -> Copy:
        key = (incarnation.draft.id, incarnation.version)
        copy = self._copies.get(key)
        if copy is None:
            with torch._C._DisableTorchDispatch():
                copy = Copy(
                    t.untyped_storage(), draft=incarnation.draft, version=incarnation.version, to_disk=self.spill
                )
            self._copies[key] = copy
        return copy

    def _renew_saves(self, written: dict[int, Incarnation]) -> None:
        """Note 3."""
        for saved, ref in self._fresh:
            t = ref()
            if t is None or saved.incarnation.draft.id not in written:
                continue
            self.saves[saved.index].value = self.table.read(t)
            if saved.copy is not None:
                saved.copy = self._copy(t, saved.incarnation)

    def _released(self, index: int) -> Callable[[weakref.ref[Saved]], None]:
        this = weakref.ref(self)

        def released(ref: weakref.ref[Saved]) -> None:
            me = this()
            if me is None:
                return
            me._handles.discard(ref)
            save = me.saves[index]
            save.released = me.table.clock
            if me._visit is not None and _graph_task() != -1 and index in me._visit.saves:
                me._visit.released = True

        return released

    def _keep_inner(self, t: Tensor) -> None:
        """The plain tensors in a saved subclass live as long as it does."""
        flatten = getattr(t, "__tensor_flatten__", None)
        if flatten is None:
            return
        for name in flatten()[0]:
            inner = getattr(t, name)
            incarnation = self.table.find(inner) if isinstance(inner, Tensor) else None
            if incarnation is not None:
                incarnation.draft.keep(f"part of a saved {type(t).__name__}")

    def _detach_of_restored(self, func: Any, args: tuple[Any, ...], kwargs: Any) -> Tensor | None:
        """Note 4."""
        restored, self._restored = self._restored, None
        if restored is None or func is not _aten.detach.default or args[0] is not restored[0]():
            return None
        result: Tensor = func(*args, **kwargs)
        incarnation = self.table.find(result)
        if incarnation is not None:
            self.table.bind(result, incarnation, producer=NO_OP, like=restored[1])
        return result


def record(
    run: Callable[[], Any],
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Any = (),
    admit: Admission | None = None,
    spill: bool = True,
    leaves: Iterable[weakref.ref[Any]] = (),
    device: torch.device | None = None,
) -> Recording:
    """Run a step and write it down.

    Args:
        run: performs one whole step: forward, loss, backward and, if wanted, `optimizer.step()`.
        model: names parameters and buffers, and the module path of each op.
        optimizer: its state counts as static; ops inside of its `step` belong to the optimizer phase.
        inputs: pytree with the tensors that the caller holds during the step.
        admit: measures each distinct forward op when it is first seen, and knows those seen before.
        spill: put saved tensors into files (else into memory) meanwhile.
        leaves: `Recording.leaves` of an earlier step: storages that existed before this one.
        device: what `Step.device` shall be; by default that of the first parameter or input.

    Raises:
        Exception: whatever `run` raises; no hook, mode or handler stays behind.
    """
    paths = PathTracker(model)
    recorder = Recorder(paths=paths, admit=admit, spill=spill)
    static = _register(recorder.table, model, optimizer, inputs, leaves)
    calls: list[list[int]] = []

    def on_root(begins: bool) -> None:
        if begins:
            calls.append([len(recorder.ops), -1])
        elif calls:
            calls[-1][1] = len(recorder.ops)

    paths.on_root = on_root
    began = time.perf_counter()
    result = _run_under(recorder, run)
    wall = time.perf_counter() - began
    recorder.table.close()
    _classify(recorder.table, model, optimizer)
    del static
    if device is None:
        device = _main_device(model, inputs)
    step = assemble(recorder, device=device, seconds=max(wall - recorder.overhead, 0.0))
    return Recording(
        step=step,
        result=result,
        calls=tuple(range(a, b if b >= 0 else len(recorder.ops)) for a, b in calls),
        generators=tuple(recorder.generators.values()),
        functorch_paths=tuple(recorder.functorch_paths),
        compiled=compiled_regions(model) if model is not None else (),
        foreign_hooks=tuple(recorder.foreign_hooks),
        checkpoints=tuple(recorder.checkpoints),
        leaves=recorder.table.leaves_alive(),
        overhead_seconds=recorder.overhead,
        wall_seconds=wall,
    )


def _run_under(recorder: Recorder, run: Callable[[], Any]) -> Any:
    from torch.optim import optimizer as optim

    def enter(*_: Any) -> None:
        recorder.optimizer_depth += 1

    def leave(*_: Any) -> None:
        recorder.optimizer_depth = max(recorder.optimizer_depth - 1, 0)

    handles = [optim.register_optimizer_step_pre_hook(enter), optim.register_optimizer_step_post_hook(leave)]
    recorder.paths.install()
    try:
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, recorder.unpack), recorder:
            return run()
    finally:
        recorder.paths.remove()
        for handle in handles:
            handle.remove()


def _register(
    table: ValueTable,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None,
    inputs: Any,
    leaves: Iterable[weakref.ref[Any]],
) -> list[Tensor]:
    """Write down what exists before the step, whether an op touches it or not."""

    def add(t: Tensor | None, category: Category, *, name: str = "", holder: str = "") -> None:
        if t is None:
            return
        for part in _parts(t):
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
            add(t.grad if t.is_leaf and t.requires_grad else None, Category.GRADIENT, holder="the caller")
    alive: list[Tensor] = []
    for ref in leaves:
        storage = ref()
        if storage is not None:
            with torch._C.DisableTorchFunction():
                t = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            if table.find(t) is None:
                table.add_storage(
                    t, category=Category.INPUT, birth=NO_OP, holder="code outside of the step"
                ).draft.is_leaf = True
            alive.append(t)
    return alive


def _classify(table: ValueTable, model: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
    """Gradients and optimizer state that the step made itself."""
    if model is not None:
        for name, p in model.named_parameters():
            for part in _parts(p.grad) if p.grad is not None else ():
                found = table.find(part)
                if found is not None and not found.draft.category.is_static:
                    found.draft.category = Category.GRADIENT
                    found.draft.name = name
                    found.draft.holder = "the parameter's .grad"
    if optimizer is not None:
        for t in optimizer_tensors(optimizer):
            for part in _parts(t):
                found = table.find(part)
                if found is not None and not found.draft.category.is_static:
                    found.draft.category = Category.OPTIMIZER
                    found.draft.holder = "the optimizer's state"


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    groups = getattr(optimizer, "param_groups", [])
    found = [t for t in tree_leaves([dict(s) for s in optimizer.state.values()]) if isinstance(t, Tensor)]
    for group in groups:
        found.extend(v for k, v in group.items() if k != "params" and isinstance(v, Tensor))
    return found


def _parts(t: Tensor) -> list[Tensor]:
    """A plain tensor itself; the plain tensors that a wrapper subclass is made of."""
    flatten = getattr(t, "__tensor_flatten__", None)
    if flatten is None:
        return [t]
    parts: list[Tensor] = []
    for name in flatten()[0]:
        inner = getattr(t, name)
        if isinstance(inner, Tensor):
            parts.extend(_parts(inner))
    return parts


def _main_device(model: nn.Module | None, inputs: Any) -> torch.device:
    if model is not None:
        for p in model.parameters():
            return p.device
    for t in tree_leaves(inputs):
        if isinstance(t, Tensor):
            return t.device
    return torch.device("cpu")


def _desugars(cls: type) -> bool:
    """Whether a tensor type turns its ops into others in a `__torch_dispatch__` of its own."""
    if cls in _PLAIN_TYPES:
        return False
    own = getattr(cls, "__torch_dispatch__", None)
    return (
        own is not None and own is not torch._C._disabled_torch_dispatch_impl and own is not Tensor.__torch_dispatch__
    )


def _detached(t: Tensor) -> Tensor:
    """An alias without grad_fn: the tensor itself would hold the graph that holds it."""
    if not t.requires_grad or t.is_leaf:
        return t
    if type(t) in _PLAIN_TYPES:
        with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return t.detach()
    with _disable_current_modes():
        return t.detach()
