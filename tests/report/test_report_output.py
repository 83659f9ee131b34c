"""What is printed and written: a page that needs nothing else, a plot in characters, a trace."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from keepwise.report import Measured, Proof, build_report, print_report, render_html, render_trace
from keepwise.report.drawing import chart_of, nice_bytes, nice_steps
from keepwise.report.frontier import FrontierReport, print_frontier, render_frontier
from keepwise.report.plot import plot
from tests.report.plans import made
from tests.steps import accumulated, chain, gpt_like, unet_like

PROOF = Proof(
    text="identical <b>bit for bit</b>",
    identical=True,
    recomputed_identical=True,
    repeatable=True,
    compared=("loss",),
    num_steps=1,
    num_compared=3,
    num_replays_compared=2,
    digests=("00ff",),
)
MEASURED = Measured(
    pairs=3,
    plain_peak_bytes=2000,
    plan_peak_bytes=1000,
    plain_seconds=1.0,
    plan_seconds=1.1,
    ratio=1.1,
    ratio_low=1.05,
    ratio_high=1.2,
)


class Page(HTMLParser):
    """Checks that tags close and collects what a browser would fetch."""

    VOID = frozenset({"meta", "br", "hr", "img", "line", "path", "circle", "link", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []
        self.count: dict[str, int] = {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.fetched += [v for k, v in attrs if k in ("src", "href", "data", "xlink:href") and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def report(step=None, planner="full", **more):
    plan = made(step or gpt_like(4), planner, budget_bytes=2000, notes=("a <script> in a note",), **more)
    return build_report(plan, plain=plan.plain, title="gpt <4>", proof=PROOF, measured=MEASURED)


@pytest.mark.parametrize("step", [gpt_like(4), unet_like(2), accumulated(3, 2), chain(4)])
def test_the_page_stands_alone(step) -> None:
    text = render_html(report(step))
    page = Page(text)
    assert page.fetched == []
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.count["svg"] == 1
    assert len(text) < 1 << 20


def test_the_page_stays_small_for_a_deep_model() -> None:
    text = render_html(report(gpt_like(48)))
    assert len(text) < 1 << 20
    assert Page(text).count["details"] < 20


def test_the_page_escapes_what_it_is_given() -> None:
    text = render_html(report())
    assert "gpt &lt;4&gt;" in text
    assert "a &lt;script&gt; in a note" in text
    assert "<b>bit for bit</b>" not in text


def test_the_page_says_what_checkpointing_reduces() -> None:
    shown = report(gpt_like(3))
    text = render_html(shown)
    reduced = {c.name: c.reduced for c in shown.categories}
    assert reduced["parameters"] == reduced["gradients"] == "no"
    assert reduced["activations kept"] == "yes"
    for name in reduced:
        assert name in text
    assert "badge good" in text


def test_a_page_without_ops() -> None:
    from keepwise.ir import Step

    plan = made(Step(), "none")
    text = render_html(build_report(plan, plain=plan.plain))
    assert Page(text).count.get("svg", 0) == 0


def test_the_chart_stays_inside_its_frame() -> None:
    shown = report()
    chart = chart_of(shown.curve, shown.budget_bytes)
    assert chart is not None
    assert chart.top_bytes >= max(shown.curve.plain)
    heights = [float(n) for n in re.findall(r"V([\d.]+)", chart.plain + chart.plan)]
    assert min(heights) >= chart.top - 0.1
    assert max(heights) <= chart.bottom + 0.1
    widths = [float(n) for n in re.findall(r"H([\d.]+)", chart.plain + chart.plan)]
    assert max(widths) <= chart.right + 0.1


@pytest.mark.parametrize("highest", [1, 7, 1000, 2**20, 1069 * 2**20, 23 * 2**30])
def test_axis_labels_are_few_and_cover_the_data(highest: int) -> None:
    values, top = nice_bytes(highest)
    assert 2 <= len(values) <= 8
    assert top == values[-1] >= highest
    assert nice_steps(float(highest), 5)[-1] <= highest * 1.001


def test_the_terminal_shows_all_parts() -> None:
    out = io.StringIO()
    print_report(report(), Console(file=out, width=120))
    text = out.getvalue()
    for part in ("gpt <4>", "all", "Memory at the peak", "░", "█", "budget", "a <script> in a note", "Proof", "1.100x"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120


def test_both_say_what_the_predicted_time_is_made_of() -> None:
    for planner, said in (("full", True), ("none", False)):
        found = report(planner=planner)
        console = Console(file=io.StringIO(), width=110)
        print_report(found, console)
        assert ("Predicted time: replays only." in console.file.getvalue()) is said
        assert ("Predicted time: replays only." in render_html(found)) is said


def test_a_narrow_terminal_has_one_line_a_group() -> None:
    out = io.StringIO()
    shown = report()
    print_report(shown, Console(file=out, width=80))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    table = lines[next(i for i, line in enumerate(lines) if line.startswith("What happens")) :]
    first = next(i for i, line in enumerate(table) if line.strip().startswith("──"))
    last = next(i for i, line in enumerate(table) if line.strip().startswith("all "))
    rows = [line for line in table[first + 1 : last] if line.strip()]
    assert len(rows) == len(shown.groups)


def test_the_terminal_without_unicode() -> None:
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", errors="strict", write_through=True)
    shown = report()
    lines = plot(shown.curve, budget_bytes=shown.budget_bytes, unicode=False)
    out.write("\n".join(lines))
    assert b"#" in raw.getvalue()


def test_the_plot_is_as_high_as_the_curve() -> None:
    shown = report()
    lines = plot(shown.curve, budget_bytes=None, width=40, height=10)
    columns = [line.split("│", 1)[1].ljust(40) for line in lines if "│" in line]
    assert len(columns) == 10
    filled = [sum(row[i] in "█▁▂▃▄▅▆▇░" for row in columns) for i in range(40)]
    assert max(filled) == 10  # the plain peak touches the upper edge
    assert all(columns[-1][i] == "█" for i in range(40 * len(shown.curve.plain) // len(shown.curve.plan) - 1))


def test_the_trace_counts_what_the_simulator_does() -> None:
    plan = made(gpt_like(3), "every:2")
    events = json.loads(render_trace(plan.step, plan.plain, plan.timeline))["traceEvents"]
    planned = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "planned bytes"]
    plain = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["name"] == "plain bytes"]
    assert max(planned) == plan.peak_bytes
    assert max(plain) == plan.plain_peak_bytes
    runs = [e for e in events if e["ph"] == "X"]
    assert len(runs) == len(plan.step.ops) + sum(len(w.ops) for w in plan.schedule.windows)
    seconds = sum(op.seconds for op in plan.step.ops) + plan.added_seconds
    assert sum(e["dur"] for e in runs) == pytest.approx(1e6 * seconds)


def test_a_frontier_is_printed_and_drawn() -> None:
    frontier = FrontierReport(
        title="net",
        description="",
        plain_peak_bytes=1000,
        step_seconds=1.0,
        points=((400, 390, 0.4, 0.35), (700, 700, 0.1, 0.1), (1000, 1000, 0.0, 0.0)),
        knee=1,
    )
    out = io.StringIO()
    print_frontier(frontier, Console(file=out, width=100))
    assert "+40.0 %" in out.getvalue()
    assert "knee" in out.getvalue()
    page = Page(render_frontier(frontier))
    assert page.count["circle"] == 3
    assert page.fetched == []


def test_a_time_far_above_the_prediction_is_said() -> None:
    def printed(ratio: float) -> str:
        plan = made(gpt_like(2), "every:2")
        slow = msgspec.structs.replace(MEASURED, ratio=ratio)
        out = io.StringIO()
        print_report(build_report(plan, plain=plan.plain, measured=slow), Console(file=out, width=200))
        return out.getvalue()

    predicted = made(gpt_like(2), "every:2")
    share = predicted.added_seconds / predicted.step_seconds
    assert "longer than predicted" not in printed(1 + share)
    assert "longer than predicted" in printed(1.1 + 2 * share)
