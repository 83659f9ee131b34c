"""What each elementary operator makes, saves and costs. One method an operator; `layers` composes them.

What is saved follows the derivative formulas of PyTorch (tools/autograd/derivatives.yaml) and, under fused kernels, of the usual
replacements (Megatron-Core, Transformer Engine, Liger): a norm keeps its input and one or two numbers a row, an activation
its input.
Measured against real steps in `benchmarks/estimator_accuracy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from keepwise.estimator.context import Context
from keepwise.estimator.graph import Collective, Graph, Kind, Op, Parameter, Split, Value
from keepwise.estimator.spec import NormKind

_STATISTIC = 4  # bytes of an fp32 number a row
_WEIGHT_SPLITS: dict[str, Literal["whole", "tensor", "kv"]] = {
    "column": "tensor",
    "kv_column": "kv",
    "row": "tensor",
    "none": "whole",
}


class Builder:
    """Adds operators to a graph."""

    def __init__(self, name: str, context: Context, *, kv_heads: int = 1) -> None:
        self.graph = Graph(name)
        self.context = context
        tensor = context.tensor_parallel
        self._divisors = {
            "whole": 1,
            "sequence": tensor if context.sequence_parallel else 1,
            "tensor": tensor,
            "kv": min(tensor, kv_heads),
        }

    # ---- values and operators ----

    def value(
        self,
        name: str,
        numel: int,
        itemsize: float,
        *,
        split: Split = "sequence",
        kind: Kind = "activation",
        shared: bool = False,
        maker: int | None = None,
        view_of: int | None = None,
    ) -> int:
        """Add a value; returns its index. `maker` defaults to the operator that is added next. A view holds no bytes."""
        size = -int(-numel * itemsize // self._divisors[split])
        value = Value(
            index=len(self.graph.values),
            name=name,
            numel=numel,
            itemsize=itemsize,
            split=split,
            num_bytes=size if view_of is None else 0,
            root=len(self.graph.values) if view_of is None else self.graph.values[view_of].root,
            gradient_bytes=size,
            maker=len(self.graph.ops) if maker is None else maker,
            kind=kind,
            shared=shared,
        )
        self.graph.values.append(value)
        return value.index

    def enter(self, name: str, numel: int, itemsize: float, *, shared: bool = False, kind: Kind = "activation") -> int:
        """Add a value that comes from outside."""
        return self.value(name, numel, itemsize, maker=-1, shared=shared, kind=kind)

    def op(
        self,
        name: str,
        module: str,
        inputs: Iterable[int],
        outputs: Iterable[int],
        saves: Iterable[int] = (),
        *,
        kind: Literal["matmul", "attention", "pointwise"] = "pointwise",
        flops: float = 0.0,
        backward_flops: float | None = None,
        passes_gradient: bool = False,
        forward_extra: int = 0,
        backward_extra: int = 0,
        collectives: Iterable[Collective] = (),
    ) -> None:
        """Add an operator that makes `outputs` (already added as values)."""
        self.graph.ops.append(
            Op(
                index=len(self.graph.ops),
                name=name,
                module=module,
                kind=kind,
                inputs=tuple(inputs),
                outputs=tuple(outputs),
                saves=tuple(dict.fromkeys(self.graph.values[v].root for v in saves)),
                flops=flops,
                backward_flops=2 * flops if backward_flops is None else backward_flops,
                passes_gradient=passes_gradient,
                forward_extra=forward_extra,
                backward_extra=backward_extra,
                collectives=tuple(collectives),
            )
        )

    def numel(self, value: int) -> int:
        """Elements of a value before tensor parallelism divides them."""
        return self.graph.values[value].numel

    def itemsize(self, value: int) -> float:
        """Bytes an element."""
        return self.graph.values[value].itemsize

    def split(self, value: int) -> Split:
        """How a value is divided."""
        return self.graph.values[value].split

    def views(self, x: int, numels: Sequence[int], names: Sequence[str], module: str) -> list[int]:
        """Views of parts of a value. Their gradients are joined into a new tensor in backward."""
        made = [
            self.value(name, numel, self.itemsize(x), split=self.split(x), view_of=x)
            for name, numel in zip(names, numels, strict=True)
        ]
        self.op(names[0], module, [x], made)
        return made

    def like(self, value: int, name: str, *, itemsize: float | None = None) -> int:
        """Add a value of the same shape."""
        size = self.itemsize(value) if itemsize is None else itemsize
        return self.value(name, self.numel(value), size, split=self.split(value))

    # ---- parameters ----

    def parameter(
        self,
        name: str,
        rows: int,
        columns: int = 1,
        *,
        count: int = 1,
        split: Literal["whole", "tensor", "kv", "expert"] = "whole",
        role: Literal["matrix", "vector", "table"] = "vector",
        adapter: bool = False,
        fixed: bool = False,
    ) -> None:
        """Add parameters; base ones are frozen under LoRA, and matrices of a quantised base are stored in few bits.

        `fixed` ones are never trained.
        """
        self.graph.parameters.append(
            Parameter(
                name=name,
                rows=rows,
                columns=columns,
                count=count,
                divisor=self._weight_divisor(split),
                expert=split == "expert",
                adapter=adapter,
                trained=adapter or (self.context.train_base and not fixed),
                role=role,
                quantised=self.context.quantised and role == "matrix" and not adapter,
            )
        )

    def _weight_divisor(self, split: Literal["whole", "tensor", "kv", "expert"]) -> int:
        if split == "expert":
            return self.context.tensor_parallel * self.context.expert_parallel
        return self._divisors[split]

    # ---- elementary operators ----

    def cast(self, x: int, itemsize: float, name: str, module: str) -> int:
        """Copy to another width; the same value where it has that width already."""
        if self.itemsize(x) == itemsize:
            return x
        y = self.like(x, name, itemsize=itemsize)
        self.op(name, module, [x], [y])
        return y

    def pointwise(
        self, x: int, name: str, module: str, *, saves: Literal["nothing", "input", "result"] = "nothing"
    ) -> int:
        """A function of one tensor."""
        y = self.like(x, name)
        kept = {"nothing": [], "input": [x], "result": [y]}[saves]
        self.op(name, module, [x], [y], kept)
        return y

    def add(self, a: int, b: int, name: str, module: str) -> int:
        """A sum; the wider type wins."""
        y = self.like(a, name, itemsize=max(self.itemsize(a), self.itemsize(b)))
        self.op(name, module, [a, b], [y], passes_gradient=True, forward_extra=self._widening(a, b, y))
        return y

    def _widening(self, a: int, b: int, y: int) -> int:
        """Bytes of the widened copy that CPU kernels make of the narrower of two operands."""
        return self.graph.values[y].num_bytes if self.context.cpu and self.itemsize(a) != self.itemsize(b) else 0

    def multiply(self, a: int, b: int, name: str, module: str) -> int:
        """An elementwise product of two tensors that both need gradients: both are saved."""
        y = self.like(a, name, itemsize=max(self.itemsize(a), self.itemsize(b)))
        self.op(name, module, [a, b], [y], [a, b], forward_extra=self._widening(a, b, y))
        return y

    def dropout(self, x: int, probability: float, name: str, module: str) -> int:
        """Dropout: one byte an element on GPUs (`native_dropout`), the noise in full width on CPUs."""
        if probability <= 0:
            return x
        mask_itemsize = self.itemsize(x) if self.context.cpu else 1
        mask = self.value(f"{name}.mask", self.numel(x), mask_itemsize, split=self.split(x), kind="mask")
        y = self.like(x, name)
        self.op(name, module, [x], [mask, y], [mask])
        return y

    def norm(self, x: int, kind: NormKind, width: int, name: str, module: str, *, bias: bool = True) -> int:
        """A norm over the last `width` elements."""
        context, module = self.context, f"{module}.norm" if module else "norm"
        rows = self.numel(x) // width
        self.parameter(f"{name}.weight", width)
        if kind == "layer" and bias:
            self.parameter(f"{name}.bias", width)
        if kind == "layer":
            wide = self.cast(x, 4, f"{name}.input", module) if context.autocast and not context.cpu else x
            half_statistics = context.cpu and context.weight_itemsize == 2
            size = 2 if half_statistics else _STATISTIC
            statistics = self.value(f"{name}.statistics", 2 * rows, size, split=self.split(x), kind="statistic")
            y = self.like(wide, name)
            self.op(name, module, [wide], [statistics, y], [wide, statistics])
            return y
        if context.fused_kernels:
            statistics = self.value(f"{name}.statistics", rows, _STATISTIC, split=self.split(x), kind="statistic")
            y = self.like(x, name)
            self.op(name, module, [x], [statistics, y], [x, statistics])
            return y
        return self._rms_norm(x, kind, width, rows, name, module)

    def _rms_norm(self, x: int, kind: NormKind, width: int, rows: int, name: str, module: str) -> int:
        """RMS norm as written in Python: square, mean, reciprocal root, two products."""
        narrow = self.itemsize(x)
        wide = self.cast(x, 4, f"{name}.input", module)
        square = self.like(wide, f"{name}.square")
        # The derivative of a power is computed as a power and a product.
        extra = 2 * self.graph.values[square].num_bytes
        self.op(f"{name}.square", module, [wide], [square], [wide], backward_extra=extra)
        root = self.value(f"{name}.root", rows, 4, split=self.split(x), kind="activation")
        self.op(f"{name}.root", module, [square], [root], [root])
        scaled = self.like(wide, f"{name}.scaled")
        source = x if kind == "rms_promote" else wide
        self.op(f"{name}.scaled", module, [source, root], [scaled], [source, root])
        if kind == "rms_one_plus":
            factor = self.value(f"{name}.factor", width, 4, split="whole", kind="statistic")
            y = self.like(wide, f"{name}.product")
            saves = [scaled, factor] if self.context.train_base else [factor]
            self.op(f"{name}.product", module, [scaled], [factor, y], saves)
            return self.cast(y, narrow, name, module)
        if kind == "rms_wide":
            y = self.like(wide, f"{name}.product")
            self.op(f"{name}.product", module, [scaled], [y], [scaled] if self.context.train_base else [])
            return self.cast(y, narrow, name, module)
        scaled = self.cast(
            scaled, narrow if kind == "rms" or self.context.weight_itemsize == 2 else 4, f"{name}.normed", module
        )
        y = self.like(scaled, name)
        self.op(name, module, [scaled], [y], [scaled] if self.context.train_base else [])
        return y

    def linear(
        self,
        x: int,
        inputs: int,
        outputs: int,
        name: str,
        module: str,
        *,
        bias: bool = False,
        parallel: Literal["column", "kv_column", "row", "none"] = "column",
        targets: Sequence[str] = (),
        trained: bool | None = None,
        count_parameters: bool = True,
        gathered: int | None = None,
    ) -> int:
        """A matrix product with a weight. A trained weight saves the input; a frozen one does not.

        Args:
            x: input value.
            inputs: its last dimension.
            outputs: last dimension of the result.
            name: path of the projection.
            module: part that it belongs to.
            bias: whether it has a bias.
            parallel: how tensor parallelism splits the weight.
            targets: adapter names that apply to it ("q", "v", ...).
            trained: overrides whether the weight is trained.
            count_parameters: False for a tied weight.
            gathered: what `boundary` made of `x`; it is read, while `x` is saved.
        """
        context = self.context
        rows = self.numel(x) // inputs
        train = context.train_base if trained is None else trained
        width_splits: dict[str, Split] = {"column": "tensor", "kv_column": "kv", "row": "whole", "none": self.split(x)}
        width_split = width_splits[parallel]
        weight_split = _WEIGHT_SPLITS[parallel]
        if count_parameters:
            self.parameter(f"{name}.weight", outputs, inputs, split=weight_split, role="matrix")
            if bias:
                self.parameter(f"{name}.bias", outputs, split="whole" if parallel in ("row", "none") else weight_split)
        divisor = {"tensor": self._divisors["tensor"], "kv": self._divisors["kv"], "whole": 1}[weight_split]
        weight_bytes = inputs * outputs // divisor
        source = x
        saves: list[int] = []
        extra_outputs: list[int] = []
        if context.autocast:
            source = self.cast(x, context.itemsize, f"{name}.input", module)
            kind = "weight cast" if train else "frozen cast"
            copy = self.value(f"{name}.weight_cast", weight_bytes, context.itemsize, split="whole", kind=kind)
            extra_outputs.append(copy)
            saves.append(copy)
        if train:
            if context.fp8:
                narrow = self.value(f"{name}.fp8_input", self.numel(source), 1, split=self.split(source), kind="mask")
                extra_outputs.append(narrow)
                saves.append(narrow)
            else:
                saves.append(source)
        y = self.value(
            name, rows * outputs, context.itemsize if context.autocast else self.itemsize(x), split=width_split
        )
        flops = 2.0 * rows * inputs * outputs / divisor
        expanded = weight_bytes * context.itemsize if context.quantised else 0
        weight_gradient = weight_bytes * context.itemsize if train and context.held_gradients else 0
        self.op(
            name,
            module,
            [source if gathered is None else gathered],
            [*extra_outputs, y],
            saves,
            kind="matmul",
            flops=flops,
            backward_flops=flops * (2 if train else 1),
            forward_extra=expanded,
            backward_extra=max(expanded, weight_gradient),
        )
        if context.lora_rank and context.lora_targets & set(targets):
            y = self._adapter(x, y, inputs, outputs, rows, name, module, parallel, divisor)
        return y

    def _adapter(
        self, x: int, y: int, inputs: int, outputs: int, rows: int, name: str, module: str, parallel: str, divisor: int
    ) -> int:
        """A low-rank adapter beside a projection: it saves its (dropped) input and its narrow middle."""
        context, rank = self.context, self.context.lora_rank
        self.parameter(
            f"{name}.lora_a",
            rank,
            inputs,
            split="tensor" if parallel == "row" else "whole",
            role="matrix",
            adapter=True,
        )
        self.parameter(
            f"{name}.lora_b",
            outputs,
            rank,
            split="whole" if parallel in ("row", "none") else "tensor",
            role="matrix",
            adapter=True,
        )
        # PEFT keeps adapters in fp32, casts their input to that, and autocast narrows it again; each adapter has its own copies.
        source = self.cast(x, 4, f"{name}.lora_wide_input", module)
        source = self.dropout(source, context.lora_dropout, f"{name}.lora_dropout", module)
        if context.autocast:
            source = self.cast(source, context.itemsize, f"{name}.lora_input", module)
        size = self.itemsize(source)
        middle = self.value(f"{name}.lora_middle", rows * rank, size, split="sequence")
        inner = 2.0 * rows * rank * inputs / (divisor if parallel == "row" else 1)
        outer = 2.0 * rows * rank * outputs / (1 if parallel == "row" else divisor)
        copies: list[int] = []
        if context.autocast:
            numel = rank * (inputs + outputs)
            copies.append(self.value(f"{name}.lora_casts", numel, context.itemsize, split="whole", kind="weight cast"))
        self.op(f"{name}.lora_a", module, [source], [*copies, middle], [*copies, source], kind="matmul", flops=inner)
        up = self.value(f"{name}.lora_result", rows * outputs, size, split=self.split(y))
        self.op(f"{name}.lora_b", module, [middle], [up], [middle], kind="matmul", flops=outer)
        scaled = self.pointwise(up, f"{name}.lora_scaled", module)
        total = self.add(y, scaled, f"{name}.sum", module)
        return self.cast(total, self.itemsize(y), f"{name}.sum_narrow", module)

    def activation(self, x: int, function: str, name: str, module: str) -> int:
        """An activation function by its Hugging Face name; those written in Python keep every intermediate."""
        module = f"{module}.activation"
        if self.context.fused_kernels:
            return self.pointwise(x, name, module, saves="input")
        if function in ("relu", "sigmoid", "tanh"):
            return self.pointwise(x, name, module, saves="result")
        if function == "relu2":
            return self.pointwise(
                self.pointwise(x, f"{name}.relu", module, saves="result"), name, module, saves="input"
            )
        if function in ("gelu_new", "gelu_python_tanh"):
            cube = self.pointwise(x, f"{name}.cube", module, saves="input")
            inner = self.add(x, self.pointwise(cube, f"{name}.scaled_cube", module), f"{name}.inner", module)
            tanh = self.pointwise(
                self.pointwise(inner, f"{name}.argument", module), f"{name}.tanh", module, saves="result"
            )
            return self._half_product(x, tanh, name, module)
        if function == "gelu_fast":
            square = self.pointwise(x, f"{name}.scaled", module)
            inner = self.pointwise(self.multiply(square, x, f"{name}.square", module), f"{name}.inner", module)
            first = self.pointwise(x, f"{name}.linear", module)
            tanh = self.pointwise(
                self.multiply(first, inner, f"{name}.argument", module), f"{name}.tanh", module, saves="result"
            )
            return self._half_product(x, tanh, name, module)
        if function == "quick_gelu":
            gate = self.pointwise(
                self.pointwise(x, f"{name}.argument", module), f"{name}.sigmoid", module, saves="result"
            )
            return self.multiply(x, gate, name, module)
        return self.pointwise(x, name, module, saves="input")

    def _half_product(self, x: int, tanh: int, name: str, module: str) -> int:
        """0.5 * x * (1 + tanh), as both Python forms of GELU end."""
        one_plus = self.pointwise(tanh, f"{name}.one_plus", module)
        half = self.pointwise(x, f"{name}.half", module)
        return self.multiply(half, one_plus, name, module)

    def boundary(self, x: int, name: str, module: str, *, leave: bool) -> int:
        """Where tensor parallelism begins (before column products) or ends (after row products): the collectives.

        Without sequence parallelism: all-reduce at the end forward and at the beginning backward; with it: all-gather and
        reduce-scatter in both, and the gathered input once more for weight gradients (Korthikanti et al., section 4.2.2).
        """
        context = self.context
        if context.tensor_parallel == 1:
            return x
        size = int(self.numel(x) * self.itemsize(x))

        def move(
            kind: Literal["all_reduce", "all_gather", "reduce_scatter"], phase: Literal["forward", "backward"]
        ) -> Collective:
            return Collective(group="tensor", kind=kind, num_bytes=size, phase=phase, ranks=context.tensor_parallel)

        if context.sequence_parallel:
            moves = (
                [move("reduce_scatter", "forward"), move("all_gather", "backward")]
                if leave
                else [move("all_gather", "forward"), move("all_gather", "backward"), move("reduce_scatter", "backward")]
            )
        else:
            moves = [move("all_reduce", "forward")] if leave else [move("all_reduce", "backward")]
        split: Split = "sequence" if leave else "whole"
        y = self.value(name, self.numel(x), self.itemsize(x), split=split)
        self.op(name, module, [x], [y], passes_gradient=not context.sequence_parallel, collectives=moves)
        return y
