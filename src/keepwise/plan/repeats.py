"""`find_runs`: the repeated blocks in a sequence of pieces.

A run is a maximal stretch with `tokens[i] == tokens[i + period]`. The run that covers the most ops is taken, at the smallest
period that covers nearly as much; then the same is done before and after it. O(pieces x longest period considered).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# A block has at most this many pieces; more would be a step that repeats only once or twice.
_MAX_PERIOD = 256
# A shorter period is preferred while it covers this share of what the best one covers.
_NEARLY = 0.95
# Shorter repetitions than this share of the whole are details within a block.
_LEAST_SHARE = 0.04


def find_runs(tokens: Sequence[int], sizes: Sequence[int], widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Repetitions in `tokens`.

    Args:
        tokens: one number a piece; equal numbers are equal pieces.
        sizes: ops in each piece.
        widths: bytes that cross the beginning of each piece (one more for the end); blocks begin where they are least.

    Returns:
        (first piece, pieces in a block, number of blocks >= 2) of disjoint runs, ascending.
    """
    found: list[tuple[int, int, int]] = []
    edges = (
        np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))])
        if len(sizes)
        else np.zeros(1, dtype=np.int64)
    )
    pending = [(0, len(tokens))]
    array = np.asarray(tokens, dtype=np.int64)
    while pending:
        a, b = pending.pop()
        best = _best(array[a:b], edges[a : b + 1])
        if best is None or edges[a + best[1]] - edges[a + best[0]] < _LEAST_SHARE * edges[-1]:
            continue
        first, stop, period = a + best[0], a + best[1], best[2]
        first += _phase(widths, first, stop, period)
        count = (stop - first) // period
        found.append((first, period, count))
        pending += [(a, first), (first + count * period, b)]
    return sorted(found)


def _best(tokens: np.ndarray, edges: np.ndarray) -> tuple[int, int, int] | None:
    """(first, stop, period) of the best run, or None."""
    best: list[tuple[int, int, int, int]] = []
    for period in range(1, min(len(tokens) // 2, _MAX_PERIOD) + 1):
        equal = np.flatnonzero(tokens[:-period] != tokens[period:])
        bounds = np.concatenate([[-1], equal, [len(tokens) - period]])
        starts, stops = bounds[:-1] + 1, bounds[1:] + period
        whole = stops - starts >= 2 * period
        if not whole.any():
            continue
        cover = np.where(whole, edges[stops] - edges[starts], -1)
        i = int(cover.argmax())
        best.append((int(cover[i]), int(starts[i]), int(stops[i]), period))
    if not best:
        return None
    most = max(cover for cover, *_ in best)
    return next((first, stop, period) for cover, first, stop, period in best if cover >= _NEARLY * most)


def _phase(widths: Sequence[int], first: int, stop: int, period: int) -> int:
    """Shift of the block boundaries that crosses the fewest bytes, without losing a block (the first of equals)."""
    slack = (stop - first) % period
    count = (stop - first) // period
    totals = [sum(widths[first + f + k * period] for k in range(1, count)) for f in range(slack + 1)]
    return totals.index(min(totals))
