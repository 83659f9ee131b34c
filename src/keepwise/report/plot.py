"""Memory over the step in characters: the plain step light, the planned one dark, the budget a line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from keepwise._units import show_bytes
from keepwise.report.model import Curve
from keepwise.report.words import show_seconds

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(
    curve: Curve, *, budget_bytes: int | None, width: int = 72, height: int = 10, unicode: bool = True
) -> list[str]:
    """Lines of a plot with its axes and its key; empty for a step without ops.

    Args:
        curve: what to show.
        budget_bytes: drawn as a line where it lies inside the plot.
        width: characters for the axis of time.
        height: lines for the axis of bytes, which begins at 0.
        unicode: whether block characters may be used.
    """
    if not curve.plan:
        return []
    bins = max(len(curve.plain), len(curve.plan))
    width = min(width, bins)
    plain, plan = (_columns(levels, bins, width) for levels in (curve.plain, curve.plan))
    top = max(*plain, *plan, budget_bytes or 0) or 1
    full, light, line = ("█", "░", "┄") if unicode else ("#", ".", "-")
    budget_row = None if budget_bytes is None else min(int(height * budget_bytes / top), height - 1)
    margin = 9
    lines: list[str] = []
    for row in reversed(range(height)):
        cells: list[str] = []
        for was, now in zip(plain, plan, strict=True):
            filled = height * now / top - row
            if filled >= 1 or (filled > 0.5 and not unicode):
                cells.append(full)
            elif filled * 8 >= 1 and unicode:
                cells.append(_EIGHTHS[int(filled * 8)])
            elif row == budget_row:
                cells.append(line)
            elif height * was / top - row >= 0.5:
                cells.append(light)
            else:
                cells.append(" ")
        label = show_bytes(top) if row == height - 1 else "budget" if row == budget_row else ""
        edge = "│" if unicode else "|"
        lines.append(f"{label:>{margin}} {edge}{''.join(cells).rstrip()}")
    corner, floor = ("└", "─") if unicode else ("+", "-")
    lines.append(f"{'0':>{margin}} {corner}{floor * width}")
    lines.append(" " * (margin + 2) + _phase_line(curve, bins, width))
    length = show_seconds(bins * curve.bin_seconds) if curve.timed else f"{bins * curve.bin_seconds:.0f} ops"
    key = f"{light} plain   {full} planned" + (f"   {line} budget" if budget_row is not None else "")
    lines.append(" " * (margin + 2) + f"{key}   width: {length}")
    return lines


def _columns(levels: Sequence[int], bins: int, width: int) -> list[int]:
    edges = [i * bins // width for i in range(width + 1)]
    return [max(levels[a:b], default=0) for a, b in pairwise(edges)]


def _phase_line(curve: Curve, bins: int, width: int) -> str:
    """Names of the phases under their stretches, where they have room."""
    cells = [" "] * width
    for phase, first, last in curve.phases:
        a, b = first * width // bins, min(last * width // bins, width)
        if b - a >= len(phase) + 2:
            at = a + (b - a - len(phase)) // 2
            cells[at : at + len(phase)] = phase
    for _, first, _ in curve.phases[1:]:
        a = first * width // bins
        if a < width and cells[a] == " ":
            cells[a] = "|"
    return "".join(cells).rstrip()
