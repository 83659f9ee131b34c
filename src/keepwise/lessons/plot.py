"""Plots out of characters: bars, areas over time, and points in a plane."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LEFT_EIGHTHS = " ▏▎▍▌▋▊▉█"


def bars(labels: Sequence[str], values: Sequence[float], *, width: int = 40) -> str:
    """One horizontal bar a value, the largest `width` characters long."""
    longest = max(map(len, labels))
    lines = []
    for label, value in zip(labels, values, strict=True):
        eighths = round(8 * width * value / max(values))
        bar = "█" * (eighths // 8) + _LEFT_EIGHTHS[eighths % 8].strip()
        lines.append(f"{label:<{longest}}  {bar} {value:,}")
    return "\n".join(lines)


def area(values: Sequence[float], *, top: float, title: str, width: int = 64, height: int = 5) -> str:
    """Values over time, `top` at the upper edge; each column shows the largest value of its stretch of time."""
    columns = min(width, len(values))
    edges = [i * len(values) // columns for i in range(columns + 1)]
    highest = [max(values[a:b]) for a, b in pairwise(edges)]
    stretch = width // columns
    lines = [title]
    for row in reversed(range(height)):
        filled = [min(max(height * 8 * value / top - 8 * row, 0), 8) for value in highest]
        lines.append("│" + "".join(_EIGHTHS[round(part)] * stretch for part in filled).rstrip())
    return "\n".join([*lines, "└" + "─" * (stretch * columns)])


def plane(
    points: Sequence[tuple[float, float, str]],
    *,
    x_title: str,
    y_title: str,
    width: int = 60,
    height: int = 16,
) -> str:
    """Points (x, y, mark), both axes from 0; a mark is one character, and the first of two in one place is shown."""
    x_top = max(x for x, _, _ in points) or 1
    y_top = max(y for _, y, _ in points) or 1
    grid = [[" "] * (width + 1) for _ in range(height + 1)]
    for x, y, mark in reversed(points):
        grid[height - round(height * y / y_top)][round(width * x / x_top)] = mark
    margin = len(f"{y_top:,}")
    lines = [f"{y_title:>{margin}}"]
    for row, cells in enumerate(grid):
        label = f"{y_top:,}" if row == 0 else "0" if row == height else ""
        lines.append(f"{label:>{margin}} │{''.join(cells).rstrip()}")
    lines.append(" " * margin + " └" + "─" * (width + 1))
    lines.append(" " * (margin + 2) + f"0{x_title:^{width - len(f'{x_top:,}')}}{x_top:,}")
    return "\n".join(lines)
