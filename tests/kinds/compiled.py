"""torch.compile inside: a compiled part is one opaque op, kept or replayed as a whole."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Stack
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("compiled")


class _Inner(nn.Module):
    """`mix` is compiled; the products around it are not."""

    options: dict[str, Any] = {"backend": "aot_eager"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.mix = torch.compile(self._mix, **self.options)

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.a(x)) * torch.sigmoid(self.b(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(x).tanh()


def _compiled_nodes(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for x in args:
        out = model(x)
        model.nodes = sorted(_node_names(out))
        loss = loss_fn(out)
        loss.backward()
        total = total + loss.detach()
    return total


def _node_names(out: torch.Tensor) -> set[str]:
    names: set[str] = set()
    stack, seen = [out.grad_fn], set()
    while stack:
        node = stack.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.add(node.name().split("Backward")[0])
            stack += [n for n, _ in node.next_functions]
    return names


def _stays_compiled(records: Any) -> bool:
    return any("Compiled" in name for name in records[0].observed["nodes"])


@PROGRAMS.add(
    "a compiled function between eager layers stays compiled",
    step=_compiled_nodes,
    observe=lambda m: {"nodes": m.nodes},
    shows=_stays_compiled,
    may_drop_nothing=True,
    opaque=True,
    heavy=True,
)
def compiled_function_inside() -> Case:
    torch._dynamo.reset()
    return case(Stack(_Inner, 2), torch.randn(4, 8))


@PROGRAMS.add(
    "the same with shapes that change",
    step=_compiled_nodes,
    observe=lambda m: {"nodes": m.nodes},
    shows=_stays_compiled,
    may_drop_nothing=True,
    opaque=True,
    slow=True,
)
def compiled_with_two_shapes() -> Case:
    class Dynamic(_Inner):
        options = {"backend": "aot_eager", "dynamic": True}  # noqa: RUF012

    torch._dynamo.reset()
    return case(Stack(Dynamic, 2), torch.randn(4, 8), torch.randn(7, 8))


@PROGRAMS.add(
    "a whole block is compiled, with dropout and a buffer that moves",
    step=_compiled_nodes,
    observe=lambda m: {"nodes": m.nodes},
    may_drop_nothing=True,
    opaque=True,
    slow=True,
)
def compiled_block_with_effects() -> Case:
    class Effects(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(12))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            out = torch.tanh(h - self.mean)
            self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
            return F.dropout(out, 0.3, training=True)

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(Effects, 2)
            self.fast = torch.compile(self.blocks[1], backend="aot_eager")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fast(self.blocks[0](torch.sin(self.inp(x))))

    torch._dynamo.reset()
    return case(Net(), torch.randn(4, 8))


@PROGRAMS.add(
    "a graph break cuts the compiled function in two",
    step=_compiled_nodes,
    observe=lambda m: {"nodes": m.nodes},
    may_drop_nothing=True,
    opaque=True,
    slow=True,
)
def compiled_with_graph_break() -> Case:
    class Broken(_Inner):
        def _mix(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.sin(self.a(x))
            torch._dynamo.graph_break()
            return h * torch.sigmoid(self.b(h))

    torch._dynamo.reset()
    return case(Stack(Broken, 2), torch.randn(4, 8))


class _GivenUp(_Inner):
    """The compiler gives the function up inside of `try`: it runs as it is, with the compiler looking at each call in it."""

    def _mix(self, x: torch.Tensor) -> torch.Tensor:
        try:
            torch._dynamo.graph_break()
            h = torch.tanh(self.a(x))
            torch._dynamo.graph_break()
            return self.b(h) * torch.sin(h)
        finally:
            self.calls = getattr(self, "calls", 0) + 1


@PROGRAMS.add(
    "the compiler gives up a function that calls modules: our hooks are no part of it", opaque=True, heavy=True
)
def compiled_function_given_up() -> Case:
    return case(nn.Sequential(_GivenUp(), _GivenUp()), torch.randn(4, 8))


class _Branching(_Inner):
    """One of two branches, chosen by data in an operator that has a graph of its own for each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = torch.cond(h.sum() > 0, lambda z: torch.tanh(z), lambda z: torch.sin(z), (h,))
        return self.b(h)


@PROGRAMS.add(
    "a tracer that makes the graph of a branch's backward must see what is saved come back",
    opaque=True,
    heavy=True,
    slow=True,
)
def operator_with_branches() -> Case:
    return case(nn.Sequential(_Branching(), _Branching()), torch.randn(4, 8))
