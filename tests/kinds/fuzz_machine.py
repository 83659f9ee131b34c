"""The machine that carries out the instructions of a random program, and the table of what they do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

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

    def forward(self, x: torch.Tensor) -> Any:
        pool = [x]
        for line in self.lines:
            a = pool[-1 - line.a % len(pool)]
            same = [t for t in pool if t.shape == a.shape]
            out = OPS[line.op](self, a, same[-1 - line.b % len(same)], line.k)
            if out is not None:
                pool += list(out) if isinstance(out, tuple) else [out]
        return pool


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
