"""The same lesson in PyTorch: the blocks of `scratch.py` as modules, `keepwise.checkpoint` in place of `Drop`.

PyTorch decides by itself what backward reads. For y = x + relu(x W1) W2 that is x and a: relu's backward looks at its
result, so h is never kept. Plain PyTorch is the row "x, a" of the selective chapter, not the row "x, h, a".

What is counted here: the allocator's own events, as the profiler reports them. A matrix product that ran has allocated its
result, so the products are counted there as well, replays included.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as original

import keepwise
from keepwise.lessons.chapter import Cell, Chapter, Table
from keepwise.lessons.training import HIDDEN, NUM_BLOCKS, WIDTH
from keepwise.measure import allocator_timeline, peak_of

ROWS = 256
Checkpoint = Callable[..., Any]


class Block(nn.Module):
    """y = x + dropout(relu(x W1)) W2."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.second = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) to (rows, width)."""
        return x + self.second(self.dropout(torch.relu(self.first(x))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """One step."""

    kept_floats: int
    """Alive when forward has ended, without its output."""
    peak_floats: int
    """Highest level of the step above its start: activations, temporaries and gradients."""
    products: int
    """Matrix products that ran, in forward, backward and replays."""
    gradients: list[Tensor]
    """Of every weight."""

    def difference(self, other: Measured) -> float:
        """Largest absolute difference between two steps' gradients."""
        return max(float((a - b).abs().max()) for a, b in zip(self.gradients, other.gradients, strict=True))


def forward(blocks: nn.Sequential, x: Tensor, k: int, checkpoint: Checkpoint | None, **options: Any) -> Tensor:
    """Run the blocks in segments of k; with `checkpoint`, each segment under it."""
    for start in range(0, len(blocks), k):
        segment = blocks[start : start + k]
        x = segment(x) if checkpoint is None else checkpoint(segment, x, use_reentrant=False, **options)
    return x


def run(k: int = NUM_BLOCKS, checkpoint: Checkpoint | None = None, *, dropout: float = 0.0, **options: Any) -> Measured:
    """One step on a new, equal network, in segments of k blocks under `checkpoint`, with its `options`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(dropout) for _ in range(NUM_BLOCKS)))
        given, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        outputs: list[Tensor] = []

        def only_forward() -> Tensor:
            outputs.append(forward(blocks, given.clone(), k, checkpoint, **options))  # a clone: so that x counts too
            return outputs[-1]

        def step() -> None:
            torch.manual_seed(1)
            y = only_forward()
            y.backward(y.detach() - target)

        kept = sum(event.delta_bytes for event in allocator_timeline(only_forward)) - outputs[-1].nbytes
        outputs.clear()
        events = allocator_timeline(step)
    return Measured(
        kept_floats=kept // given.element_size(),
        peak_floats=peak_of(events) // given.element_size(),
        products=sum(event.op == "aten::mm" and event.delta_bytes > 0 for event in events),
        gradients=[weight.grad for weight in blocks.parameters() if weight.grad is not None],
    )


def chapter(checkpoint: Checkpoint | None = None) -> Chapter:
    """The rows: plain, every k, and dropout with and without the saved random state."""
    checkpoint = keepwise.checkpoint if checkpoint is None else checkpoint
    plain = run()
    noisy = run(dropout=0.1)
    rows: list[tuple[Cell, ...]] = [_row("everything kept (plain PyTorch)", plain, None)]
    segments = {k: run(k, checkpoint) for k in (1, 2, 4, 8)}
    rows += [_row(f"k = {k}", measured, plain) for k, measured in segments.items()]
    rows += [
        _row("dropout, everything kept", noisy, None),
        _row("dropout, k = 2", run(2, checkpoint, dropout=0.1), noisy),
        _row("dropout, k = 2, torch.utils.checkpoint", run(2, original, dropout=0.1), noisy),
        _row("the same, preserve_rng_state=False", run(2, original, dropout=0.1, preserve_rng_state=False), noisy),
    ]
    layer = ROWS * (WIDTH + HIDDEN)
    return Chapter(
        key="torch",
        title="The same in PyTorch",
        text=f"{NUM_BLOCKS} blocks on {ROWS} rows of width {WIDTH}, hidden size {HIDDEN}: x is {ROWS * WIDTH:,} "
        f"floats, h and a are {ROWS * HIDDEN:,} each. Each segment of k blocks runs under keepwise.checkpoint, which "
        "takes the arguments of torch.utils.checkpoint.checkpoint.",
        question=f"A layer has x, h and a: {ROWS * (WIDTH + 2 * HIDDEN):,} floats. How many does plain PyTorch keep "
        "a layer?",
        answer=plain.kept_floats // NUM_BLOCKS,
        why=f"x and a ({layer:,} floats): relu's backward reads its own result, so autograd never asks for h. The "
        "peak holds more than what forward kept: gradients of the weights, and the temporaries of the block in "
        f"backward. With k = 1 {segments[1].products - plain.products} products run again, where the whole layers "
        f"have {2 * NUM_BLOCKS}: a replay may stop as soon as the last tensor that backward reads is there. A "
        f"generator's state is kept for each segment that draws ({torch.get_rng_state().nbytes:,} bytes on the CPU), "
        "and without it the gradients are wrong; keepwise.checkpoint never draws again differently.",
        table=Table(
            columns=(
                "run",
                "floats kept when forward ends",
                "peak of the step",
                "matrix products",
                "largest gradient difference",
            ),
            rows=rows,
        ),
    )


def _row(label: str, run: Measured, reference: Measured | None) -> tuple[Cell, ...]:
    difference = None if reference is None else run.difference(reference)
    return label, run.kept_floats, run.peak_floats, run.products, difference
