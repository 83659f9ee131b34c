"""Targets for the command-line tests: a small good one, and one for each way in which a target can be wrong."""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Net(nn.Module):
    def __init__(self, blocks: int = 3, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def loss(output):
    return output.square().mean()


def net(blocks: int = 3) -> tuple[Net, torch.Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net(blocks), torch.randn(512, 16)


def make():
    model, x = net()
    return model, x, {}, loss


def deeper():
    model, x = net(4)
    return model, x, {}, loss


def no_scalar():
    return net()


def frozen():
    model, x = net()
    return model.requires_grad_(False), x, {}, loss


def no_model():
    return "model", torch.zeros(1)


def raises():
    raise ValueError("no weights at that place")


class Wrong(Net):
    def forward(self, x):
        return super().forward(x) @ torch.zeros(3, 3)  # shapes do not fit


def raises_in_forward():
    return Wrong(), torch.randn(8, 16), {}, loss


class Interrupted(Net):
    def forward(self, x):
        raise KeyboardInterrupt


def interrupted():
    return Interrupted(), torch.randn(8, 16), {}, loss


class Signalled(Net):
    def forward(self, x):
        signal.raise_signal(signal.SIGINT)  # as Ctrl-C does
        return super().forward(x)


def signalled():
    return Signalled(), torch.randn(8, 16), {}, loss


class Noisy(Net):
    def forward(self, x):
        sys.stdout.write("noise from Python\n")
        os.write(1, b"noise from below\n")
        return super().forward(x)


def noisy():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Noisy(), torch.randn(512, 16), {}, loss


class Counting(Net):
    def forward(self, x):
        Counting.calls = getattr(Counting, "calls", 0) + 1
        return super().forward(x) * Counting.calls


def never_the_same():
    return Counting(), torch.randn(64, 16), {}, loss


class Flat(nn.Module):
    """No repeated blocks to checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return self.two(self.one(x).tanh())


def flat():
    return Flat(), torch.randn(256, 16), {}, loss


def on_the_meta_device():
    return Net().to("meta"), torch.randn(8, 16), {}, loss
