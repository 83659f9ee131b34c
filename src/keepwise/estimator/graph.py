"""A piece of a model as operators: what each makes, what autograd saves of it, and the live bytes of its two passes.

Notes that the code refers to:
1. A value is one storage. Views (heads of a fused projection, halves of a gate) hold no bytes of their own: autograd keeps the
   whole storage alive when it saves one, so operators save the viewed value. Gradients of views are tensors of their own.
2. Autograd frees what a node saved right after the node ran; a value that several nodes saved lives until the last of them in
   backward order, which is the first in forward order.
3. Sums pass one gradient on to both addends without a copy; everything else makes new gradients for its inputs.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Literal

import msgspec

Split = Literal["whole", "sequence", "tensor", "kv"]
"""How tensor parallelism divides a value: not at all, with sequence parallelism only, by heads or inner width, by key heads."""

Kind = Literal["activation", "mask", "statistic", "index", "weight cast", "frozen cast", "constant"]
"""A `weight cast` is autocast's narrow copy of a trained weight, which it caches until forward ends; that of a frozen one is not cached."""


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One storage on one rank."""

    index: int
    """position in the graph's list."""
    name: str
    """what it is, as a path."""
    numel: int
    """elements on one rank before tensor parallelism divides them."""
    itemsize: float
    """bytes an element."""
    split: Split
    """how tensor parallelism divides it."""
    num_bytes: int
    """bytes on one rank."""
    maker: int
    """index of the operator that makes it; -1 for what enters the graph."""
    kind: Kind
    """what it holds."""
    shared: bool
    """whether all blocks of a stack share it (position angles, the encoder's output)."""
    root: int
    """value whose storage it is: itself unless it is a view."""
    gradient_bytes: int
    """bytes of its gradient; a view has one of its own, though it holds no bytes (note 1)."""

    @property
    def has_gradient(self) -> bool:
        """Whether backward makes a gradient of it."""
        return self.kind == "activation"


class Collective(msgspec.Struct, frozen=True, kw_only=True):
    """One collective operation."""

    group: Literal["tensor", "expert", "context"]
    """which ranks take part."""
    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring"]
    """what they do."""
    num_bytes: int
    """bytes of the full tensor on one rank."""
    phase: Literal["forward", "backward"]
    """when."""
    ranks: int
    """how many ranks take part."""

    @property
    def wire_bytes(self) -> float:
        """Bytes that one rank sends: 2(n-1)/n of the tensor for an all-reduce, (n-1)/n for its halves, all around a ring."""
        share = (self.ranks - 1) / self.ranks
        if self.kind == "ring":
            return float(self.num_bytes)
        return (2 if self.kind == "all_reduce" else 1) * share * self.num_bytes


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One operator."""

    index: int
    """position in the graph's list."""
    name: str
    """what it does, as a path."""
    module: str
    """dotted path of the part it belongs to ("attention.core", "mlp.activation", ...)."""
    kind: Literal["matmul", "attention", "pointwise"]
    """what it costs to run again."""
    inputs: tuple[int, ...]
    """values read."""
    outputs: tuple[int, ...]
    """values made."""
    saves: tuple[int, ...]
    """values that autograd saves for its backward."""
    flops: float
    """floating-point operations of its forward on one rank."""
    backward_flops: float
    """floating-point operations of its backward on one rank."""
    passes_gradient: bool
    """its inputs' gradients are its output's gradient (note 3)."""
    forward_extra: int
    """bytes: workspace of its forward."""
    backward_extra: int
    """bytes: workspace of its backward, weight gradients on their way included."""
    collectives: tuple[Collective, ...]
    """collectives it runs."""


