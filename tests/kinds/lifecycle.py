"""What the tests of a plan's life share: a model, a plan on it, and the plain step as the oracle."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import keepwise

from .compare import frozen, mapping_differences
from .harness import options, seed_all
from .parts import Module
from .program import mean_square


class Layer(Module):
    """A block with dropout, batch statistics and an in-place op."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.BatchNorm1d(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.norm(self.up(x)), inplace=True)
        return x + self.down(F.dropout(h.sin(), 0.3, self.training))


class Model(Module):
    """Three layers. It stands in a module of its own, so that it can be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.blocks = nn.Linear(8, 8), nn.ModuleList([Layer() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> Any:
        x = torch.sin(self.inp(x))
        for block in self.blocks:
            x = block(x)
        return x


def built(seed: int = 1) -> tuple[Model, torch.Tensor]:
    """A fresh model and a batch."""
    seed_all(seed)
    return Model().train(), torch.randn(6, 8)


def outcome(model: Any, x: torch.Tensor, seed: int = 2) -> dict[str, Any]:
    """One step from a fixed seed: all that it left behind."""
    seed_all(seed)
    model.zero_grad(set_to_none=True)
    loss = mean_square(model(x))
    loss.backward()
    named = {f"grad {n}": frozen(p.grad) for n, p in model.named_parameters()}
    buffers = {n: frozen(b) for n, b in model.named_buffers()}
    return {"loss": frozen(loss), "generator": torch.get_rng_state(), **named, **buffers}


def planned(model: nn.Module, x: Any, how: str = "everything", **more: Any) -> keepwise.Plan:
    """A plan on the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return keepwise.fit(model, (x,), loss=mean_square, **{**options(how), **more})


def drops(plan: keepwise.Plan, model: Any, x: torch.Tensor) -> int:
    """Saved tensors that were dropped in a step."""
    before = plan.stats
    outcome(model, x)
    return plan.stats.num_dropped if plan.stats is not before or plan.stats.num_saved else 0


def same(a: dict[str, Any], b: dict[str, Any]) -> None:
    """Assert that two outcomes are equal to the last bit."""
    assert mapping_differences(a, b) == []
