"""A report on a terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from keepwise._units import show_bytes
from keepwise.report.folding import VIEWS
from keepwise.report.model import Group, Report
from keepwise.report.plot import plot
from keepwise.report.words import show_percent, show_seconds

_WIDE = 100
"""Columns below which numbers of tensors are left out."""
MAX_ROWS = 24
"""Groups that are shown one by one; the rest goes into one row."""


def print_report(report: Report, console: Console) -> None:
    """Print what was planned, why, what it costs, and what was proved and measured."""
    print_headline(report, console)
    if report.num_saved:
        print_groups(report, console)
        print_categories(report, console)
        print_curve(report, console)
    print_notes(report, console)
    print_outcome(report, console)


def print_headline(report: Report, console: Console) -> None:
    """The target, the one-line summary, and how planning ended."""
    if report.title:
        console.print(Text.assemble((report.title, "bold"), f"  {report.description}"))
    if report.num_saved:
        console.print(
            Text(
                f"one step: {report.num_ops} ops in {show_seconds(report.step_seconds)} on {report.device}; backward reads "
                f"{report.num_saved} activations, {show_bytes(sum(report.nbytes.values()))}"
            )
        )
    console.print()
    console.print(Text(report.headline, style="bold green" if report.status != "INFEASIBLE" else "bold red"))
    console.print(Text(report.status_text))
    if report.time_text:
        console.print(Text(f"Predicted time: {report.time_text}.", style="dim"))


def print_groups(report: Report, console: Console) -> None:
    """One row for blocks that are alike."""
    kinds = [("keep", "kept"), ("recompute", "recomputed"), ("pack", "packed"), ("offload", "offloaded")]
    kinds = [(k, name) for k, name in kinds if report.num_tensors[k] or k in ("keep", "recompute")]
    table = Table(
        title="What happens to the activations",
        title_justify="left",
        title_style="bold",
        pad_edge=False,
        box=SIMPLE_HEAD,
    )
    narrow = console.width < _WIDE
    shown, rest = _worth_showing(report.groups)
    labels = [_end_of(f"{g.name} x{g.count}" if g.count > 1 else g.name, 24 if narrow else 34) for g in shown]
    table.add_column("blocks", no_wrap=True)
    for _, name in kinds:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("adds", justify="right", no_wrap=True)
    table.add_column("runs again, or why not" if narrow else "what runs again, or why not", overflow="fold")
    used = max(map(len, labels), default=0) + (13 if narrow else 17) * len(kinds) + 14
    room = max(console.width - used, 20)

    def cells(counts: Mapping[str, int], nbytes: Mapping[str, int], seconds: float) -> list[Text | str]:
        found: list[Text | str] = [_tensors(counts[k], nbytes[k], with_count=not narrow) for k, _ in kinds]
        return [*found, show_seconds(seconds)]

    for label, group in zip(labels, shown, strict=True):
        table.add_row(
            label, *cells(group.num_tensors, group.nbytes, group.replay_seconds), Text(_cut(_story(group), room))
        )
    if rest:
        counts = {k: sum(g.num_tensors[k] for g in rest) for k, _ in kinds}
        nbytes = {k: sum(g.nbytes[k] for g in rest) for k, _ in kinds}
        table.add_row(
            Text(f"{len(rest)} more", style="dim"),
            *cells(counts, nbytes, sum(g.replay_seconds for g in rest)),
            Text("all are in --report", style="dim"),
        )
    share = show_percent(report.replay_seconds, report.step_seconds)
    table.add_section()
    table.add_row(
        "all",
        *cells(report.num_tensors, report.nbytes, report.replay_seconds),
        Text(share if narrow else f"{share} of the step, in {report.num_replays} replays"),
        style="bold",
    )
    console.print()
    console.print(table)


def _worth_showing(groups: tuple[Group, ...]) -> tuple[list[Group], list[Group]]:
    if len(groups) <= MAX_ROWS:
        return list(groups), []
    weight = sorted(groups, key=lambda g: -sum(g.nbytes.values()))
    chosen = set(map(id, weight[: MAX_ROWS - 1]))
    return [g for g in groups if id(g) in chosen], [g for g in groups if id(g) not in chosen]


def _end_of(name: str, width: int = 34) -> Text:
    """The end of a long path: what tells it from its neighbours."""
    return Text(name if len(name) <= width else "..." + name[3 - width :])


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def _tensors(count: int, nbytes: int, *, with_count: bool) -> Text:
    if not count:
        return Text("-", style="dim")
    return Text(f"{show_bytes(nbytes)} ({count})" if with_count else show_bytes(nbytes))


def _story(group: Group) -> str:
    again = [r for r in group.replayed if r[0] != VIEWS]
    if again:
        names = [f"{op} x{times}" if times > 1 else op for op, times, _ in again[:4]]
        more = len(again) - 4
        return ", ".join(names) + (f", {more} more" if more > 0 else "")
    return group.reasons[0][0] if group.reasons else ""


def print_categories(report: Report, console: Console) -> None:
    """What the bytes at the peak are, before and after."""
    table = Table(title="Memory at the peak", title_justify="left", title_style="bold", pad_edge=False, box=SIMPLE_HEAD)
    table.add_column("")
    table.add_column("plain", justify="right", no_wrap=True)
    table.add_column("planned", justify="right", no_wrap=True)
    table.add_column("reduced by checkpointing?")
    for row in report.categories:
        table.add_row(
            row.name,
            show_bytes(row.plain_bytes) if row.plain_bytes else Text("-", style="dim"),
            show_bytes(row.plan_bytes) if row.plan_bytes else Text("-", style="dim"),
            Text.assemble(row.reduced, (f": {row.note}", "dim")),
        )
    table.add_section()
    table.add_row("all", show_bytes(report.plain_peak_bytes), show_bytes(report.peak_bytes), "", style="bold")
    console.print()
    console.print(table)
    console.print(Text(f"plain: highest in {report.plain_peak_at}", style="dim"))
    console.print(Text(f"planned: highest in {report.plan_peak_at}", style="dim"))


def print_curve(report: Report, console: Console) -> None:
    """Memory over the step."""
    lines = plot(
        report.curve,
        budget_bytes=report.budget_bytes,
        width=max(min(console.width - 14, 84), 20),
        unicode=draws_blocks(console),
    )
    if lines:
        console.print()
        console.print(Text("Memory over the step (predicted)", style="bold"))
        for line in lines:
            console.print(Text(line, no_wrap=True, overflow="ignore"), soft_wrap=True)


def draws_blocks(console: Console) -> bool:
    """Whether the console can show the characters that plots are made of."""
    try:
        "█░┄▁│└─".encode(console.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def print_notes(report: Report, console: Console) -> None:
    """What a user should know about the step."""
    if report.notes:
        console.print()
    for note in report.notes:
        console.print(Padding(Text.assemble(("note: ", "yellow"), note), (0, 0)))


def print_outcome(report: Report, console: Console) -> None:
    """Proof and measurement, where there are any."""
    if report.proof is not None:
        proof = report.proof
        good = proof.recomputed_identical and proof.identical is not False
        console.print()
        console.print(
            Text.assemble(("Proof: ", "bold"), (proof.text, "green" if good and proof.identical else "bold red"))
            if not good or proof.identical
            else Text.assemble(("Proof: ", "bold"), (proof.text, "yellow"))
        )
    if report.measured is not None:
        m = report.measured
        pairs = "1 pair" if m.pairs == 1 else f"{m.pairs} pairs"
        off = show_percent(m.plan_peak_bytes - report.peak_bytes, report.peak_bytes)
        console.print(
            Text.assemble(
                ("Measured: ", "bold"),
                f"peak {show_bytes(m.plain_peak_bytes)} -> {show_bytes(m.plan_peak_bytes)} ({off} against the prediction); "
                f"step {show_seconds(m.plain_seconds)} -> {show_seconds(m.plan_seconds)}, {m.ratio:.3f}x "
                f"(quartiles {m.ratio_low:.3f}-{m.ratio_high:.3f}, {pairs} in turn)",
            )
        )
        _explain_slowness(report, console)


def _explain_slowness(report: Report, console: Console) -> None:
    """A word where the measured time is far above the predicted one."""
    m, seconds = report.measured, max(report.step_seconds, 1e-12)
    if m is None or m.ratio - 1 < 2 * report.added_seconds / seconds + 0.05:
        return
    small = 1e6 * m.plain_seconds / max(report.num_ops, 1)
    why = (
        f": an op of this step takes {small:.0f} us on average, so that starting an op costs as much as the op. Larger batches "
        "are predicted better"
        if small < 100
        else ": is the machine busy? More --pairs, and `keepwise bench`, tell more"
    )
    text = f"note: the replays take longer than predicted ({show_percent(report.added_seconds, seconds)}){why}"
    console.print(Text(text, style="yellow"))
