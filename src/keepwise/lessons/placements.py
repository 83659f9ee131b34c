"""Where to put the checkpoints: the policies of the literature, each as a plan for `scratch.Step`.

- `every`: one checkpoint every k layers; `square_root` takes k near sqrt(L) (Chen et al. 2016, section 4.1), which is
  best where a layer's cache is as large as its input, and far from best where it is several times larger.
- `halves`: checkpoints within checkpoints, about log2(L) inputs at a time.
- `binomial`: the fewest forwards again for a given number of inputs held at once (Griewank and Walther 2000,
  "Revolve"), by dynamic programming over (layers, slots), O(L^2 * slots).
- `best`: any cut of the chain into segments, each kept whole or dropped, by trying all of them. Exact for that family
  and exponential, 2 * 3^(L-1) plans: fine for eight layers. It does not nest, nor offload, nor split a cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

from keepwise.lessons.scratch import Drop, Keep, Offload, Plan, layers


def everything(num_layers: int, names: str = "xha") -> Plan:
    """No checkpoint at all; with `names`, keep only those arrays of each layer."""
    return tuple(Keep(layer, names) for layer in range(num_layers))


def offload(num_layers: int) -> Plan:
    """Every cache waits for backward on the host."""
    return tuple(Offload(layer) for layer in range(num_layers))


def segments(num_layers: int, starts: Sequence[int], kept: Sequence[int] = ()) -> Plan:
    """One checkpoint at each of `starts` (the first is 0); a segment whose start is in `kept` reruns nothing."""
    plan: list[Keep | Offload | Drop] = []
    for start, stop in zip(starts, [*starts[1:], num_layers], strict=True):
        inner = tuple(Keep(layer) for layer in range(start, stop))
        plan.extend(inner if start in kept else (Drop(inner),))
    return tuple(plan)


def every(num_layers: int, k: int, *, keep_last: bool = False, restore_random: bool = True) -> Plan:
    """A checkpoint every k layers. With `keep_last` the last segment, which backward reads at once, is left alone."""
    starts = range(0, num_layers, k)
    plan = segments(num_layers, starts, kept=starts[-1:] if keep_last else ())
    return tuple(Drop(part.inner, restore_random) if isinstance(part, Drop) else part for part in plan)


def square_root(num_layers: int) -> Plan:
    """A checkpoint every round(sqrt(L)) layers."""
    return every(num_layers, round(math.sqrt(num_layers)))


def halves(num_layers: int, start: int = 0) -> Plan:
    """Drop the first half, inside it do the same, and so on; the very last layer is kept."""
    if num_layers == 1:
        return (Keep(start),)
    half = num_layers // 2
    return (Drop(halves(half, start)), *halves(num_layers - half, start + half))


def binomial(num_layers: int, slots: int, start: int = 0) -> Plan:
    """Fewest forwards again with at most `slots` layer inputs held at once, beside one layer's cache."""
    if num_layers == 1:
        return (Keep(start),)
    split = _split(num_layers, slots)[1]
    rest = binomial(num_layers - split, slots - 1, start + split)
    return (Drop(binomial(split, slots, start)), *rest)


@cache
def _split(num_layers: int, slots: int) -> tuple[float, int]:
    """(Forwards again, layers before the next checkpoint). A dropped part starts from an input that is held anyway."""
    if num_layers == 1:
        return 0, 1
    if slots == 0:
        return math.inf, 1
    return min(
        (split + _split(split, slots)[0] + _split(num_layers - split, slots - 1)[0], split)
        for split in range(1, num_layers)
    )


def predict(plan: Plan, inputs: Sequence[int], caches: Sequence[int]) -> tuple[int, int]:
    """(Peak floats, forwards again) of a plan of `Keep` and `Drop`, without running it.

    An abstract machine over sizes alone: `inputs[i]` floats for layer i's input and `caches[i]` for its whole cache.
    """
    peak = live = again = 0

    def change(floats: int) -> None:
        nonlocal peak, live
        live += floats
        peak = max(peak, live)

    def size(part: Keep | Offload | Drop) -> int:
        return inputs[next(layers(part.inner))] if isinstance(part, Drop) else caches[part.layer]

    def walk(plan: Plan) -> None:
        nonlocal again
        for part in plan:
            change(size(part))
        for part in reversed(plan):
            if isinstance(part, Drop):
                again += sum(1 for _ in layers(part.inner))
                walk(part.inner)
            change(-size(part))

    walk(plan)
    return peak, again


def all_placements(num_layers: int) -> Iterator[Plan]:
    """Every cut of a chain into segments, each either kept whole or dropped."""
    for cuts in range(2 ** (num_layers - 1)):
        starts = [0, *(layer for layer in range(1, num_layers) if cuts >> (layer - 1) & 1)]
        for chosen in range(2 ** len(starts)):
            yield segments(num_layers, starts, [start for i, start in enumerate(starts) if chosen >> i & 1])


def frontier(inputs: Sequence[int], caches: Sequence[int]) -> list[tuple[int, int, Plan]]:
    """The best placements: (forwards again, least peak floats, plan), each with a lower peak than the one before."""
    least: dict[int, tuple[int, Plan]] = {}
    for plan in all_placements(len(inputs)):
        peak, again = predict(plan, inputs, caches)
        if again not in least or peak < least[again][0]:
            least[again] = (peak, plan)
    points: list[tuple[int, int, Plan]] = []
    for again in sorted(least):
        peak, plan = least[again]
        if not points or peak < points[-1][1]:
            points.append((again, peak, plan))
    return points


def best(inputs: Sequence[int], caches: Sequence[int], budget_floats: int) -> Plan:
    """The placement with the fewest forwards again whose peak fits. Raises ValueError where none fits."""
    points = frontier(inputs, caches)
    for _, peak, plan in points:
        if peak <= budget_floats:
            return plan
    raise ValueError(f"no placement fits {budget_floats:,} floats; the smallest peak is {points[-1][1]:,} floats")
