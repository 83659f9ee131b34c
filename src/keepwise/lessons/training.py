"""Around the algorithm: a network, a batch, and one training step that returns what the meter counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from keepwise.lessons.scratch import Array, Block, Meter, Plan, Step

BATCH, WIDTH, HIDDEN, NUM_BLOCKS = 4, 16, 64, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What one step computed and what it took."""

    loss: float
    gradients: list[Array]
    """Of every weight, in the order w1, w2 of the first block, w1, w2 of the second, ..."""
    peak_floats: int
    """Most floats that were kept for backward at one time."""
    forwards_again: int
    """Block forwards beyond the one that every step needs."""
    products: int
    """Matrix products of the whole step, forward and backward."""
    moved_floats: int
    """Floats copied to the host or back."""
    timeline: list[int]
    """Kept floats after each moment at which they changed."""

    def difference(self, other: Result) -> float:
        """Largest absolute difference between two steps' gradients; 0.0 means equal to the last bit."""
        return max(float(np.abs(a - b).max()) for a, b in zip(self.gradients, other.gradients, strict=True))


@dataclass(slots=True)
class SharedMeter(Meter):
    """Charges an array once, however many hold it: a checkpoint and the cache made from it can share storage."""

    holders: Counter[int] = field(default_factory=Counter)

    def hold(self, arrays: Iterable[Array]) -> None:
        """Charge those arrays that nobody held yet."""
        listed = list(arrays)
        self.holders.update(map(id, listed))
        self._change(sum(array.size for array in listed if self.holders[id(array)] == 1))

    def drop(self, arrays: Iterable[Array]) -> None:
        """Give back those arrays that nobody holds any more."""
        listed = list(arrays)
        self.holders.subtract(map(id, listed))
        self._change(-sum(array.size for array in listed if self.holders[id(array)] == 0))


def network(hidden: Sequence[int] = (HIDDEN,) * NUM_BLOCKS, *, dropout: float = 0.0, seed: int = 0) -> list[Block]:
    """A chain of blocks of the lesson's width, one for each hidden size."""
    rng = np.random.default_rng(seed)
    scale = 1.0 / np.sqrt(WIDTH)
    return [
        Block(rng.standard_normal((WIDTH, size)) * scale, rng.standard_normal((size, WIDTH)) * scale / 4, dropout)
        for size in hidden
    ]


def batch(rows: int = BATCH, *, seed: int = 1) -> tuple[Array, Array]:
    """Inputs and targets, each (rows, width)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, WIDTH)), rng.standard_normal((rows, WIDTH))


def train_step(
    blocks: Sequence[Block],
    plan: Plan,
    data: tuple[Array, Array] | None = None,
    *,
    micro_batches: int = 1,
    meter: Meter | None = None,
) -> Result:
    """Loss and gradients of half the squared error, summed over the batch, with the kept floats as the plan says.

    With `micro_batches` the rows are cut into that many equal parts whose gradients add up (gradient accumulation).
    """
    meter = Meter() if meter is None else meter
    step = Step(blocks, meter, np.random.default_rng(2))
    inputs, targets = batch() if data is None else data
    loss = 0.0
    for x, target in zip(np.split(inputs, micro_batches), np.split(targets, micro_batches), strict=True):
        y, saved = step.forward(plan, x)
        error = y - target
        loss += 0.5 * float(np.sum(error * error))
        step.backward(plan, saved, error)
    assert meter.live_floats == 0, "every array that was kept has been given back"
    return Result(
        loss=loss,
        gradients=step.gradients,
        peak_floats=meter.peak_floats,
        forwards_again=meter.forwards - len(blocks) * micro_batches,
        products=meter.products,
        moved_floats=meter.moved_floats,
        timeline=meter.timeline,
    )
