"""A builder of synthetic `Step`s with an automatic backward.

It plays a training step the way autograd would: every forward op is one autograd node, which reads its saves,
turns the gradients of its outputs into gradients of its inputs (temporaries that die at their last use) and adds weight
gradients to buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from keepwise.ir import NO_OP, Category, Op, Phase, Read, Save, Step, Storage, Value
from keepwise.ir.validate import validate


def check_step(step: Step) -> Step:
    """Assert every invariant of `step` and return it."""
    found = validate(step)
    assert not found, "\n".join(found)
    return step


def msgspec_replace(struct: Any, **changes: Any) -> Any:
    """A changed copy of frozen data."""
    return msgspec.structs.replace(struct, **changes)


@dataclass(frozen=True)
class Tensor:
    """A tensor object of the builder: always read at the current version of its storage."""

    view: int
    storage: int


@dataclass
class _Storage:
    nbytes: int
    category: Category
    birth: int
    name: str = ""
    keep_reason: str = ""
    version: int = 0
    touched: int = NO_OP
    held: str = ""
    saved_until: int = NO_OP
    copied: bool = False


@dataclass
class _Node:
    op: int
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    saves: list[int]
    in_place: bool
    name: str
    seconds: float
    path: str


@dataclass
class StepBuilder:
    """Forward ops in order, then `build` writes the backward (and, if wanted, the optimizer)."""

    device: str = "cpu"
    grads: str = "held"
    """`held`: gradient buffers exist throughout; `fresh`: backward makes them."""
    buffers: dict[int, Tensor] = field(default_factory=dict)
    """Parameter's storage -> its gradient."""
    storages: list[_Storage] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)
    objects: dict[tuple[int, int], int] = field(default_factory=dict)
    writer: dict[tuple[int, int], int] = field(default_factory=dict)

    # ---------------------------------------------------------------- leaves

    def _leaf(self, nbytes: int, category: Category, name: str) -> Tensor:
        self.storages.append(_Storage(nbytes, category, NO_OP, name=name, held="end"))
        return self._object(len(self.storages) - 1, NO_OP)

    def parameter(self, nbytes: int, name: str = "weight") -> Tensor:
        return self._leaf(nbytes, Category.PARAMETER, name)

    def buffer(self, nbytes: int, name: str = "buffer") -> Tensor:
        return self._leaf(nbytes, Category.BUFFER, name)

    def copied(self, tensor: Tensor) -> Tensor:
        """Replays read a copy of this leaf, which forward takes."""
        self.storages[tensor.storage].copied = True
        return tensor

    def input(self, nbytes: int) -> Tensor:
        return self._leaf(nbytes, Category.INPUT, "")

    # --------------------------------------------------------------- forward

    def op(
        self,
        *inputs: Tensor,
        sizes: Sequence[int] = (4,),
        save: Iterable[Tensor] = (),
        save_outputs: Sequence[int] = (),
        target: str = "aten.mm.default",
        seconds: float = 1.0,
        workspace: int = 0,
        random: str = "",
        rng_bytes: int = 0,
        replayable: bool = True,
        path: str = "",
    ) -> tuple[Tensor, ...]:
        """An op with one fresh output a size; autograd saves `save` (inputs) and outputs number `save_outputs`."""
        index = len(self.ops)
        held = [self._save(t, index) for t in save]
        read = self._read(inputs, index)
        outputs = tuple(self._fresh(n, Category.ACTIVATION, index) for n in sizes)
        self._record(
            target,
            read,
            outputs,
            Phase.FORWARD,
            seconds=seconds,
            workspace_bytes=workspace,
            random=random,
            rng_bytes=rng_bytes,
            replayable=replayable,
            why_not="" if replayable else "not repeatable",
            path=path,
        )
        held += [self._save(outputs[i], index + 1) for i in save_outputs]
        self._node(index, inputs, outputs, held, in_place=False)
        return outputs

    def one(self, *inputs: Tensor, size: int = 4, **rest: Any) -> Tensor:
        """`op` with one output."""
        return self.op(*inputs, sizes=(size,), **rest)[0]

    def view(self, tensor: Tensor, *, path: str = "") -> Tensor:
        """Another tensor object over the same storage."""
        index = len(self.ops)
        read = self._read((tensor,), index)
        out = self._object(tensor.storage, index)
        self._record("aten.view.default", read, (out,), Phase.FORWARD, is_view=True, path=path)
        return out

    def write(
        self,
        tensor: Tensor,
        *others: Tensor,
        save: Iterable[Tensor] = (),
        save_result: bool = False,
        target: str = "aten.relu_.default",
        seconds: float = 1.0,
        path: str = "",
    ) -> Tensor:
        """Overwrite `tensor` in place (reading it and `others`); returns the same object, one version on."""
        index = len(self.ops)
        held = [self._save(t, index) for t in save]
        read = self._read((tensor, *others), index)
        self._bump(tensor.storage, index)
        self._record(target, read, (tensor,), Phase.FORWARD, writes=(tensor.storage,), seconds=seconds, path=path)
        if save_result:
            held.append(self._save(tensor, index + 1))
        self._node(index, (tensor, *others), (tensor,), held, in_place=True)
        return tensor

    def batch_norm(
        self, x: Tensor, mean: Tensor, *, size: int, seconds: float = 1.0, path: str = "", reads_mean: bool = False
    ) -> Tensor:
        """Normalise `x` into a fresh tensor, save it and its statistics, and move the buffer `mean` in place.

        A batch norm that does not list `mean` among its inputs replays without touching it.
        """
        index = len(self.ops)
        held = [self._save(x, index)]
        read = self._read((x, mean) if reads_mean else (x,), index)
        out, stats = self._fresh(size, Category.ACTIVATION, index), self._fresh(4, Category.ACTIVATION, index)
        self._bump(mean.storage, index)
        self._record(
            "aten.native_batch_norm.default",
            read,
            (out, stats),
            Phase.FORWARD,
            writes=(mean.storage,),
            seconds=seconds,
            path=path,
        )
        held.append(self._save(stats, index + 1))
        self._node(index, (x,), (out,), held, in_place=False)
        return out

    def hold(self, tensor: Tensor, until: str = "end") -> None:
        """User code holds the storage until the `end` of the step or of `forward`."""
        self.storages[tensor.storage].held = until

    def keep(self, tensor: Tensor, reason: str = "opaque") -> None:
        """Forbid dropping the storage."""
        self.storages[tensor.storage].keep_reason = reason

    def is_saved(self, tensor: Tensor) -> bool:
        return self.storages[tensor.storage].saved_until != NO_OP

    # -------------------------------------------------------------- backward

    def backward(self, loss: Tensor, *, retain: bool = False) -> None:
        """Backward from `loss`; unless the graph is retained, its saves are let go and later forward ops begin another."""
        self._own_gradients()
        seed = self._fresh(self.storages[loss.storage].nbytes, Category.TEMPORARY, len(self.ops))
        self._record("aten.ones_like.default", (), (seed,), Phase.BACKWARD)
        grads = {loss.storage: seed}
        for node in reversed(self.nodes):
            incoming = [grads.pop(s) for s in dict.fromkeys(t.storage for t in node.outputs) if s in grads]
            if incoming:
                self._visit(node, incoming, grads)
        if retain:
            return
        for node in self.nodes:
            for i in node.saves:
                s = self.storages[self.values[self.saves[i].value].storage]
                reads = self.saves[i].reads
                s.saved_until = max(s.saved_until, reads[-1].last if reads else len(self.ops) - 1)
        self.nodes.clear()

    def build(self, loss: Tensor, *, optimizer: bool = False, outside: int = 0, tail: int = 0) -> Step:
        """The step: all as recorded, backward from `loss`, optimizer over the parameters that hold a gradient."""
        forward_end = len(self.ops) - 1
        self.backward(loss)
        for _ in range(tail):
            self._record("aten.empty.default", (), (self._fresh(4, Category.TEMPORARY, len(self.ops)),), Phase.BACKWARD)
        if optimizer:
            for i, grad in self.buffers.items():
                index = len(self.ops)
                weight = Tensor(next(v.id for v in self.values if v.storage == i), i)
                read = self._read((weight, grad), index)
                self._bump(i, index)
                self._record("aten.add_.Tensor", read, (weight,), Phase.OPTIMIZER, writes=(i,), seconds=0.1)
        return self._finish(forward_end, outside)

    def _own_gradients(self) -> None:
        if self.grads == "held":
            for i, s in enumerate(list(self.storages)):
                if s.category is Category.PARAMETER and i not in self.buffers:
                    self.buffers[i] = self._leaf(s.nbytes, Category.GRADIENT, s.name + ".grad")

    def _visit(self, node: _Node, incoming: list[Tensor], grads: dict[int, Tensor]) -> None:
        """Run one autograd node: read its saves, make the gradients of its inputs."""
        first = len(self.ops)
        args = tuple(self.saves[i].value for i in node.saves)
        wanted = [
            t
            for t in {t.storage: t for t in node.inputs}.values()
            if self.storages[t.storage].category in (Category.ACTIVATION, Category.PARAMETER)
        ]
        for t in wanted:
            self._gradient(node, t, incoming, args, grads)
        if not wanted:
            self._record("aten.zeros_like.default", self._read(incoming, first), (), Phase.BACKWARD, inert=args)
        last = len(self.ops) - 1
        for g in incoming:
            self.storages[g.storage].touched = last
        for i in node.saves:
            reads = (*self.saves[i].reads, Read(first=first, last=last))
            self.saves[i] = msgspec_replace(self.saves[i], reads=reads)
            s = self.storages[self.values[self.saves[i].value].storage]
            s.saved_until = max(s.saved_until, last)

    def _gradient(
        self,
        node: _Node,
        t: Tensor,
        incoming: list[Tensor],
        args: tuple[int, ...],
        grads: dict[int, Tensor],
    ) -> None:
        index = len(self.ops)
        size = self.storages[t.storage].nbytes
        fresh = self._fresh(size, Category.TEMPORARY, index)
        self._record(
            node.name + "_backward",
            self._read(incoming, index),
            (fresh,),
            Phase.BACKWARD,
            seconds=node.seconds,
            path=node.path,
            inert=args,
        )
        is_weight = self.storages[t.storage].category is Category.PARAMETER
        table = self.buffers if is_weight else grads
        if t.storage in table:
            index = len(self.ops)
            total = table[t.storage]
            read = self._read((total, fresh), index)
            self._bump(total.storage, index)
            self._record("aten.add_.Tensor", read, (total,), Phase.BACKWARD, writes=(total.storage,), seconds=0.1)
        else:
            table[t.storage] = fresh
            if is_weight:
                self.storages[fresh.storage].category = Category.GRADIENT
                self.storages[fresh.storage].held = "end"

    # -------------------------------------------------------------- plumbing

    def _fresh(self, nbytes: int, category: Category, birth: int) -> Tensor:
        self.storages.append(_Storage(nbytes, category, birth, touched=birth))
        return self._object(len(self.storages) - 1, birth)

    def _object(self, storage: int, producer: int) -> Tensor:
        s = self.storages[storage]
        view = len(self.values)
        self.objects[view, s.version] = view
        self._value(storage, view, producer)
        return Tensor(view, storage)

    def _value(self, storage: int, view: int, producer: int) -> int:
        s = self.storages[storage]
        self.values.append(
            Value(
                id=len(self.values),
                storage=storage,
                version=s.version,
                view=view,
                shape=(s.nbytes,),
                stride=(1,),
                offset=0,
                dtype="uint8",
                producer=producer,
            )
        )
        return len(self.values) - 1

    def _current(self, tensor: Tensor) -> int:
        version = self.storages[tensor.storage].version
        key = (tensor.view, version)
        if key not in self.objects:
            self.objects[key] = self._value(tensor.storage, tensor.view, self.writer[tensor.storage, version])
        return self.objects[key]

    def _read(self, tensors: Iterable[Tensor], index: int) -> tuple[int, ...]:
        tensors = list(tensors)
        for t in tensors:
            self.storages[t.storage].touched = max(self.storages[t.storage].touched, index)
        return tuple(self._current(t) for t in tensors)

    def _bump(self, storage: int, index: int) -> None:
        s = self.storages[storage]
        s.version += 1
        s.touched = max(s.touched, index)
        self.writer[storage, s.version] = index

    def _save(self, tensor: Tensor, at: int) -> int:
        self.saves.append(Save(index=len(self.saves), value=self._current(tensor), at=at, node="Node"))
        self.storages[tensor.storage].saved_until = max(self.storages[tensor.storage].saved_until, at - 1)
        return len(self.saves) - 1

    def _record(
        self,
        target: str,
        read: tuple[int, ...],
        outputs: Iterable[Tensor],
        phase: Phase,
        *,
        inert: tuple[int, ...] = (),
        **rest: Any,
    ) -> None:
        returned = tuple(self._current(t) for t in outputs)
        self.ops.append(
            Op(index=len(self.ops), target=target, inputs=(*read, *inert), outputs=returned, phase=phase, **rest)
        )

    def _node(
        self, index: int, inputs: Sequence[Tensor], outputs: Sequence[Tensor], saves: list[int], *, in_place: bool
    ) -> None:
        op = self.ops[index]
        self.nodes.append(
            _Node(index, tuple(inputs), tuple(outputs), saves, in_place, op.target.split(".")[1], op.seconds, op.path)
        )

    def _finish(self, forward_end: int, outside: int) -> Step:
        last = len(self.ops) - 1
        until = {"": NO_OP, "end": last, "forward": forward_end}
        storages = tuple(
            Storage(
                id=i,
                nbytes=s.nbytes,
                device=self.device,
                category=s.category,
                birth=s.birth,
                name=s.name,
                held_until=max(s.touched, until[s.held], s.birth),
                saved_until=s.saved_until,
                versions=s.version + 1,
                keep_reason=s.keep_reason,
                holder="test" if s.held else "",
                copied=s.copied,
            )
            for i, s in enumerate(self.storages)
        )
        return Step(
            device=self.device,
            ops=tuple(self.ops),
            values=tuple(self.values),
            storages=storages,
            saves=tuple(self.saves),
            seconds=sum(op.seconds for op in self.ops),
            outside_bytes=outside,
        )
