"""Small models that touch what matters to a trace: views, writes in place, random numbers, several results, fused kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Mlp(nn.Module):
    def __init__(self, width: int = 32, depth: int = 3) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(torch.relu(up(x)))
        return x


class Block(nn.Module):
    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            t.view(rows, length, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        a = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm2(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 16, 3),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.Conv2d(16, 16, 3, stride=2),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.AdaptiveAvgPool2d(1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.dropout(self.a(x), 0.3)
        return nn.functional.rrelu(self.b(x), training=True)


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.cell = nn.LSTMCell(32, 32)

    def forward(self, tokens: Tensor) -> Tensor:
        h = c = torch.zeros(tokens.shape[0], 32)
        for t in range(tokens.shape[1]):
            h, c = self.cell(self.embed(tokens[:, t]), (h, c))
        return h


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 64)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.lin(x).chunk(2, dim=-1)
        c = (a * b).t().contiguous()
        parts = torch.stack([c[i] * c[i + 1] for i in range(3)])
        return parts.transpose(0, 1).reshape(-1).sin() * 2.0


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        y = y.mul_(2.0).add_(1.0)
        z = torch.zeros_like(y)
        z[:, ::2] = y[:, ::2].sigmoid()
        z.select(0, 0).add_(1.0)
        return torch.tanh_(z).cumsum(0)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (Mlp, lambda: torch.randn(16, 32)),
    "block": (Block, lambda: torch.randn(2, 16, 32)),
    "conv": (Conv, lambda: torch.randn(2, 3, 20, 20)),
    "noisy": (Noisy, lambda: torch.randn(16, 32)),
    "cell": (Cell, lambda: torch.randint(0, 20, (8, 5))),
    "views": (Views, lambda: torch.randn(16, 32)),
    "in place": (InPlace, lambda: torch.randn(16, 32)),
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model of the table and its input, the same bits each time."""
    make_model, make_input = MODELS[name]
    torch.manual_seed(0)
    return make_model().train(), make_input()


def plain_step(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Forward, loss and backward; returns the loss, detached."""

    def run() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    return run
