"""Models whose class matters: counted, looked up, compared, or with a `forward` that is no plain method."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Module, Stack
from .program import Case, Collection, case

STRUCTURE = Collection("structure", is_wild=True)
COLLECTIONS = (STRUCTURE,)


class _Counting(Stack):
    """Keeps a counter, a table and a name on its class."""

    count: ClassVar[int] = 0
    scales: ClassVar[dict[type, float]] = {}

    def forward(self, x: torch.Tensor) -> Any:
        type(self).count += 1
        x = super().forward(x * self.scales[self.__class__])
        return x * (2.0 if type(self) is _Counting else 1.0) / type(self).count


_Counting.scales[_Counting] = 0.5


@STRUCTURE.add(
    "forward counts on the class, looks the class up in a table and compares it",
    observe=lambda m: {"count": _Counting.count, "own": type(m) is _Counting},
    shows=lambda records: [r.observed["count"] for r in records] == [1, 2, 3],
    python_state=True,
)
def class_counted() -> Case:
    _Counting.count = 0
    return case(_Counting(), torch.randn(4, 8))


def _flip(model: Any, i: int) -> None:
    model.flipped = i % 2 == 1


class _Property(Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.flipped = nn.Linear(8, 8), nn.Linear(8, 8), False

    @property
    def forward(self) -> Callable[[torch.Tensor], Any]:  # type: ignore[override]
        return self._other if self.flipped else self._one

    def _one(self, x: torch.Tensor) -> Any:
        return self.b(torch.tanh(self.a(x)))

    def _other(self, x: torch.Tensor) -> Any:
        return self.a(torch.sigmoid(self.b(x)))


@STRUCTURE.add("forward is a property, another method in each step", between=_flip, num_steps=4, python_state=True)
def forward_is_a_property() -> Case:
    return case(_Property(), torch.randn(4, 8))


@STRUCTURE.add("forward is a static method over a weight that it finds elsewhere")
def forward_is_static() -> Case:
    class Net(Module):
        weights: ClassVar[list[nn.Parameter]] = []

        def __init__(self) -> None:
            super().__init__()
            self.weights[:] = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))]
            self.a, self.b = self.weights

        @staticmethod
        def forward(x: torch.Tensor) -> Any:
            a, b = Net.weights
            return torch.tanh(torch.tanh(x @ a) @ b)

    return case(Net(), torch.randn(4, 8))


@STRUCTURE.add("a model traced by the older compiler, whose class has no forward to give", may_drop_nothing=True)
def traced_model() -> Case:
    inner = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    traced: Any = torch.jit.trace(inner, torch.randn(4, 8))
    return case(traced, torch.randn(4, 8))


@STRUCTURE.add("a graph module, whose class is made for it alone")
def graph_module() -> Case:
    inner = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(8, 8))
    return case(torch.fx.symbolic_trace(inner), torch.randn(6, 8))


def _exchange(model: Any, i: int) -> None:
    if i == 1:
        model.forward = lambda x: F.silu(Stack.forward(model, x))
    elif i == 3:
        del model.forward


@STRUCTURE.add(
    "forward is set on the instance between steps and taken off", between=_exchange, num_steps=5, python_state=True
)
def forward_set_between() -> Case:
    return case(Stack(), torch.randn(4, 8))
