"""Small models for the session's tests."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        return x + self.drop(self.down(torch.tanh(h) * torch.sigmoid(h)))


class Stack(nn.Module):
    """A residual stack; its step is dominated by activations."""

    def __init__(self, depth: int = 6, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width, dropout) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def stack(depth: int = 6, dropout: float = 0.0) -> tuple[Stack, torch.Tensor]:
    torch.manual_seed(0)
    return Stack(depth, dropout=dropout), torch.randn(64, 32, 16)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def run(model: nn.Module, x: torch.Tensor, seed: int = 1) -> list[torch.Tensor]:
    """One step from a fixed seed: loss, gradients, buffers, generator state."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    value = loss(model(x))
    value.backward()
    grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [value.detach(), *grads, *(b.clone() for b in model.buffers()), torch.get_rng_state()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
