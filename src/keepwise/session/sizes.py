"""How large the activations of a batch are, as a multiple of the recorded ones, before a step of its shape was seen.

A tensor of a batch has a place (`args[0]`, `input_ids`, `[1].labels`) and a shape. Only places that the recorded batch has, too,
are compared: a batch that adds an attention mask is not larger for it. With the first dimension scaled by `b` and the others by `s`,
activations grow like `linear = b s` in most models and like `quadratic = b s**2` where attention scores are saved:

    scale = w linear + (1 - w) quadratic,  or  c + (1 - c) linear  where a part is the same for every batch

Each shape that was seen gives `w` or `c`; the largest of their answers counts. Before any was seen a smaller batch is taken to
shrink linearly and a larger one to grow by the share of saved bytes that have the same dimension twice: both err on the side of
more memory. Where all three terms matter the answer for a shape far below all that were seen can be too low; its own first step
puts that right.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import SUPPORTED_NODES, tree_leaves

from keepwise.ir import Step

Key = tuple[tuple[str, tuple[int, ...]], ...]
"""Place and shape of each tensor in a batch."""

MAX_SHAPES = 4096
"""Shapes whose scale is remembered: the newest ones."""
MAX_POINTS = 16
"""Shapes that guesses are made from: the newest ones."""


def tensors_at(tree: Any, place: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a tree of mappings, sequences, dataclasses, pytree nodes and objects with tensors as attributes, with their places."""
    if isinstance(tree, torch.Tensor):
        yield place, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from tensors_at(value, f"{place}.{name}" if place else f"{name}")
    elif isinstance(tree, (tuple, list)):
        for i, value in enumerate(tree):
            yield from tensors_at(value, f"{place}[{i}]")
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_at(getattr(tree, field.name, None), f"{place}.{field.name}" if place else field.name)
    elif type(tree) in SUPPORTED_NODES:
        for i, leaf in enumerate(tree_leaves(tree)):
            if isinstance(leaf, torch.Tensor):
                yield f"{place}<{i}>", leaf
    elif not isinstance(tree, (type, torch.nn.Module)):
        for name, value in getattr(tree, "__dict__", {}).items():
            if isinstance(value, torch.Tensor):
                yield f"{place}.{name}", value


def key_of(args: Any, kwargs: Any) -> Key:
    """Places and shapes of the tensors in a batch."""
    return tuple((place, _shape(t)) for tree in (args, kwargs) for place, t in tensors_at(tree))


def _shape(t: torch.Tensor) -> tuple[int, ...]:
    if t.is_nested:  # sizes of ragged dimensions are no numbers
        return (t.size(0), t.numel())
    return tuple(t.shape)


def structure(key: Key) -> tuple[str, ...]:
    """Which tensors a batch has, whatever their shapes."""
    return tuple(place for place, _ in key)


def shapes_in_words(key: Key) -> str:
    """A key for people."""
    return ", ".join(f"{place} {list(shape)}" for place, shape in key) or "no tensors"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A batch beside the recorded one."""

    linear: float
    """Ratio of elements."""
    quadratic: float
    """The same with every dimension but the first counted twice."""


def growth(recorded: Key, key: Key) -> Growth:
    """How much larger a batch is than the recorded one, by the tensors that both have.

    Tensors of one dimension (labels, lengths) count only where no larger one changes, and the one that grows most decides.
    """
    before = dict(recorded)
    pairs = [(before[place], shape) for place, shape in key if place in before]
    changed = [(a, b) for a, b in pairs if a != b and math.prod(a) > 0]
    wide = [(a, b) for a, b in changed if len(a) > 1]
    found = [
        Growth(linear=(n := math.prod(b) / math.prod(a)), quadratic=n * n / max(_first(b) / _first(a), 1e-9))
        for a, b in wide or changed
    ]
    return max(found, key=lambda g: g.linear, default=Growth(linear=1.0, quadratic=1.0))


def _first(shape: tuple[int, ...]) -> float:
    return max(shape[0], 1e-9) if shape else 1.0


def quadratic_share(step: Step, key: Key) -> float:
    """Share of the saved activations' bytes whose shapes have one dimension of the batch twice."""
    inner = {n for _, shape in key for n in shape[1:] if n > 1}
    twice = total = 0
    for save in step.saves:
        v = step.values[save.value]
        if step.storages[v.storage].category.is_static:
            continue
        nbytes = math.prod(v.shape)
        total += nbytes
        counts = Counter(v.shape[1:])
        twice += nbytes if any(counts[n] > 1 for n in inner) else 0
    return twice / total if total else 0.0


class Sizes:
    """Scales of batches: known, or guessed from those that are known."""

    def __init__(self, recorded: Key, share: float, scales: Iterable[tuple[Key, float]] = ()) -> None:
        """Start with the recorded batch, whose scale is 1.

        Args:
            recorded: key of that batch.
            share: of its bytes that grow quadratically (`quadratic_share`).
            scales: known already.
        """
        self._recorded = recorded
        self._share = share
        self._known: dict[Key, float] = {}
        self._points: dict[Growth, float] = {}
        for key, scale in scales:
            self.learn(key, scale)

    @property
    def learned(self) -> tuple[tuple[Key, float], ...]:
        """Every known scale but the recorded batch's."""
        return tuple(self._known.items())

    def knows(self, key: Key) -> bool:
        """Whether the scale is no guess."""
        return key == self._recorded or key in self._known

    def learn(self, key: Key, scale: float) -> None:
        """Remember a scale that was measured."""
        if key == self._recorded:
            return
        self._known.pop(key, None)
        self._known[key] = scale
        if len(self._known) > MAX_SHAPES:
            del self._known[next(iter(self._known))]
        point = growth(self._recorded, key)
        self._points.pop(point, None)
        if point.linear not in (0.0, 1.0):  # an empty batch tells nothing of how bytes grow
            self._points[point] = scale
            if len(self._points) > MAX_POINTS:
                del self._points[next(iter(self._points))]

    def scale(self, key: Key) -> float:
        """Bytes of activations as a multiple of the recorded ones."""
        if key == self._recorded:
            return 1.0
        known = self._known.get(key)
        if known is not None:
            return known
        new = growth(self._recorded, key)
        guesses = [_after(point, scale, new) for point, scale in self._points.items()]
        if not guesses:
            return new.linear if new.linear <= 1 else max(new.linear, self._mixed(new))
        return max(guesses)

    def _mixed(self, new: Growth) -> float:
        return (1 - self._share) * new.linear + self._share * new.quadratic


def _after(point: Growth, scale: float, new: Growth) -> float:
    """The scale at `new`, if it is `scale` at `point` and 1 at the recorded batch."""
    low, high = sorted((point.linear, point.quadratic))
    if low < high and low <= scale <= high:
        w = (scale - point.quadratic) / (point.linear - point.quadratic)
        return w * new.linear + (1 - w) * new.quadratic
    if min(point.linear, 1.0) < scale < max(point.linear, 1.0):
        c = (scale - point.linear) / (1 - point.linear)
        return c + (1 - c) * new.linear
    return new.linear * scale / point.linear
