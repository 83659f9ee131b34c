"""Optimizers that step between forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from keepwise.runtime.geometry import SMALL_BYTES

from .helpers import fit, made


class Shifted(nn.Module):
    """Its shift is read by replays, and autograd saves it not."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1 + SMALL_BYTES // 4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(x * self.scale) + self.shift).sum()


def test_a_write_by_hand_is_an_error_also_if_an_optimizer_steps_after_it() -> None:
    model: Any = made(Shifted)
    x = torch.randn(2, 1)
    fit(model, x)
    optimizer = torch.optim.SGD([model.shift], 0.1)
    loss = model(x)
    model.shift.grad = torch.ones_like(model.shift)
    with torch.no_grad():
        model.shift.add_(1.0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
