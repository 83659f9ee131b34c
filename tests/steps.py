"""Synthetic `Step`s for tests: a builder with an automatic backward, a few families, and a strategy for random ones.

The builder plays a training step the way autograd would: every forward op is one autograd node, which reads its saves,
turns the gradients of its outputs into gradients of its inputs (temporaries that die at their last use) and adds weight
gradients to buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from keepwise.ir import NO_OP, Category, Op, Phase, Read, Save, Step, Storage, Value
from keepwise.ir.validate import validate


def check_step(step: Step) -> Step:
    """Assert every invariant of `step` and return it."""
    found = validate(step)
    assert not found, "\n".join(found)
    return step


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

    def build(
        self, loss: Tensor, *, grads: str = "held", optimizer: bool = False, outside: int = 0, tail: int = 0
    ) -> Step:
        """The step: forward as recorded, backward from `loss`, optimizer over the parameters that hold a gradient."""
        forward_end = len(self.ops) - 1
        buffers: dict[int, Tensor] = {}
        if grads == "held":
            for i, s in enumerate(list(self.storages)):
                if s.category is Category.PARAMETER:
                    buffers[i] = self._leaf(s.nbytes, Category.GRADIENT, s.name + ".grad")
        self._backward(loss, buffers)
        for _ in range(tail):
            self._record("aten.empty.default", (), (self._fresh(4, Category.TEMPORARY, len(self.ops)),), Phase.BACKWARD)
        if optimizer:
            for i, grad in buffers.items():
                index = len(self.ops)
                weight = Tensor(next(v.id for v in self.values if v.storage == i), i)
                read = self._read((weight, grad), index)
                self._bump(i, index)
                self._record("aten.add_.Tensor", read, (weight,), Phase.OPTIMIZER, writes=(i,), seconds=0.1)
        return self._finish(forward_end, outside)

    def _backward(self, loss: Tensor, buffers: dict[int, Tensor]) -> None:
        seed = self._fresh(self.storages[loss.storage].nbytes, Category.TEMPORARY, len(self.ops))
        self._record("aten.ones_like.default", (), (seed,), Phase.BACKWARD)
        grads = {loss.storage: seed}
        reads: dict[int, Read] = {}
        for node in reversed(self.nodes):
            incoming = [grads.pop(s) for s in dict.fromkeys(t.storage for t in node.outputs) if s in grads]
            if not incoming:
                continue
            first = len(self.ops)
            saved = [self.values[self.saves[i].value] for i in node.saves]
            args = tuple(v.id for v in saved)
            wanted = [
                t
                for t in {t.storage: t for t in node.inputs}.values()
                if self.storages[t.storage].category in (Category.ACTIVATION, Category.PARAMETER)
            ]
            for t in wanted:
                self._gradient(node, t, incoming, args, grads, buffers)
            if not wanted:
                self._record("aten.zeros_like.default", self._read(incoming, first), (), Phase.BACKWARD, inert=args)
            last = len(self.ops) - 1
            for g in incoming:
                self.storages[g.storage].touched = last
            for i, v in zip(node.saves, saved, strict=True):
                reads[i] = Read(first=first, last=last)
                self.storages[v.storage].saved_until = max(self.storages[v.storage].saved_until, last)
        end = len(self.ops) - 1
        for save in self.saves:
            if save.index in reads:
                self.saves[save.index] = Save(
                    index=save.index, value=save.value, at=save.at, node=save.node, reads=(reads[save.index],)
                )
            else:
                s = self.storages[self.values[save.value].storage]
                s.saved_until = max(s.saved_until, end)

    def _gradient(
        self,
        node: _Node,
        t: Tensor,
        incoming: list[Tensor],
        args: tuple[int, ...],
        grads: dict[int, Tensor],
        buffers: dict[int, Tensor],
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
        table = buffers if is_weight else grads
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


# -------------------------------------------------------------------- families


def chain(n: int, *, sizes: Sequence[int] | None = None, seconds: Sequence[float] | None = None) -> Step:
    """x_i = f_i(x_(i-1)) for i in 1..n; each f_i saves its input. Uniform (1 byte, 1 second) unless told."""
    sizes = sizes or [1] * (n + 1)
    seconds = seconds or [1.0] * n
    b = StepBuilder()
    x = b.input(sizes[0])
    x = b.one(x, size=sizes[0], seconds=0.0, target="aten.copy.default")
    for i in range(n):
        x = b.one(x, size=sizes[i + 1], save=[x], seconds=seconds[i], target="aten.tanh.default", path=f"layer.{i}")
    return check_step(b.build(x))


def gpt_like(
    blocks: int,
    *,
    width: int = 64,
    vocab: int = 256,
    dropout: bool = False,
    grads: str = "held",
    optimizer: bool = False,
) -> Step:
    """Pre-norm transformer: layer norm, attention, MLP with a GELU of several ops; `width` bytes a residual tensor."""
    w = width
    b = StepBuilder()
    tokens = b.input(max(w // 8, 1))
    wte = b.parameter(vocab, "wte.weight")
    x = b.one(tokens, wte, size=w, save=[tokens], seconds=0.1, target="aten.embedding.default", path="wte")
    for i in range(blocks):
        x = _gpt_block(b, x, w, f"h.{i}", dropout=dropout)
    ln, mean = b.op(
        x,
        b.parameter(4),
        sizes=(w, 4),
        save=[x],
        save_outputs=(1,),
        seconds=0.2,
        target="aten.native_layer_norm.default",
        path="ln_f",
    )
    logits = b.one(ln, wte, size=vocab, save=[ln], seconds=4.0, path="lm_head")
    flat = b.view(logits)
    log = b.one(flat, size=vocab, save_outputs=(0,), seconds=1.0, target="aten._log_softmax.default")
    loss = b.one(log, tokens, size=4, save=[log, tokens], seconds=0.1, target="aten.nll_loss_forward.default")
    del mean
    return check_step(b.build(loss, grads=grads, optimizer=optimizer))


def _gpt_block(b: StepBuilder, x: Tensor, w: int, path: str, *, dropout: bool) -> Tensor:
    def norm(y: Tensor, name: str) -> Tensor:
        out, _ = b.op(
            y,
            b.parameter(4),
            sizes=(w, 4),
            save=[y],
            save_outputs=(1,),
            seconds=0.2,
            target="aten.native_layer_norm.default",
            path=f"{path}.{name}",
        )
        return out

    def linear(y: Tensor, size: int, name: str, seconds: float) -> Tensor:
        return b.one(
            y,
            b.parameter(w * 2),
            size=size,
            save=[y],
            seconds=seconds,
            target="aten.addmm.default",
            path=f"{path}.{name}",
        )

    def maybe_dropout(y: Tensor, name: str) -> Tensor:
        if not dropout:
            return y
        out, _ = b.op(
            y,
            sizes=(w, w // 4),
            save_outputs=(1,),
            seconds=0.2,
            random="cpu",
            rng_bytes=50,
            target="aten.native_dropout.default",
            path=f"{path}.{name}",
        )
        return out

    qkv = linear(norm(x, "ln_1"), 3 * w, "attn.c_attn", 3.0)
    q, k, v = (b.view(qkv, path=f"{path}.attn") for _ in range(3))
    out, _ = b.op(
        q,
        k,
        v,
        sizes=(w, 8),
        save=[q, k, v],
        save_outputs=(0, 1),
        seconds=2.0,
        workspace=w,
        target="aten._scaled_dot_product_flash_attention_for_cpu.default",
        path=f"{path}.attn",
    )
    att = maybe_dropout(linear(b.view(out, path=f"{path}.attn"), w, "attn.c_proj", 1.0), "attn.drop")
    x = b.one(x, att, size=w, seconds=0.1, target="aten.add.Tensor", path=path)
    up = linear(norm(x, "ln_2"), 4 * w, "mlp.c_fc", 4.0)
    p = f"{path}.mlp.act"
    cube = b.one(up, size=4 * w, save=[up], seconds=0.8, target="aten.pow.Tensor_Scalar", path=p)
    inner = b.one(up, cube, size=4 * w, seconds=0.3, target="aten.add.Tensor", path=p)
    tanh = b.one(inner, size=4 * w, save_outputs=(0,), seconds=0.6, target="aten.tanh.default", path=p)
    act = b.one(up, tanh, size=4 * w, save=[up, tanh], seconds=0.3, target="aten.mul.Tensor", path=p)
    down = maybe_dropout(linear(act, w, "mlp.c_proj", 4.0), "mlp.drop")
    return b.one(x, down, size=w, seconds=0.1, target="aten.add.Tensor", path=path)


def unet_like(depth: int, *, width: int = 64) -> Step:
    """Encoder and decoder with one long skip a level; convolution, batch norm that moves a buffer, in-place ReLU."""
    b = StepBuilder()
    size = width << depth

    def double(x: Tensor, size: int, path: str) -> Tensor:
        for i in range(2):
            p = f"{path}.{i}"
            y = b.one(x, b.parameter(16), size=size, save=[x], seconds=4.0, target="aten.convolution.default", path=p)
            y = b.batch_norm(y, b.buffer(4), size=size, seconds=0.5, path=p)
            x = b.write(y, save_result=True, seconds=0.2, path=p)
        return x

    x = double(b.input(size), size, "stem")
    skips = []
    for level in range(depth):
        skips.append((x, size))
        size //= 2
        x = b.one(x, size=size, save=[x], seconds=0.3, target="aten.max_pool2d.default", path=f"down.{level}")
        x = double(x, size, f"down.{level}")
    for level in reversed(range(depth)):
        skip, size = skips.pop()
        x = b.one(x, size=size, seconds=0.3, target="aten.upsample_nearest2d.default", path=f"up.{level}")
        x = b.one(skip, x, size=2 * size, seconds=0.3, target="aten.cat.default", path=f"up.{level}")
        x = double(x, size, f"up.{level}")
    return check_step(b.build(b.one(x, size=4, save=[x], seconds=0.1, target="aten.mse_loss.default")))


def in_place_stream(blocks: int, *, width: int = 8) -> Step:
    """A residual stream that is updated in place: every block's input is an earlier version of one storage."""
    b = StepBuilder()
    x = b.one(b.input(width), size=width, seconds=0.1, target="aten.embedding.default")
    for i in range(blocks):
        p = f"h.{i}"
        y = b.one(x, size=width, save_outputs=(0,), seconds=1.0, target="aten.sigmoid.default", path=p)
        z = b.one(y, b.parameter(8), size=width, save=[y], seconds=3.0, path=p)
        x = b.write(x, z, target="aten.add_.Tensor", seconds=0.1, path=p)
    return check_step(b.build(b.one(x, size=4, save=[x], seconds=0.1, target="aten.sum.default")))


