"""A report as one HTML page that needs nothing else: styles, drawings and data are inside, no network, no library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keepwise._units import show_bytes
from keepwise.report.drawing import chart_of
from keepwise.report.folding import VIEWS
from keepwise.report.model import KINDS, Report
from keepwise.report.words import show_percent, show_seconds

TEMPLATES = Path(__file__).with_name("templates")

NAMES = {"keep": "kept", "recompute": "recomputed", "pack": "packed", "offload": "offloaded"}

COLOURS = {
    "parameters": "static-1",
    "gradients": "static-2",
    "optimizer state": "static-3",
    "buffers and inputs": "static-4",
    "other static": "static-4",
    "activations kept": "kept",
    "activations replayed": "replayed",
    "copies and generator states": "replayed-2",
    "temporaries": "temporary",
    "kernel workspaces": "temporary-2",
}
"""Row of the peak -> CSS class: greys for what no plan can reduce."""


def render(template: str, **values: Any) -> str:
    """Fill one of the templates; everything that is filled in is escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters.update(bytes=show_bytes, seconds=show_seconds, commas=lambda n: f"{n:,}")
    environment.globals["percent"] = show_percent
    return environment.get_template(template).render(**values)


def render_html(report: Report) -> str:
    """The page."""
    kinds = [k for k in KINDS if report.num_tensors[k] or k in ("keep", "recompute")]
    return render(
        "report.html",
        r=report,
        chart=chart_of(report.curve, report.budget_bytes),
        kinds=kinds,
        names=NAMES,
        colours=COLOURS,
        largest_bar=max((sum(g.nbytes.values()) for g in report.groups), default=1) or 1,
        peak_scale=max(report.plain_peak_bytes, report.peak_bytes, 1),
        views=VIEWS,
        curve={
            "bin": report.curve.bin_seconds,
            "timed": report.curve.timed,
            "plain": report.curve.plain,
            "plan": report.curve.plan,
        },
    )
