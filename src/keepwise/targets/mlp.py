"""A residual MLP that guesses the next byte from the ones before: the smallest model with repeated blocks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from keepwise.targets import data
from keepwise.targets.extras import block_names
from keepwise.targets.target import Batch, Target


class Block(nn.Module):
    """y = x + relu(x W1) W2, without biases."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        return x + self.outer(functional.relu(self.inner(x)))


class ResidualMLP(nn.Module):
    """An embedding of the last `context` bytes, `depth` blocks and a classifier. Returns the loss."""

    def __init__(self, context: int, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width // context)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def forward(self, context: Tensor, following: Tensor) -> Tensor:
        """Mean cross entropy of the bytes `following` (N,) each row of `context` (N, context), a scalar."""
        hidden = self.embed(context).flatten(1)
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(hidden), following)


def mlp(*, tiny: bool) -> Target:
    """The residual MLP over text."""
    context, width, rows = (8, 32, 16) if tiny else (16, 512, 4096)
    model = ResidualMLP(context, width, depth=8)

    def batch(index: int) -> Batch:
        ids = data.text(index, rows, context + 1)
        return (ids[:, :-1].contiguous(), ids[:, -1].contiguous()), {}

    args, kwargs = batch(0)
    return Target(
        name="",
        model=model,
        args=args,
        kwargs=kwargs,
        tokens=rows,
        blocks=block_names(model, "blocks.*"),
        batches=batch,
    )
