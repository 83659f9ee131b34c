"""The same lesson in PyTorch: the blocks of `scratch.py` as modules, `keepwise.checkpoint` in place of `Drop`.

PyTorch decides by itself what backward reads. For y = x + relu(x W1) W2 that is x and a: relu's backward looks at its
result, so h is never kept. Plain PyTorch is the row "x, a" of the selective chapter, not the row "x, h, a".

What is counted here: a dispatch mode sees every operation below autograd, and a weak reference tells when a storage
dies. Live floats include everything that the step itself makes: activations, temporaries and gradients.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keepwise
from keepwise.lessons.chapter import Cell, Chapter, Table
from keepwise.lessons.training import HIDDEN, NUM_BLOCKS, WIDTH

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


class Ledger(TorchDispatchMode):
    """Floats alive among those that operations under this mode made, and the matrix products that ran."""

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live_floats = self.peak_floats = self.products = 0
        self._alive: set[int] = {
            tensor.untyped_storage()._cdata for tensor in existing
        }  # a view of these makes nothing

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.products += func is torch.ops.aten.mm.default
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._born(leaf.untyped_storage(), leaf.element_size())
        return result

    def _born(self, storage: torch.UntypedStorage, size: int) -> None:
        key, floats = storage._cdata, storage.nbytes() // size
        if key not in self._alive:
            self._alive.add(key)
            self.live_floats += floats
            self.peak_floats = max(self.peak_floats, self.live_floats)
            weakref.finalize(storage, self._died, key, floats)

    def _died(self, key: int, floats: int) -> None:
        self._alive.discard(key)
        self.live_floats -= floats


def forward(blocks: nn.Sequential, x: Tensor, k: int, checkpoint: Checkpoint | None, **options: Any) -> Tensor:
    """Run the blocks in segments of k; with `checkpoint`, each segment under it."""
    for start in range(0, len(blocks), k):
        segment = blocks[start : start + k]
        x = segment(x) if checkpoint is None else checkpoint(segment, x, use_reentrant=False, **options)
    return x


def run(
    k: int = NUM_BLOCKS, checkpoint: Checkpoint | None = None, *, dropout: float = 0.0, **options: Any
) -> tuple[Ledger, int, list[Tensor]]:
    """One step on a new, equal network. Returns the ledger, the floats kept when forward ends, and the gradients."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = nn.Sequential(*(Block(dropout) for _ in range(NUM_BLOCKS)))
        given, target = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
        with Ledger(blocks.parameters()) as ledger:
            y = forward(blocks, given.clone(), k, checkpoint, **options)  # the clone: so that the ledger sees x
            kept = ledger.live_floats - y.numel()
            error = y.detach() - target
            y.backward(error)
    return ledger, kept, [p.grad for p in blocks.parameters() if p.grad is not None]


def chapter(checkpoint: Checkpoint | None = None) -> Chapter:
    """The rows: plain, every k, and dropout with and without the saved random state."""
    checkpoint = keepwise.checkpoint if checkpoint is None else checkpoint
    plain = run()
    noisy = run(dropout=0.1)
    rows: list[tuple[Cell, ...]] = [_row("everything kept (plain PyTorch)", plain, None)]
    segments = {k: run(k, checkpoint) for k in (1, 2, 4, 8)}
    rows += [_row(f"k = {k}", measured, plain) for k, measured in segments.items()]
    saved = run(2, checkpoint, dropout=0.1)
    unsaved = run(2, checkpoint, dropout=0.1, preserve_rng_state=False)
    rows += [
        _row("dropout, everything kept", noisy, None),
        _row("dropout, k = 2, random state saved", saved, noisy),
        _row("dropout, k = 2, random state not saved", unsaved, noisy),
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
        answer=plain[1] // NUM_BLOCKS,
        why=f"x and a ({layer:,} floats): relu's backward reads its own result, so autograd never asks for h. The "
        "peak holds more than what forward kept: gradients of the weights, and the temporaries of the block in "
        f"backward. With k = 1 {segments[1][0].products - plain[0].products} products run again, where the whole "
        f"layers have {2 * NUM_BLOCKS}: a replay may stop as soon as the last tensor that backward reads is there.",
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


def _row(
    label: str, measured: tuple[Ledger, int, list[Tensor]], reference: tuple[Ledger, int, list[Tensor]] | None
) -> tuple[Cell, ...]:
    ledger, kept, gradients = measured
    difference = None
    if reference is not None:
        difference = max(float((a - b).abs().max()) for a, b in zip(gradients, reference[2], strict=True))
    return label, kept, ledger.peak_floats, ledger.products, difference
