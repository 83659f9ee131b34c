"""`keepwise bench`: the stock checkpointing policies and Keepwise on one step, side by side in one run.

All run in one process and in turn (A B C A B C ...), so that a slow minute of the machine falls on all of them; a ratio compares
two runs of one round. Bits are compared after one step from one state: loss, gradients, buffers, parameters, generators.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from keepwise._errors import InfeasibleBudget, UsageError
from keepwise._units import show_bytes
from keepwise.cli._common import DONE, NO, Io, reports
from keepwise.cli._planning import fit_target
from keepwise.cli._progress import Progress
from keepwise.cli._target import DEVICE, load_target, whole_step
from keepwise.report.words import show_seconds
from keepwise.targets import Target

if TYPE_CHECKING:
    from keepwise.cli._measured import Peak, Setting
    from keepwise.proof.proof import Observation


@dataclasses.dataclass(slots=True, kw_only=True)
class Row:
    """One policy, or Keepwise at one budget."""

    name: str
    target: Target
    setting: Setting | None
    """None: it does not run, see `failure`."""
    ours: bool = False
    predicted_bytes: int | None = None
    failure: str = ""
    peak: Peak | None = None
    seconds: float | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    difference: str = ""
    """First thing that differs from the plain step; empty: identical."""


@click.command("bench")
@click.argument("target")
@click.option(
    "--budget", "budgets", multiple=True, metavar="SIZE", help="Budget for Keepwise; may be repeated. [default: 0.6x]"
)
@click.option(
    "--against",
    default="none,full,every2,sac",
    show_default=True,
    metavar="NAMES",
    help="Of none, full, every2, sac, sac2, compile, compile:0.5.",
)
@click.option("--pairs", type=click.IntRange(1), default=9, show_default=True, help="Rounds that are timed.")
@DEVICE
@reports
def command(io: Io, target: str, budgets: tuple[str, ...], against: str, pairs: int, device: str | None) -> int:
    """Measure TARGET's step plain, under stock policies and under Keepwise: peak, time, and whether it is still the same step."""
    policies = list(dict.fromkeys(["none", *(name.strip() for name in against.split(",") if name.strip())]))
    with io.progress() as say, contextlib.ExitStack() as stack:
        say(f"building {target}")
        loaded = load_target(target, device)
        _check(policies, budgets)
        rows = [_stock(name, loaded, stack) for name in policies]
        rows += [_ours(budget, loaded, say) for budget in budgets or ("0.6x",)]
        repeatable = _measure(rows, pairs, say)
    _print(io, loaded, rows, pairs, repeatable)
    io.data = {
        "command": "bench",
        "target": target,
        "pairs": pairs,
        "repeatable": repeatable,
        "rows": [_plain(row, repeatable) for row in rows],
    }
    bad = any(row.ours and (row.failure or (repeatable and row.difference)) for row in rows)
    return NO if bad else DONE


def _check(policies: list[str], budgets: tuple[str, ...]) -> None:
    from keepwise.integrations.stock import POLICIES
    from keepwise.session.budget import check_budget

    for name in policies:
        if name.partition(":")[0] not in (*POLICIES, "sac", "sac2"):
            raise UsageError(f"--against {name!r}: there are {', '.join(POLICIES)}, sac, sac2 and compile:0.5")
    for budget in budgets:
        check_budget(budget)


def _stock(name: str, target: Target, stack: contextlib.ExitStack) -> Row:
    from keepwise.cli._measured import plainly
    from keepwise.integrations.stock import apply_stock

    if name == "none":
        return Row(name=name, target=target, setting=plainly)
    if name.startswith("compile"):
        # Compiled code belongs to one model in one state: it gets a copy, which stays compiled for the whole run.
        target = dataclasses.replace(target, model=copy.deepcopy(target.model))
        stack.enter_context(apply_stock(target.model, name))
        return Row(name=name, target=target, setting=plainly)
    return Row(name=name, target=target, setting=lambda: apply_stock(target.model, name, blocks=target.blocks))