# -------------------------------------------------------------------- random

_SIZES = st.integers(1, 12)


@st.composite
def random_steps(draw: st.DrawFn, *, max_ops: int = 12) -> Step:
    """A random small step: views, in-place writes, moving buffers, random and unrepeatable ops, holders, optimizer."""
    b = StepBuilder()
    pool = [b.input(draw(_SIZES))]
    weights = [b.parameter(draw(_SIZES)) for _ in range(draw(st.integers(0, 2)))]
    pool.append(b.one(pool[0], *weights[:1], size=draw(_SIZES), save=weights[:1]))
    kinds = st.sampled_from(["op"] * 6 + ["view", "write", "write", "norm", "random", "opaque", "hold", "keep"])
    for i in range(draw(st.integers(1, max_ops))):
        recent = st.sampled_from(pool[-4:] if draw(st.booleans()) else pool)
        kind = draw(kinds)
        x = draw(recent)
        rest = {"seconds": float(draw(st.integers(0, 5))), "path": f"m.{i // 3}"}
        if kind == "view":
            pool.append(b.view(x))
        elif kind == "write":
            # Autograd forbids overwriting what an earlier node saved; the builder's nodes are always read.
            other = draw(recent)
            if not b.is_saved(x) and other.storage != x.storage:
                b.write(x, other, save_result=draw(st.booleans()), save=[other] if draw(st.booleans()) else [], **rest)
        elif kind == "norm":
            mean = b.buffer(4)
            pool.append(b.batch_norm(x, mean, size=draw(_SIZES), reads_mean=draw(st.booleans()), **rest))
        elif kind == "hold":
            b.hold(x, draw(st.sampled_from(["end", "forward"])))
        elif kind == "keep":
            b.keep(x)
        else:
            inputs = [x, *draw(st.lists(recent, max_size=1)), *(draw(st.sampled_from(weights)) for _ in weights[:1])]
            sizes = draw(st.lists(_SIZES, min_size=1, max_size=2))
            save = [t for t in dict.fromkeys(inputs) if draw(st.booleans())]
            outs = [k for k in range(len(sizes)) if draw(st.integers(0, 3)) == 0]
            extra: dict[str, Any] = dict(rest)
            if kind == "random":
                extra |= {"random": "cpu", "rng_bytes": draw(_SIZES)}
            pool.extend(
                b.op(
                    *inputs,
                    sizes=sizes,
                    save=save,
                    save_outputs=outs,
                    workspace=draw(st.integers(0, 6)),
                    replayable=kind != "opaque",
                    **extra,
                )
            )
    loss = b.one(*pool[-3:], size=4, save=pool[-2:-1])
    return check_step(
        b.build(
            loss,
            grads=draw(st.sampled_from(["held", "fresh"])),
            optimizer=draw(st.booleans()),
            tail=draw(st.integers(0, 1)),
        )
    )
