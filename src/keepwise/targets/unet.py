"""A U-Net (Ronneberger et al. 2015) that predicts a picture's noise: long skips, the largest tensors at both ends."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from keepwise.targets import data
from keepwise.targets.extras import block_names
from keepwise.targets.target import Batch, Target


class Residual(nn.Module):
    """Two normalised 3 x 3 convolutions with the noise level added in between, beside a 1 x 1 shortcut."""

    def __init__(self, inputs: int, outputs: int, level: int) -> None:
        super().__init__()
        self.first_norm = nn.GroupNorm(4, inputs)
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.level = nn.Linear(level, outputs)
        self.second_norm = nn.GroupNorm(4, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """Pictures (N, inputs, H, W) and their embedded noise levels (N, level) -> (N, outputs, H, W)."""
        hidden = self.first(functional.silu(self.first_norm(x))) + self.level(level)[:, :, None, None]
        return self.second(functional.silu(self.second_norm(hidden))) + self.shortcut(x)


class UNet(nn.Module):
    """Down through `depth` halvings, a middle, and up again beside what was kept on the way down. Returns the loss."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        level = 4 * width
        self.embed = nn.Sequential(nn.Linear(1, level), nn.SiLU(), nn.Linear(level, level))
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        widths = [width * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(Residual(widths[max(i - 1, 0)], widths[i], level) for i in range(depth))
        self.middle = Residual(widths[depth - 1], widths[depth], level)
        self.up = nn.ModuleList(Residual(widths[i + 1] + widths[i], widths[i], level) for i in reversed(range(depth)))
        self.head = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, pictures: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """Mean squared error of the noise (N, 3, H, W) that is predicted from the mixture at `time` (N,), a scalar."""
        share = time.view(-1, 1, 1, 1)
        hidden = self.stem((1 - share) * pictures + share * noise)
        level = self.embed(time[:, None])
        skips: list[Tensor] = []
        for block in self.down:
            hidden = block(hidden, level)
            skips.append(hidden)
            hidden = functional.avg_pool2d(hidden, 2)
        hidden = self.middle(hidden, level)
        for block in self.up:
            hidden = block(torch.cat([functional.interpolate(hidden, scale_factor=2.0), skips.pop()], 1), level)
        return functional.mse_loss(self.head(hidden), noise)


def unet(*, tiny: bool) -> Target:
    """The U-Net with pictures, noise and noise levels."""
    width, depth, count, size = (8, 2, 2, 16) if tiny else (48, 3, 8, 96)
    model = UNet(width, depth)

    def batch(index: int) -> Batch:
        pixels, _ = data.pictures(index, count, size, classes=16)
        source = torch.Generator().manual_seed(index)
        return (pixels, torch.randn(pixels.shape, generator=source), torch.rand(count, generator=source)), {}

    args, kwargs = batch(0)
    blocks = (*block_names(model, "down.*"), "middle", *block_names(model, "up.*"))
    return Target(name="", model=model, args=args, kwargs=kwargs, tokens=count, blocks=blocks, batches=batch)
