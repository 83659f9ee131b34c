"""What no other beats: options and points that are best at some price of memory."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.options import Option

MAX_OPTIONS = 400

Point = tuple[float, float, float, float, int, int]
"""Seconds, held bytes, limit on the peak, the smallest peak that it stands for, number of the held set, number of the limit."""


def dominant(options: Iterable[Option], limit: int = MAX_OPTIONS) -> list[Option]:
    """Options that no other beats in seconds, held bytes, peak and forward peak at once, cheapest first.

    One that holds something beats none that holds nothing: segments need those.
    """
    ordered = sorted(options, key=lambda o: (o.seconds, o.held_bytes, o.peak_bytes, o.forward_bytes))
    kept: list[Option] = []
    for option in ordered:
        if not any(
            (option.held or not k.held)
            and k.held_bytes <= option.held_bytes
            and k.peak_bytes <= option.peak_bytes
            and k.forward_bytes <= option.forward_bytes
            for k in kept
        ):
            kept.append(option)
    if len(kept) > limit:
        stride = len(kept) / limit
        kept = [kept[int(i * stride)] for i in range(limit)]
    return kept


def undominated(points: list[Point]) -> list[Point]:
    """Points that no other beats in (seconds, bytes, limit)."""
    points = sorted(points)
    kept: list[Point] = []
    size = np.empty(len(points))
    limit = np.empty(len(points))
    for p in points:
        n = len(kept)
        if n and bool(((size[:n] <= p[1]) & (limit[:n] <= p[2])).any()):
            continue
        size[n], limit[n] = p[1], p[2]
        kept.append(p)
    return kept


def undominated_apart(points: list[Point], sets: npt.NDArray[np.bool_]) -> list[Point]:
    """The same, where sets that hold nothing are compared with their like only: segments need those.

    Args:
        points: the points.
        sets: [storage, number of the set], as the points name them.
    """
    holds = np.asarray(sets.any(axis=0))
    return [*undominated([p for p in points if not holds[p[4]]]), *undominated([p for p in points if holds[p[4]]])]
