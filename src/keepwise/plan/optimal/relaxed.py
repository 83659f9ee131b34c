"""What a stage needs at least, whatever its windows: to bound stages that are too large, and to leave out sets that are not worth it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.arrays import Sets, StageArrays, Vector, all_sets
from keepwise.plan.optimal.dominance import Point, undominated_apart
from keepwise.plan.optimal.options import Option, StageProblem

MAX_BOUNDS = 400


def relaxed_bounds(problem: StageProblem) -> list[Option]:
    """Optimistic options of a stage that is too large to enumerate: no schedule of it beats all of them."""
    arrays = StageArrays(problem)
    sets = all_sets(len(arrays.large))
    least, size, low = least_of(arrays, sets)
    low = np.maximum(low, problem.gap_bytes) if not len(arrays.nodes) else low
    order = np.lexsort((low, size, least))
    order = order[np.isfinite(least[order])]
    points = undominated_apart(
        [(float(least[k]), float(size[k]), float(low[k]), float(low[k]), int(k), 0) for k in order],
        sets,
    )
    return [
        Option(
            held=frozenset(p for c, p in enumerate(arrays.large) if sets[c, k]),
            windows=(),
            seconds=seconds,
            held_bytes=int(nbytes),
            peak_bytes=int(peak),
            forward_bytes=int(problem.front.max()),
        )
        for seconds, nbytes, peak, _, k, _ in _thinned(points)
    ]


def _thinned(points: list[Point]) -> list[Point]:
    """At most `MAX_BOUNDS` points, each at most what it stands for; a set that holds nothing stays by itself."""
    alone = [p for p in points if p[4] == 0]
    rest = [p for p in points if p[4] != 0]
    stride = -(-len(rest) // MAX_BOUNDS) if rest else 1
    groups = [rest[i : i + stride] for i in range(0, len(rest), stride)]
    merged = [
        (min(p[0] for p in g), min(p[1] for p in g), min(p[2] for p in g), min(p[3] for p in g), g[0][4], 0)
        for g in groups
    ]
    return [*alone, *merged]


def least_of(arrays: StageArrays, sets: Sets) -> tuple[Vector, Vector, Vector]:
    """Seconds, held bytes and peak that each held set has at least, whatever its windows."""
    need, least = arrays.closure(arrays.dropped(sets), sets)
    held = arrays.held_profile(sets)
    low = arrays.head + held[0]
    for n in range(len(arrays.nodes)):
        dropped = sum((arrays.nbytes[c] * ~sets[c] for c in arrays.node_reads[n]), np.zeros(sets.shape[1]))
        low = np.maximum(low, arrays.at_node[n] + held[n] + dropped)
    outputs = np.array([arrays.problem.storages[p] not in arrays.problem.stage.outputs for p in arrays.large])
    size = (arrays.held_bytes * outputs) @ sets if len(outputs) else np.zeros(sets.shape[1])
    return least, size + arrays.drawn @ need, low


def worthwhile(arrays: StageArrays, sets: Sets, known: list[Option]) -> npt.NDArray[np.intp]:
    """Sets that no known option beats in (seconds, bytes, peak), whatever their windows: indices."""
    least, size, low = least_of(arrays, sets)
    beaten = np.isinf(least)
    holds = sets.any(axis=0)
    for option in known:
        beaten |= (
            (holds | (not option.held))
            & (option.seconds <= least)
            & (option.held_bytes <= size)
            & (option.peak_bytes <= low)
        )
    return np.flatnonzero(~beaten)
