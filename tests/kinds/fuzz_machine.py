"""The machine that carries out the instructions of a random program, and the table of what they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepwise

from .parts import Module

WIDTH = 4
NUMBERS = (0.5, 0.9, 1.1, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program."""

    op: str
    """Name in `OPS`."""
    a: int
    """Which value of the pool, counted from the newest."""
    b: int
    """Which second value of the same shape."""
    k: int
    """Which literal, weight or slice."""
    when: int = 0
    """In which steps it is carried out: a key of `WHEN`."""


WHEN: dict[int, Callable[[int], bool]] = {
    0: lambda now: True,
    1: lambda now: now > 0,
    2: lambda now: now != 1,
    3: lambda now: now == 1,
}


class Token:
    """A hook that lives as long as the graph that it hangs on."""

    def __call__(self, grad: torch.Tensor) -> None: ...


class Machine(Module):
    """A block: it carries out its instructions with weights, buffers and a generator of its own."""

    def __init__(self, lines: Sequence[Instruction]) -> None:
        super().__init__()
        self.lines, self.now = tuple(lines), 0
        self.w = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(2)])
        self.v = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) / 2) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gen = torch.Generator().manual_seed(7)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("direction", torch.ones(WIDTH) / 2)
        self.register_buffer("scratch", torch.zeros(WIDTH), persistent=False)
        self.held: list[torch.Tensor] = []
        self.last = torch.ones(WIDTH)
        self.keeps = self.looks_back = self.begins_in_region = False
        self.earlier: list[torch.Tensor] = []
        """Values of the last call that kept them; where it looks back, some instructions read them."""
        self.large = torch.zeros(20_000)
        self.tokens: list[weakref.ref[Token]] | None = None
        """Where given: told of the graph of each value."""

    def forward(self, x: torch.Tensor) -> Any:
        if self.begins_in_region:
            x = in_region_and_without(x)
        pool = [x + self.mean + self.large[:WIDTH] + by_settings().to(x.dtype)]  # nothing of that is saved
        for line in self.lines:
            if not WHEN[line.when](self.now):
                continue
            a = pool[-1 - line.a % len(pool)]
            same = [t for t in pool if t.shape == a.shape]
            if self.looks_back and line.b % 2:
                same = [t for t in self.earlier if t.shape == a.shape] or same
            out = OPS[line.op](self, a, same[-1 - line.b % len(same)], line.k)
            if out is not None:
                new = list(out) if isinstance(out, tuple) else [out]
                pool += new
                self._hang_tokens(new)
        if self.keeps:
            self.earlier = pool
        if self.looks_back:
            self.large.add_(0.1)  # which the replay of the call before reads
        return pool

    def _hang_tokens(self, values: list[torch.Tensor]) -> None:
        for t in values if self.tokens is not None else ():
            if t.grad_fn is not None and not t.is_inference():
                token = Token()
                t.register_hook(token)
                assert self.tokens is not None
                self.tokens.append(weakref.ref(token))


def _written_and_read(t: torch.Tensor) -> torch.Tensor:
    return F.elu_(t).sin()


def in_region_and_without(x: torch.Tensor) -> torch.Tensor:
    """The same twice, once in a checkpointed function: in each backward pass the gradients have to be the same."""
    a, b = x.view_as(x), x.view_as(x)
    grads: list[torch.Tensor] = []

    def compare(grad: torch.Tensor) -> None:
        grads.append(grad.detach().nan_to_num())
        if len(grads) == 2:
            assert torch.equal(*grads), "a checkpointed function has another gradient"
            grads.clear()

    if a.requires_grad:
        a.register_hook(compare)
        b.register_hook(compare)
    return keepwise.checkpoint(_written_and_read, a * 1.5) + _written_and_read(b * 1.5)


def by_settings() -> torch.Tensor:
    """Noise of rounding, as large as anything: what it is depends on the default dtype."""
    return (torch.full((WIDTH,), 0.1) * 3 - 0.3) * 1e6


Value = torch.Tensor
Result = torch.Tensor | tuple[torch.Tensor, ...] | None
Op = Callable[[Machine, Value, Value, int], Result]
OPS: dict[str, Op] = {}
EFFECTS: dict[str, list[str]] = {}


def op(effect: str) -> Callable[[Op], Op]:
    """Add an instruction to `OPS`."""

    def register(function: Op) -> Op:
        OPS[function.__name__] = function
        EFFECTS.setdefault(effect, []).append(function.__name__)
        return function

    return register


def number(k: int) -> float:
    return NUMBERS[k % len(NUMBERS)]


def wide(m: Machine, x: Value) -> Value:
    return x if x.shape[-1] == WIDTH else F.pad(x, (0, WIDTH))[..., :WIDTH]
