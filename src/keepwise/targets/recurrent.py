"""Loops over time: an LSTM (Hochreiter and Schmidhuber 1997) and a neural ODE (Chen et al. 2018)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from keepwise.targets import data
from keepwise.targets.extras import block_names
from keepwise.targets.target import Batch, Target


class LanguageModel(nn.Module):
    """A stack of LSTM layers over bytes, dropout after each. Returns the loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        """Mean cross entropy of each next byte of `ids` (N, T), a scalar."""
        hidden = self.embed(ids[:, :-1])
        for layer in self.layers:
            hidden = self.dropout(layer(hidden)[0])
        return functional.cross_entropy(self.head(hidden).flatten(0, 1), ids[:, 1:].flatten())


def lstm(*, tiny: bool) -> Target:
    """The LSTM language model over text."""
    width, depth, rows, length = (32, 2, 2, 24) if tiny else (512, 4, 16, 256)
    model = LanguageModel(width, depth)

    def batch(index: int) -> Batch:
        return (data.text(index, rows, length + 1),), {}

    args, kwargs = batch(0)
    return Target(
        name="",
        model=model,
        args=args,
        kwargs=kwargs,
        tokens=rows * length,
        blocks=block_names(model, "layers.*"),
        batches=batch,
    )


class Field(nn.Module):
    """The velocity of a state at a time: a perceptron with one hidden layer."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(size + 1, width), nn.Linear(width, size)

    def forward(self, time: float, state: Tensor) -> Tensor:
        """Velocity (N, size) of the `state` (N, size)."""
        clock = state.new_full((state.shape[0], 1), time)
        return self.outer(torch.tanh(self.inner(torch.cat([state, clock], 1))))


class Solver(nn.Module):
    """The classical Runge-Kutta method of order 4, from time 0 to 1."""

    def __init__(self, size: int, width: int, steps: int) -> None:
        super().__init__()
        self.field, self.steps = Field(size, width), steps

    def forward(self, state: Tensor) -> Tensor:
        """The state (N, size) at time 1 that began as `state`."""
        h = 1 / self.steps
        for i in range(self.steps):
            t = i * h
            k1 = self.field(t, state)
            k2 = self.field(t + h / 2, state + h / 2 * k1)
            k3 = self.field(t + h / 2, state + h / 2 * k2)
            k4 = self.field(t + h, state + h * k3)
            state = state + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return state


def _squared_distance(state: Tensor) -> Tensor:
    """How far the states are from the origin, where the flow is to bring them."""
    return state.square().mean()


def ode(*, tiny: bool) -> Target:
    """A flow that learns to bring all points on a spiral to the origin; its loss is a function outside the model."""
    size, width, steps, points = (4, 16, 8, 16) if tiny else (64, 512, 40, 2048)
    model = Solver(size, width, steps)

    def batch(index: int) -> Batch:
        angle = torch.linspace(0, 6 * math.pi, points) + 0.1 * index
        spiral = torch.stack([angle.cos(), angle.sin()], 1) * torch.linspace(0.2, 2, points)[:, None]
        return (spiral.repeat(1, size // 2),), {}

    args, kwargs = batch(0)
    return Target(
        name="",
        model=model,
        args=args,
        kwargs=kwargs,
        loss=_squared_distance,
        tokens=points,
        blocks=("field",),
        batches=batch,
    )
