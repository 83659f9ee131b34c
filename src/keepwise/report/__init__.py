"""What is said about a plan: one data model, shown on a terminal, as an HTML page and as a trace.

Start with `model.py` (the data), then `build.py`. The room needs the `ir` only; everything else is passed in.
"""

from __future__ import annotations

from keepwise.report.build import build_report
from keepwise.report.html import render_html
from keepwise.report.model import Measured, Proof, Report
from keepwise.report.terminal import print_report
from keepwise.report.trace import render_trace

__all__ = ["Measured", "Proof", "Report", "build_report", "print_report", "render_html", "render_trace"]