class Parameter(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of one kind and shape."""

    name: str
    """what they are, as a path."""
    rows: int
    """output width of a matrix, length of a vector."""
    columns: int
    """input width of a matrix, 1 for a vector."""
    count: int
    """how many of them (experts)."""
    divisor: int
    """ranks of tensor and expert parallelism that share them."""
    expert: bool
    """whether expert parallelism divides them, so that fewer replicas exist."""
    adapter: bool
    """whether they belong to a low-rank adapter."""
    trained: bool
    """whether they get gradients."""
    role: Literal["matrix", "vector", "table"]
    """hidden matrices, vectors, or token and output tables."""
    quantised: bool
    """whether a quantised base stores them in few bits."""

    @property
    def numel(self) -> int:
        """Elements in all, undivided."""
        return self.rows * self.columns * self.count


class Walk(msgspec.Struct, frozen=True, kw_only=True):
    """Live bytes of one piece's passes."""

    forward_peak: int
    """bytes: most that is alive during its forward, held values included."""
    backward_peak: int
    """bytes: most that is alive during its backward, values still held included."""
    backward_saved: int
    """bytes: of `backward_peak`, what autograd still held at that moment."""
    first_gradients: int
    """bytes of gradients that are alive when backward first asks for a saved value."""


class Graph:
    """Operators in the order in which forward runs them. What is derived from them is computed once: ask when it is complete."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.parameters: list[Parameter] = []
        self.entry = -1
        """value that enters (the hidden states)."""
        self.exit = -1
        """value that leaves."""
        self.output = -1
        """value that user code keeps until the step's end (the model's output), or -1."""
        self.in_hand: set[int] = set()
        """values that variables of the model's code hold until its forward ends, whether autograd saves them or not."""
        self.tied: Parameter | None = None
        """table that it reads and another piece owns (a tied output projection)."""
        self.input_bytes = 0
        """bytes of the batch that the piece reads (tokens, images, labels)."""
        self._walk: Walk | None = None

    def saved(self) -> frozenset[int]:
        """Values that autograd holds after forward."""
        return self._saved

    @functools.cached_property
    def _saved(self) -> frozenset[int]:
        return frozenset(v for op in self.ops for v in op.saves)

    def bytes_of(self, values: Collection[int], *, shared: bool = False) -> int:
        """Bytes of these values on one rank; shared ones only if asked for."""
        return sum(self.values[v].num_bytes for v in values if shared or not self.values[v].shared)

    @functools.cached_property
    def shared_values(self) -> tuple[Value, ...]:
        """Values that all blocks of a stack share."""
        return tuple(value for value in self.values if value.shared)

    @functools.cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Collectives of both passes."""
        return tuple(c for op in self.ops for c in op.collectives)

    @property
    def user_held(self) -> int:
        """Bytes that user code keeps until the step's end."""
        return self.values[self.output].num_bytes if self.output >= 0 else 0

    @functools.cached_property
    def casts(self) -> frozenset[int]:
        """Narrow copies of trained weights that autocast caches."""
        return frozenset(value.index for value in self.values if value.kind == "weight cast")

    @functools.cached_property
    def flops(self) -> float:
        """Floating-point operations of one forward."""
        return sum(op.flops for op in self.ops)

    @functools.cached_property
    def backward_flops(self) -> float:
        """Floating-point operations of one backward."""
        return sum(op.backward_flops for op in self.ops)

    def rebuild(self, kept: frozenset[int]) -> tuple[list[int], frozenset[int]]:
        """Operators that must run again when only `kept` is held, and what must be held besides (the entering values they read).

        The closure starts at what autograd saves and stops at kept values, entering values and parameters.
        """
        wanted = [v for v in self.saved() if v not in kept]
        seen = set(wanted)
        ops: set[int] = set()
        needed: set[int] = set()
        while wanted:
            value = self.values[wanted.pop()]
            if value.maker < 0:
                needed.add(value.index)
                continue
            if value.maker in ops:
                continue
            ops.add(value.maker)
            for source in self.ops[value.maker].inputs:
                if source not in kept and source not in seen:
                    seen.add(source)
                    wanted.append(source)
        return sorted(ops), frozenset(needed)

    def walk(self) -> Walk:
        """Live bytes of both passes, above what was alive before; nothing of this piece is dropped while it runs."""
        if self._walk is None:
            saved = self.saved()
            backward, still, first = self._backward_peak(saved)
            self._walk = Walk(
                forward_peak=self._forward_peak(saved),
                backward_peak=backward,
                backward_saved=still,
                first_gradients=first,
            )
        return self._walk

    def _forward_peak(self, saved: frozenset[int]) -> int:
        last_read: dict[int, int] = {}
        for op in self.ops:
            for v in op.inputs:
                last_read[v] = last_read[self.values[v].root] = op.index
        staying = saved | self.in_hand | {self.exit, self.output}
        live = {v for v in (self.entry,) if v >= 0}
        live_bytes = self.bytes_of(live)
        peak = live_bytes
        for op in self.ops:
            for v in op.outputs:
                if v not in live and not self.values[v].shared:
                    live.add(v)
                    live_bytes += self.values[v].num_bytes
            peak = max(peak, live_bytes + op.forward_extra)
            for v in dict.fromkeys((*op.inputs, *op.outputs, *(self.values[i].root for i in op.inputs))):
                done = last_read.get(v, op.index) <= op.index
                if done and v in live and v not in staying:
                    live.discard(v)
                    live_bytes -= self.values[v].num_bytes
        return peak

    def _backward_peak(self, saved: frozenset[int]) -> tuple[int, int, int]:
        first_saver: dict[int, int] = {}
        for op in self.ops:
            for v in op.saves:
                first_saver.setdefault(v, op.index)  # note 2
        held = self.bytes_of(saved)
        sizes: dict[int, int] = {}  # gradient storage -> bytes
        owners: dict[int, int] = {}  # gradient storage -> values that use it
        gradient: dict[int, int] = {}  # value -> gradient storage
        counter = 0

        def release(storage: int) -> None:
            owners[storage] -= 1
            if owners[storage] == 0:
                del owners[storage], sizes[storage]

        if self.exit >= 0:
            sizes[0], owners[0], gradient[self.exit] = self.values[self.exit].gradient_bytes, 1, 0
        peak, peak_held, first = held + sum(sizes.values()), held, -1
        for op in reversed(self.ops):
            if op.saves and first < 0:
                first = sum(sizes.values())
            arriving = [gradient[v] for v in op.outputs if v in gradient]
            if arriving:
                fresh: list[tuple[int, int]] = []
                for v in dict.fromkeys(op.inputs):
                    if not self.values[v].has_gradient:
                        continue
                    if op.passes_gradient:
                        storage = arriving[0]
                        owners[storage] += 1
                    else:
                        counter += 1
                        storage = counter
                        sizes[storage], owners[storage] = self.values[v].gradient_bytes, 1
                    fresh.append((v, storage))
                now = held + sum(sizes.values()) + op.backward_extra
                if now > peak:
                    peak, peak_held = now, held
                for v, storage in fresh:
                    if v in gradient:
                        release(gradient[v])
                        if owners[storage] > 1:  # a sum with a borrowed gradient is a new storage
                            release(storage)
                            counter += 1
                            storage = counter
                            sizes[storage], owners[storage] = self.values[v].gradient_bytes, 1
                    gradient[v] = storage
                for v in op.outputs:
                    if v in gradient and v not in op.inputs:
                        release(gradient.pop(v))
            held -= self.bytes_of([v for v in dict.fromkeys(op.saves) if first_saver[v] == op.index])
        return peak, peak_held, max(0, first)
