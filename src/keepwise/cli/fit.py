"""`keepwise fit`: plan a target's step, prove it, measure it, and say what was done."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from keepwise._errors import UsageError
from keepwise.cli._common import DONE, NO, Io, check_writable, reports
from keepwise.cli._planning import (
    PLANNER,
    budget_option,
    fit_target,
    load_plan,
    measure_target,
    prove_target,
    report_target,
)
from keepwise.cli._target import DEVICE, GRADS, OPTIMIZER, load_target, make_optimizer
from keepwise.report.model import Report

if TYPE_CHECKING:
    from keepwise.session.plan import Plan


@click.command("fit")
@click.argument("target", required=False)
@budget_option("auto")
@click.option("--list", "list_only", is_flag=True, help="Print the built-in targets.")
@click.option("--save", metavar="FILE", help="Write the plan as JSON.")
@click.option("--report", metavar="FILE", help="Write an HTML page that needs no network.")
@click.option("--trace", metavar="FILE", help="Write a trace for chrome://tracing or Perfetto.")
@PLANNER
@GRADS
@OPTIMIZER
@click.option(
    "--on-infeasible",
    type=click.Choice(["raise", "floor"]),
    default="raise",
    show_default=True,
    help="Where nothing fits: stop, or show the plan with the smallest peak.",
)
@click.option(
    "--pin",
    "pins",
    multiple=True,
    metavar="PATTERN=ACTION",
    help="A decision of yours: 'h.*.attn=keep' or 'h.*.mlp=recompute'.",
)
@click.option("--cache", metavar="FOLDER", help="Reuse a plan from there, or put it there.")
@click.option("--verify/--no-verify", "verify", default=True, help="Prove on real steps that nothing else changed.")
@click.option("--measure/--no-measure", "measure", default=True, help="Measure the plain and the planned step in turn.")
@click.option("--pairs", type=click.IntRange(1), default=3, show_default=True, help="Pairs of steps to measure.")
@DEVICE
@click.option(
    "--on",
    "machine",
    metavar="MACHINE",
    help="With a plan file as TARGET: the prices of another machine (h100, a100, ..., or a profile.json that `keepwise env` wrote).",
)
@click.option("--force", is_flag=True, help="Overwrite files.")
@reports
def command(
    io: Io,
    target: str | None,
    budget: str,
    list_only: bool,
    save: str | None,
    report: str | None,
    trace: str | None,
    planner: str,
    grads: str,
    optimizer: str | None,
    on_infeasible: str,
    pins: tuple[str, ...],
    cache: str | None,
    verify: bool,
    measure: bool,
    pairs: int,
    device: str | None,
    machine: str | None,
    force: bool,
) -> int:
    """Make the training step of TARGET fit a memory budget at the least cost in time.

    TARGET is file.py:function or package.module:function, or a name that --list prints. The function takes no argument and
    returns (model, args), (model, args, kwargs) or (model, args, kwargs, loss).

    A plan.json that --save wrote is a TARGET, too: its recorded step is planned again for another budget, or for a machine that is not
    here (--on), without the model.
    """
    if list_only:
        return _list(io)
    if target is None:
        raise UsageError(
            "name a TARGET: file.py:function, package.module:function, or one that `keepwise fit --list` prints"
        )
    for path in (save, report, trace):
        check_writable(path, force=force)
    if target.endswith(".json"):
        return _again(io, target, budget, machine, planner, on_infeasible, save=save, report=report, trace=trace)
    if machine is not None:
        raise UsageError("--on needs a plan file as TARGET: save one with `keepwise fit TARGET --save plan.json` first")
    pin = _pins(pins)
    with io.progress() as say:
        say(f"building {target}")
        loaded = load_target(target, device)
        made = make_optimizer(optimizer, loaded, rate=1e-6)
        plan = fit_target(
            loaded,
            budget,
            say,
            optimizer=made,
            grads=grads,
            planner=planner,
            pin=pin,
            on_infeasible=on_infeasible,
            cache=cache,
            verify=verify,
        )
        inert = plan.status.name == "INERT"
        proof = plan.proof  # of the very step that was planned; a plan from the cache has none
        if verify and not inert and proof is None:
            proof = prove_target(loaded, plan, say, optimizer=made)[0]
        measured = (
            measure_target(loaded, plan, say, optimizer=made, grads=grads, pairs=pairs)
            if measure and not inert
            else None
        )
        found = report_target(loaded, plan, proof, measured)
    call = _call(budget, loss=loaded.loss is not None, optimizer=made is not None, grads=grads)
    _show(io, found, target=target, budget=budget, call=call, save=save, report=report)
    _write(io, plan, found, save=save, report=report, trace=trace)
    return _answer(found)


def _write(io: Io, plan: Plan, found: Report, *, save: str | None, report: str | None, trace: str | None) -> None:
    """The files that were asked for."""
    if save is not None and io.speaks:
        plan.save(save, force=True)
        io.err.print(f"wrote {save}", style="dim")
    if report is not None:
        from keepwise.report import render_html

        io.write(report, render_html(found))
    if trace is not None:
        from keepwise.report import render_trace
        from keepwise.simulate import simulate

        io.write(trace, render_trace(plan.step, simulate(plan.step), plan.timeline))


def _again(
    io: Io,
    target: str,
    budget: str,
    machine: str | None,
    planner: str,
    on_infeasible: str,
    *,
    save: str | None,
    report: str | None,
    trace: str | None,
) -> int:
    """Plan the step in a plan file again."""
    import msgspec

    from keepwise.report import build_report, print_report
    from keepwise.simulate import simulate

    with io.progress() as say:
        say("solving for the fastest step that fits")
        plan = load_plan(target).replan(budget, device=machine, planner=planner, on_infeasible=on_infeasible)
        found = build_report(plan, plain=simulate(plan.step), title=plan.document.fingerprint.model)
    io.data = {"command": "fit", "target": target, **msgspec.to_builtins(found)}
    print_report(found, io.out)
    if save is not None:
        io.out.print()
        io.out.print("In your code, before the training loop:", style="bold")
        io.out.print(f"    keepwise.Plan.load({save!r}).apply(model)", soft_wrap=True)
    _write(io, plan, found, save=save, report=report, trace=trace)
    return _answer(found)


def _list(io: Io) -> int:
    from keepwise import targets

    rows = {name: targets.describe(name) for name in targets.names()}
    io.data = {"targets": [{"name": name, "description": text} for name, text in rows.items()]}
    width = max(map(len, rows))
    for name, text in rows.items():
        io.out.print(f"{name:<{width}}  {text}", soft_wrap=True)
    return DONE


def _pins(pins: tuple[str, ...]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for pin in pins:
        pattern, equals, action = pin.rpartition("=")
        if not equals or not pattern:
            raise UsageError(f"--pin {pin!r}: write PATTERN=keep or PATTERN=recompute, for example 'h.*.attn=keep'")
        found[pattern] = action
    return found or None


def _call(budget: str, *, loss: bool, optimizer: bool, grads: str) -> str:
    """The same as a line of Python."""
    options = [f"budget={budget!r}", *["loss=loss"] * loss, *["optimizer=optimizer"] * optimizer]
    if grads != "held":
        options.append(f"grads={grads!r}")
    return f"keepwise.fit(model, batch, {', '.join(options)})"


def _show(io: Io, found: Report, *, target: str, budget: str, call: str, save: str | None, report: str | None) -> None:
    import msgspec

    from keepwise.report import print_report

    io.data = {"command": "fit", "target": target, **msgspec.to_builtins(found)}
    print_report(found, io.out)
    if found.status == "INERT" or not found.num_saved:
        return
    io.out.print()
    io.out.print("In your code, before the training loop:", style="bold")
    io.out.print(f"    {call}", soft_wrap=True)
    if report is None:
        io.out.print(f"The whole report: keepwise fit {target} --budget {budget} --report report.html", soft_wrap=True)
    if save is None:
        io.out.print(
            "One module's tensors: add --save plan.json, then keepwise explain plan.json MODULE", soft_wrap=True
        )


def _answer(found: Report) -> int:
    """Whether it fits, and nothing speaks against it."""
    if found.status == "INFEASIBLE" or (found.status == "INERT" and os.environ.get("KEEPWISE") != "0"):
        return NO
    proof = found.proof
    return NO if proof is not None and (not proof.recomputed_identical or proof.identical is False) else DONE
