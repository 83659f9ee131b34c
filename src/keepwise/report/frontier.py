"""A frontier on a terminal and as a page: time against memory."""

from __future__ import annotations

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from keepwise._units import show_bytes
from keepwise.report.drawing import Tick, nice_bytes, nice_steps
from keepwise.report.html import render
from keepwise.report.terminal import draws_blocks
from keepwise.report.words import show_percent, show_seconds

_BAR = 30


class FrontierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Points from the smallest budget to the plain peak."""

    title: str
    description: str
    plain_peak_bytes: int
    step_seconds: float
    points: tuple[tuple[int, int, float, float], ...]
    """(budget bytes, peak bytes, added seconds, bound seconds)"""
    knee: int
    """Index of the point where most memory is gained for the least time."""


def print_frontier(report: FrontierReport, console: Console) -> None:
    """A row a budget, with a bar for the time that it costs."""
    console.print(f"{report.title}  {report.description}", soft_wrap=True)
    console.print(
        f"plain: {show_bytes(report.plain_peak_bytes)}, {show_seconds(report.step_seconds)} a step", soft_wrap=True
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("budget", "peak", "of plain", "time", "bound", ""):
        table.add_column(name, justify="left" if not name else "right", no_wrap=True)
    highest = max((p[2] for p in report.points), default=0.0) or 1.0
    seconds = report.step_seconds
    block = "█" if draws_blocks(console) else "#"
    for i, (budget, peak, added, bound) in enumerate(report.points):
        bar = block * round(_BAR * added / highest)
        table.add_row(
            show_bytes(budget),
            show_bytes(peak),
            f"{peak / max(report.plain_peak_bytes, 1):.2f}x",
            show_percent(added, seconds),
            show_percent(bound, seconds),
            f"{bar} knee" if i == report.knee else bar,
            style="bold" if i == report.knee else "",
        )
    console.print(table)
    budget, _, added, _ = report.points[report.knee]
    console.print(
        f"At the knee: budget={budget} ({show_bytes(budget)}), {show_percent(added, seconds)} time. Below it each byte costs more "
        "than above it."
    )


def render_frontier(report: FrontierReport, *, width: float = 1000, height: float = 380) -> str:
    """The page."""
    left, right, top, bottom = 74.0, width - 30.0, 16.0, height - 44.0
    y_bytes, x_top = nice_bytes(max(p[1] for p in report.points))
    percents = [100 * p[2] / max(report.step_seconds, 1e-12) for p in report.points]
    bounds = [100 * p[3] / max(report.step_seconds, 1e-12) for p in report.points]
    steps = nice_steps(max(*percents, 1.0), 5)
    if steps[-1] < max(percents):
        steps.append(steps[-1] + steps[1])
    y_top = steps[-1]

    def x(value: float) -> float:
        return left + (right - left) * value / x_top

    def y(value: float) -> float:
        return bottom - (bottom - top) * value / y_top

    def line(values: list[float]) -> str:
        places = [f"{x(p[1]):.1f},{y(v):.1f}" for p, v in zip(report.points, values, strict=True)]
        return "M" + "L".join(places)

    return render(
        "frontier.html",
        r=report,
        width=width,
        height=height,
        left=left,
        right=right,
        top=top,
        bottom=bottom,
        x_ticks=[Tick(at=x(b), label=show_bytes(b)) for b in y_bytes],
        y_ticks=[Tick(at=y(s), label=f"{s:g} %") for s in steps],
        line=line(percents),
        bound=line(bounds),
        dots=[(x(p[1]), y(v), i == report.knee) for i, (p, v) in enumerate(zip(report.points, percents, strict=True))],
    )