def _ours(budget: str, target: Target, say: Progress) -> Row:
    name = f"keepwise {budget}"
    try:
        plan = fit_target(target, budget, say)
    except InfeasibleBudget as error:
        failure = f"does not fit: the smallest peak is {show_bytes(error.floor_bytes)}"
        return Row(name=name, target=target, setting=None, ours=True, failure=failure)
    plan.remove()

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        plan.apply(target.model)
        try:
            yield
        finally:
            plan.remove()

    return Row(name=name, target=target, setting=applied, ours=True, predicted_bytes=plan.peak_bytes)


def _measure(rows: list[Row], pairs: int, say: Progress) -> bool:
    """Fill the rows in; returns whether the plain step repeats itself bit for bit."""
    from keepwise.cli._measured import in_turn, step_peak

    reference = outcome(rows[0])
    repeatable = not reference.difference(outcome(rows[0]))
    for row in rows:
        if row.setting is None:
            continue
        say(f"{row.name}: bits and peak")
        try:
            row.difference = reference.difference(outcome(row))
            step = whole_step(row.target, None)
            with row.setting():
                row.peak = step_peak(step, row.target.model)
        except Exception as error:
            if row is rows[0]:
                raise
            # A policy that this model does not run under is a result of the comparison.
            row.failure = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
            row.setting = None
    running = {row.name: (whole_step(row.target, None), row.setting) for row in rows if row.setting is not None}
    times = in_turn(running, pairs, tell=lambda done: say(f"{pairs} rounds of {len(running)} steps", done))
    for row in rows:
        if row.name in running:
            row.seconds = sorted(times.seconds[row.name])[pairs // 2]
            row.ratio = times.ratio(row.name)
            row.ratio_low, row.ratio_high = times.ratio_quartiles(row.name)
    return repeatable


def outcome(row: Row) -> Observation:
    """Digests of what one step from the model's state leaves behind; the model is left as it was."""
    import torch

    from keepwise.proof.proof import observe
    from keepwise.trace.saved_state import SavedState

    target, setting = row.target, row.setting
    assert setting is not None
    state = SavedState(target.model, (target.args, target.kwargs), None)
    try:
        state.clear_gradients()
        torch.manual_seed(0)
        with setting():
            result = target.step()
        return observe(target.model, result)
    finally:
        state.restore()


def _plain(row: Row, repeatable: bool) -> dict[str, Any]:
    return {
        "name": row.name,
        "peak_bytes": row.peak.total_bytes if row.peak else None,
        "above_static_bytes": row.peak.above_bytes if row.peak else None,
        "static_bytes": row.peak.static_bytes if row.peak else None,
        "predicted_peak_bytes": row.predicted_bytes,
        "seconds": row.seconds,
        "ratio": row.ratio,
        "ratio_low": row.ratio_low,
        "ratio_high": row.ratio_high,
        "identical": None if row.setting is None or not repeatable else not row.difference,
        "difference": row.difference,
        "failure": row.failure,
    }


def _print(io: Io, target: Target, rows: list[Row], pairs: int, repeatable: bool) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    io.out.print(f"{target.name}  {target.description}", soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "peak", "above static", "step", "time", "quartiles", "the same step, bit for bit"):
        table.add_column(
            name,
            justify="left" if not name or name.startswith("the") else "right",
            no_wrap=name != "the same step, bit for bit",
        )
    for row in rows:
        same = f"no: {row.difference}" if row.difference else "yes"
        if row.failure:
            table.add_row(row.name, "-", "-", "-", "-", "-", Text(row.failure, style="yellow"))
            continue
        assert row.peak is not None
        assert row.seconds is not None
        table.add_row(
            row.name,
            show_bytes(row.peak.total_bytes),
            show_bytes(row.peak.above_bytes),
            show_seconds(row.seconds),
            f"{row.ratio:.3f}x",
            f"{row.ratio_low:.3f}-{row.ratio_high:.3f}",
            Text(same if repeatable else "no verdict", style="" if same == "yes" else "red"),
            style="bold" if row.ours else "",
        )
    io.out.print(table)
    if not repeatable:
        io.out.print("The plain step differs from itself: there is no verdict on bits.", style="yellow")
    io.out.print(
        f"One process, {pairs} rounds in turn; time is the median ratio to none in the same round. Peak: highest level of the "
        "allocator, with the static tensors; gradients exist throughout.",
        style="dim",
    )
