"""Geometry of the page's drawings: numbers in, SVG paths and positions out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from keepwise._units import show_bytes
from keepwise.report.model import Curve
from keepwise.report.words import show_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """A mark on an axis."""

    at: float
    label: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named stretch of the axis of time."""

    name: str
    start: float
    stop: float

    @property
    def middle(self) -> float:
        """Where its name is written."""
        return (self.start + self.stop) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Memory over the step, in the units of an SVG `viewBox`."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    plain: str
    """Path of the plain step's area."""
    plan: str
    plan_line: str
    """Upper edge of the planned step's area."""
    budget: float | None
    """Height of the budget's line."""
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    phases: tuple[Span, ...]
    top_bytes: int


def chart_of(curve: Curve, budget_bytes: int | None, *, width: float = 1000, height: float = 330) -> Chart | None:
    """The chart's geometry; None for a step without ops."""
    bins = max(len(curve.plain), len(curve.plan))
    if not bins:
        return None
    left, right, upper, lower = 74.0, width - 12.0, 26.0, height - 34.0
    highest = max(*curve.plain, *curve.plan, budget_bytes or 0)
    y_values, scale_top = nice_bytes(highest)

    def x(i: float) -> float:
        return left + (right - left) * i / bins

    def y(level: float) -> float:
        return lower - (lower - upper) * level / scale_top

    def edge(levels: Sequence[int]) -> str:
        parts = [f"M{x(0):.1f},{y(levels[0]):.1f}"]
        for i, level in enumerate(levels):
            if i and level != levels[i - 1]:
                parts.append(f"V{y(level):.1f}")
            if i + 1 == len(levels) or levels[i + 1] != level:
                parts.append(f"H{x(i + 1):.1f}")
        return "".join(parts)

    def area(levels: Sequence[int]) -> str:
        return f"{edge(levels)}V{lower:.1f}H{left:.1f}Z" if levels else ""

    length = bins * curve.bin_seconds
    return Chart(
        width=width,
        height=height,
        left=left,
        right=right,
        top=upper,
        bottom=lower,
        plain=area(curve.plain),
        plan=area(curve.plan),
        plan_line=edge(curve.plan) if curve.plan else "",
        budget=None if budget_bytes is None else y(budget_bytes),
        x_ticks=tuple(
            Tick(
                at=left + (right - left) * value / length,
                label=show_seconds(value) if curve.timed else f"{value:.0f} ops",
            )
            for value in nice_steps(length, 6)
        ),
        y_ticks=tuple(Tick(at=y(value), label=show_bytes(value)) for value in y_values),
        phases=tuple(Span(name=name, start=x(a), stop=x(b)) for name, a, b in curve.phases if b - a > bins / 40),
        top_bytes=scale_top,
    )


def nice_steps(highest: float, count: int) -> list[float]:
    """Round numbers 0, s, 2 s, ... up to `highest`, about `count` of them."""
    if highest <= 0:
        return [0.0]
    raw = highest / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    return [i * step for i in range(int(highest / step * 1.0001) + 1)]


def nice_bytes(highest: int) -> tuple[list[int], int]:
    """Round numbers of bytes from 0 past `highest`, in the unit in which it reads best, and the last of them."""
    unit = next((u for u in (2**30, 2**20, 2**10) if highest >= u), 1)
    steps = nice_steps(max(highest, 1) / unit, 5)
    step = steps[1] if len(steps) > 1 else max(highest, 1) / unit
    count = math.ceil(highest / unit / step - 1e-9)
    values = [round(i * step * unit) for i in range(count + 1)]
    return values, max(values[-1], 1)
