"""The dispatch mode that writes down what it sees.

Notes:
1. An op is one call of `__torch_dispatch__`: below autograd and autocast, above the kernels. The guard of the runtime is a mode of
   the same kind and sees the same stream.
2. Identity, versions and deaths are the business of `values`; saved tensors that of `saved`; what an op does that of `admission`.
3. Under a mode the engine adds gradients out of place. Plainly it adds in place where nobody else holds the first: told
   by the reference counts, and by the node having let go of its saved tensors already (its own additions come before).
4. Nothing of this asks a tensor anything while torch functions are on: the user's modes must not see it.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from keepwise.ir import NO_OP, Category, Phase
from keepwise.runtime.beneath import beneath
from keepwise.runtime.calls import in_shadow, target_name, tensors_in, tensors_out
from keepwise.runtime.reuse import overwrites
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.watch import of_subclass
from keepwise.trace.admission import Admission, Effects, schema_effects
from keepwise.trace.calibration import counts_of, is_dense, unshared_counts
from keepwise.trace.drafts import OpDraft, current_node
from keepwise.trace.paths import PathTracker, source_line
from keepwise.trace.saved import SavedTensors, is_checkpoint
from keepwise.trace.signature import signature_of
from keepwise.trace.values import Incarnation, ValueTable, storage_of

Tensor = torch.Tensor
Incarnations = list[Incarnation | None]

_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]
_disabled: Any = torch._C._disabled_torch_dispatch_impl  # type: ignore[attr-defined]
_PLAIN_TYPES = frozenset((torch.Tensor, nn.Parameter, nn.Buffer))
_ADD = torch.ops.aten.add.Tensor


class Recorder(TorchDispatchMode):
    """Sees every op of a step; use `record`."""

    supports_higher_order_operators: ClassVar[bool] = True
    is_of_keepwise: ClassVar[bool] = True

    def __init__(
        self,
        *,
        paths: PathTracker,
        admit: Admission | None,
        spill: bool,
        generators: dict[int, tuple[torch.Generator, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.table = ValueTable()
        self.ops: list[OpDraft] = []
        self.paths = paths
        self.saved = SavedTensors(table=self.table, ops=self.ops, paths=paths, spill=spill)
        self.optimizer_depth = 0
        self.generators = generators if generators is not None else {}
        self.functorch_paths = self.saved.functorch_paths
        self.foreign_hooks: dict[str, None] = {}
        self.checkpoints: dict[str, None] = {}
        self._admit = admit
        self._unshared = unshared_counts()

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled submodules stay compiled under it."""
        return True

    @beneath
    def __torch_dispatch__(self, func: Any, types: Any, run: Any, args: Any, kwargs: Any) -> Any:
        began = time.perf_counter()
        kwargs = kwargs or {}
        if in_shadow():
            return run(*args, **kwargs)
        if types and not _PLAIN_TYPES.issuperset(types) and any(_desugars(t) for t in types):
            return of_subclass(run, types, args, kwargs)
        if _functorch_stack() is not None:
            self.functorch_paths[self.paths.path] = None
            return run(*args, **kwargs)
        detached = self.saved.detach_of_restored(func, args, kwargs)
        if detached is not None:
            return detached
        with torch._C.DisableTorchFunction():
            op, tensors, incarnations = self._begin(func, args, kwargs)
        try:
            result, op.seconds, effects = self._execute(op, func, run, args, kwargs)
        except BaseException as error:
            op.why_not = f"it raised {type(error).__name__}"
            raise
        with torch._C.DisableTorchFunction():
            op.effects = effects
            if self._is_accumulation(func, op, tensors, incarnations):
                self._accumulate(op, tensors, incarnations, result)
            else:
                self._results(op, tensors, incarnations, effects, result)
        self.table.overhead += time.perf_counter() - began - op.seconds
        return result

    # ------------------------------------------------------------------ before the op

    def effects_of(self, op: OpDraft) -> Effects | None:
        """What is known about an op by now."""
        found = self._admit.known(op.signature, op.phase) if self._admit is not None else None
        return found if found is not None else op.effects

    def _begin(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[OpDraft, list[Tensor], Incarnations]:
        index = len(self.ops)
        tensors = tensors_in(args, kwargs)
        op = OpDraft(target=target_name(func), phase=self._phase(), signature=signature_of(func, args, kwargs))
        op.overwrites = overwrites(func)
        self._place(op, index)
        op.inputs = [self.table.read(t) for t in tensors]
        incarnations: Incarnations = [self.table.find(t) for t in tensors]
        op.inputs = _replayed_inputs(func, args, kwargs, op.inputs)
        self.ops.append(op)
        self.table.clock = index
        for a in (*args, *kwargs.values()):
            if isinstance(a, torch.Generator):
                key: int = getattr(a, "_cdata")  # noqa: B009 - the object that arrives here is a new one each time
                self.generators.setdefault(key, (a, a.get_state()))
        return op, tensors, incarnations

    def _phase(self) -> Phase:
        if self.optimizer_depth:
            return Phase.OPTIMIZER
        if torch._C._current_graph_task_id() == -1 or self.saved.builds_graph():
            return Phase.FORWARD
        return Phase.BACKWARD

    def _place(self, op: OpDraft, index: int) -> None:
        """Where the op comes from: module and line, or the autograd node."""
        node = current_node()
        op.path = self.paths.path
        if node is not None:
            visit = self.saved.visits.at(node, self.table.clock)
            op.visit = visit
            if visit.first == NO_OP:
                visit.first = index
                if visit.name.startswith("CheckpointFunction"):
                    self.checkpoints[op.path] = None
            if not visit.released:
                visit.last = index
            return
        op.source = source_line()
        other = self.saved.other()
        if other is not None:
            (self.checkpoints if is_checkpoint(other) else self.foreign_hooks)[op.path] = None

    # ------------------------------------------------------------------ the op

    def _execute(self, op: OpDraft, func: Any, run: Any, args: Any, kwargs: Any) -> tuple[Any, float, Effects]:
        effects = None
        if self._admit is not None:
            effects = self._admit.known(op.signature, op.phase)
            if effects is None:
                return self._admit.run(func, run, args, kwargs, signature=op.signature, phase=op.phase)
            if self._admit.is_provisional(op.signature, op.phase):
                return self._admit.again(run, args, kwargs, signature=op.signature, phase=op.phase)
        began = time.perf_counter()
        result = run(*args, **kwargs)
        seconds = time.perf_counter() - began
        return result, seconds, effects if effects is not None else schema_effects(func, args, kwargs)

    # ------------------------------------------------------------------ after the op

    def _results(
        self, op: OpDraft, tensors: list[Tensor], incarnations: Incarnations, effects: Effects, result: Any
    ) -> None:
        table, index = self.table, self.table.clock
        written: dict[int, Incarnation] = {}
        for i in effects.writes:
            incarnation = incarnations[i]
            if incarnation is not None:
                written.setdefault(incarnation.draft.id, incarnation)
        for incarnation in written.values():
            table.written(incarnation, index)
        op.writes = list(written)
        if written:
            _note_resized(tensors, incarnations, written)
        self.saved.op_returned(written)
        category = Category.ACTIVATION if op.phase is Phase.FORWARD else Category.TEMPORARY
        outputs = [t for t in tensors_out(result) if t is not None]
        op.outputs = [table.returned(t, index, category=category) for t in outputs]
        read = {i.draft.id for i in incarnations if i is not None}
        lies_on = {table.values[v].storage for v in op.outputs}
        op.is_view = bool(outputs) and not written and lies_on <= read
        if any(s not in read and table.storages[s].birth != index for s in lies_on):
            op.why_not = "its result lies on memory that no tensor among its arguments shows"  # `set_` of a storage

    def _is_accumulation(self, func: Any, op: OpDraft, tensors: list[Tensor], incarnations: Incarnations) -> bool:
        """Note 3."""
        if func is not _ADD or op.phase is not Phase.BACKWARD or op.visit is None or len(tensors) != 2:
            return False
        if torch.is_grad_enabled() or (op.visit.saves and not op.visit.released):
            return False
        first, second = tensors
        incarnation = incarnations[0]
        if first is second or first.shape != second.shape or first.dtype != second.dtype:
            return False
        if incarnation is None or incarnation.is_copy or storage_of(first) is None or not is_dense(first):
            return False
        return counts_of(first) == self._unshared

    def _accumulate(self, op: OpDraft, tensors: list[Tensor], incarnations: Incarnations, result: Tensor) -> None:
        table, index = self.table, self.table.clock
        incarnation, entry = incarnations[0], table.known(tensors[0])
        assert incarnation is not None
        assert entry is not None
        table.written(incarnation, index)
        op.target = "aten.add_.Tensor"
        op.writes = [incarnation.draft.id]
        self.saved.op_returned({})
        fresh = table.replace(incarnation, result)
        table.bind(result, fresh, producer=index, like=entry)
        op.outputs = [table.returned(result, index, category=incarnation.draft.category)]


def _replayed_inputs(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[int]) -> list[int]:
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


def _note_resized(tensors: list[Tensor], incarnations: Incarnations, written: dict[int, Incarnation]) -> None:
    for t, incarnation in zip(tensors, incarnations, strict=True):
        storage = storage_of(t) if incarnation is not None and incarnation.draft.id in written else None
        if storage is None or incarnation is None or storage.nbytes() == incarnation.draft.nbytes:
            continue
        incarnation.draft.nbytes = max(storage.nbytes(), incarnation.draft.nbytes)
        incarnation.draft.keep("its storage was resized")


def _desugars(cls: type) -> bool:
    """Whether a tensor type turns its ops into others in a `__torch_dispatch__` of its own."""
    if cls in _PLAIN_TYPES:
        return False
    own = getattr(cls, "__torch_dispatch__", None)
    return own is not None and own is not _disabled and own is not getattr(Tensor, "__torch_dispatch__", None)
