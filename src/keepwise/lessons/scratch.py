"""Activation checkpointing from scratch: the whole algorithm, in NumPy.

Read this file from top to bottom; it takes one sitting. The network is a chain of residual blocks

    h = x W1        a = relu(h)        y = x + a W2

and backward of a block reads its x, its h and its a. Somebody has to keep them until then, or make them again. A *plan*
says which, part by part:

    Keep(layer)      forward keeps what backward will read
    Offload(layer)   forward keeps it too, but on the host; backward fetches it
    Drop(inner)      forward keeps the part's input alone; backward runs the part again, now under the plan `inner`

`inner` is itself a plan, so every policy of the literature is only a different plan: one `Drop` around every k layers
(Chen et al. 2016, arXiv:1604.06174), `Drop` within `Drop` (Griewank and Walther 2000, doi:10.1145/347837.347846),
`Keep` with fewer names (Korthikanti et al. 2022, arXiv:2205.05198). `placements.py` writes them down.

What the meter counts: floats that are kept for backward, a checkpoint and the cache that holds the same array again as
two copies. What it does not count: parameters, gradients, and the arrays of the one block that is just computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Block:
    """Weights of one residual block: `w1` is (width, hidden), `w2` is (hidden, width)."""

    w1: Array
    w2: Array
    dropout: float = 0.0


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep these arrays of one layer; backward rebuilds those of x, h, a that are missing."""

    layer: int
    names: str = "xha"


@dataclass(frozen=True, slots=True)
class Offload:
    """Keep x, h and a of one layer on the host."""

    layer: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Keep only the input of a part; run it again in backward, under `inner`."""

    inner: Plan
    restore_random: bool = True


Plan = tuple[Keep | Offload | Drop, ...]


@dataclass(slots=True)
class Meter:
    """Counts while the step runs. Nothing that the lesson prints is known in advance."""

    live_floats: int = 0
    peak_floats: int = 0
    moved_floats: int = 0
    forwards: int = 0
    products: int = 0
    timeline: list[int] = field(default_factory=list)

    def hold(self, arrays: Iterable[Array]) -> None:
        """These arrays are kept from now on."""
        self._change(sum(array.size for array in arrays))

    def drop(self, arrays: Iterable[Array]) -> None:
        """These arrays are free again."""
        self._change(-sum(array.size for array in arrays))

    def product(self, left: Array, right: Array) -> Array:
        """A matrix product: the only operation here that is worth counting."""
        self.products += 1
        return left @ right

    def _change(self, floats: int) -> None:
        self.live_floats += floats
        self.peak_floats = max(self.peak_floats, self.live_floats)
        self.timeline.append(self.live_floats)


class Step:
    """One forward and backward pass over `blocks`, as a plan says."""

    def __init__(self, blocks: Sequence[Block], meter: Meter, rng: np.random.Generator) -> None:
        self.blocks, self.meter, self.rng = blocks, meter, rng
        self.gradients: list[Array] = [np.zeros_like(w) for block in blocks for w in (block.w1, block.w2)]

    def forward(self, plan: Plan, x: Array) -> tuple[Array, list]:
        """Run a plan's layers on x. Returns the output and, for each part, what was kept for it."""
        saved: list = []
        for part in plan:
            if isinstance(part, Drop):
                self.meter.hold([x])
                saved.append((x, self.rng.bit_generator.state))
                for layer in layers(part.inner):
                    x, _ = self.block_forward(layer, x)  # the underscore is the whole trick
                continue
            x, cache = self.block_forward(part.layer, x)
            if isinstance(part, Keep):
                cache = {name: array for name, array in cache.items() if name in part.names + "m"}
            self.meter.hold(cache.values())
            saved.append(self.move(cache) if isinstance(part, Offload) else cache)
            if isinstance(part, Offload):
                self.meter.drop(cache.values())
        return x, saved

    def backward(self, plan: Plan, saved: list, dy: Array) -> Array:
        """Run backward over a plan that `forward` has run. Consumes `saved`; returns the gradient of the input."""
        for part in reversed(plan):
            kept = saved.pop()
            if isinstance(part, Drop):
                x, state = kept
                now = self.rng
                if part.restore_random:  # on a private generator, so that the training's own stream does not move
                    self.rng = np.random.Generator(np.random.PCG64())
                    self.rng.bit_generator.state = state
                _, again = self.forward(part.inner, x)
                self.rng = now
                dy = self.backward(part.inner, again, dy)
                self.meter.drop([x])
                continue
            if isinstance(part, Offload):
                kept = self.move(kept)
                self.meter.hold(kept.values())
            rebuilt = self.rebuild(part.layer, kept)
            self.meter.hold(rebuilt.values())
            dy = self.block_backward(part.layer, kept | rebuilt, dy)
            self.meter.drop(rebuilt.values())
            self.meter.drop(kept.values())
        return dy

    def block_forward(self, layer: int, x: Array) -> tuple[Array, dict[str, Array]]:
        """One block: x (batch, width) to y (batch, width), and all that its backward could ask for."""
        block = self.blocks[layer]
        self.meter.forwards += 1
        h = self.meter.product(x, block.w1)
        a = np.maximum(h, 0.0)
        cache = {"x": x, "h": h, "a": a}
        if block.dropout:
            keep = 1.0 - block.dropout
            cache["m"] = (self.rng.random(a.shape) < keep) / keep
            cache["a"] = a = a * cache["m"]
        return x + self.meter.product(a, block.w2), cache

    def rebuild(self, layer: int, cache: dict[str, Array]) -> dict[str, Array]:
        """What is missing from a cache: h costs a matrix product, a is elementwise, and h is not even read beside a."""
        missing: dict[str, Array] = {}
        if "a" not in cache:
            h = cache["h"] if "h" in cache else self.meter.product(cache["x"], self.blocks[layer].w1)
            missing = {} if "h" in cache else {"h": h}
            missing["a"] = np.maximum(h, 0.0) * cache.get("m", 1.0)
        return missing

    def block_backward(self, layer: int, cache: dict[str, Array], dy: Array) -> Array:
        """The chain rule for one block: adds to the weights' gradients, returns the gradient of x."""
        block, x, a = self.blocks[layer], cache["x"], cache["a"]
        self.gradients[2 * layer + 1] += self.meter.product(a.T, dy)
        da = self.meter.product(dy, block.w2.T) * cache.get("m", 1.0)
        dh = da * (cache.get("h", a) > 0.0)  # relu(h) > 0 exactly where h > 0: either will do
        self.gradients[2 * layer] += self.meter.product(x.T, dh)
        return dy + self.meter.product(dh, block.w1.T)

    def move(self, cache: dict[str, Array]) -> dict[str, Array]:
        """Copy a cache to the other side of the bus."""
        self.meter.moved_floats += sum(array.size for array in cache.values())
        return {name: array.copy() for name, array in cache.items()}


def layers(plan: Plan) -> Iterator[int]:
    """The layers of a plan, in forward order."""
    for part in plan:
        yield from layers(part.inner) if isinstance(part, Drop) else (part.layer,)
