"""A plot of a few lines as one SVG file: linear or logarithmic axes, a legend, nothing else."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

COLORS = ("#1f5fbf", "#d1495b", "#3a7d44", "#8d5fd3", "#c77d0a", "#4d4d4d", "#0f8b8d", "#b5179e", "#7a5c3e")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """A series of points."""

    name: str
    points: Sequence[tuple[float, float]]
    color: str = ""
    joined: bool = True
    """Whether a line runs through the points; else they are marks."""
    labels: Sequence[str] = ()
    """A few letters beside each point."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One direction."""

    label: str
    log: bool = False
    low: float | None = None
    high: float | None = None


def plot(title: str, lines: Sequence[Line], x: Axis, y: Axis, *, width: int = 640, height: int = 400) -> str:
    """The SVG text of one plot."""
    return document([panel(title, lines, x, y, 0, 0, width, height)], width, height)


def document(panels: Sequence[str], width: int, height: int) -> str:
    """Panels put into one file."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{height}" fill="white"/>', *panels, "</svg>", ""])


def panel(
    title: str, lines: Sequence[Line], x: Axis, y: Axis, at_x: float, at_y: float, width: float, height: float
) -> str:
    """One plot at a place of a larger drawing."""
    left, right, top, bottom = at_x + 62, at_x + width - 14, at_y + 30, at_y + height - 44
    xs = [p[0] for line in lines for p in line.points]
    ys = [p[1] for line in lines for p in line.points]
    x_ticks, y_ticks = _ticks(x, xs), _ticks(y, ys)
    place_x = _scale(x, x_ticks, xs, left, right)
    place_y = _scale(y, y_ticks, ys, bottom, top)
    out = [f'<text x="{left}" y="{at_y + 16}" font-weight="bold">{html.escape(title)}</text>']
    for value in x_ticks:
        at = place_x(value)
        out.append(f'<line x1="{at:.1f}" y1="{top}" x2="{at:.1f}" y2="{bottom}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{at:.1f}" y="{bottom + 14}" text-anchor="middle">{_number(value)}</text>')
    for value in y_ticks:
        at = place_y(value)
        out.append(f'<line x1="{left}" y1="{at:.1f}" x2="{right}" y2="{at:.1f}" stroke="#e4e4e4"/>')
        out.append(f'<text x="{left - 5}" y="{at + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    out.append(
        f'<text x="{(left + right) / 2:.1f}" y="{bottom + 32}" text-anchor="middle">{html.escape(x.label)}</text>'
    )
    middle = (top + bottom) / 2
    out.append(
        f'<text x="{at_x + 13}" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 {at_x + 13} {middle:.1f})">'
        f"{html.escape(y.label)}</text>"
    )
    for i, line in enumerate(lines):
        color = line.color or COLORS[i % len(COLORS)]
        places = [(place_x(a), place_y(b)) for a, b in line.points]
        if line.joined and len(places) > 1:
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            out.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        for k, (a, b) in enumerate(places):
            out.append(f'<circle cx="{a:.1f}" cy="{b:.1f}" r="{2.5 if line.joined else 4}" fill="{color}"/>')
            if k < len(line.labels):
                out.append(
                    f'<text x="{a + 6:.1f}" y="{b - 4:.1f}" fill="{color}" font-size="10">{html.escape(line.labels[k])}</text>'
                )
        out.append(f'<rect x="{right - 150}" y="{top + 5 + 15 * i}" width="9" height="9" fill="{color}"/>')
        out.append(f'<text x="{right - 136}" y="{top + 13 + 15 * i}">{html.escape(line.name)}</text>')
    return "\n".join(out)


def _ticks(axis: Axis, values: Sequence[float]) -> list[float]:
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    if axis.log:
        first, last = math.floor(math.log10(max(low, 1e-12))), math.ceil(math.log10(max(high, 1e-12)))
        return [10.0**k for k in range(first, max(last, first + 1) + 1)]
    raw = max(high - low, 1e-12) / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [step * k for k in range(math.floor(low / step), math.ceil(high / step - 1e-9) + 1)]


def _scale(axis: Axis, ticks: Sequence[float], values: Sequence[float], start: float, stop: float):
    low, high = min(*ticks, *values), max(*ticks, *values)

    def place(value: float) -> float:
        if axis.log:
            part = (math.log10(value) - math.log10(low)) / (math.log10(high) - math.log10(low))
        else:
            part = (value - low) / (high - low)
        return start + (stop - start) * part

    return place


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 or value == int(value) else f"{value:g}"
