"""`keepwise doctor`: a plan looked at with the questions that users have when something is not as they hoped."""

from __future__ import annotations

import dataclasses

import click

from keepwise.cli._common import DONE, NO, Io, reports
from keepwise.cli._diagnosis import Finding, diagnose
from keepwise.cli._planning import budget_option, fit_target, load_plan, prove_target, report_target
from keepwise.cli._target import DEVICE, GRADS, OPTIMIZER, load_target, make_optimizer


@click.command("doctor")
@click.argument("target")
@budget_option("min")
@click.option("--plan", "path", metavar="FILE", help="A plan of yours; without it one is made for --budget.")
@GRADS
@OPTIMIZER
@DEVICE
@reports
def command(
    io: Io, target: str, budget: str, path: str | None, grads: str, optimizer: str | None, device: str | None
) -> int:
    """Why memory hardly drops, why it is slow, why gradients change: which modules and ops, and what to do.

    Exit code 1: the plan, or the plain step itself, does not give the same bits twice.
    """
    with io.progress() as say:
        say(f"building {target}")
        loaded = load_target(target, device)
        made = make_optimizer(optimizer, loaded)
        if path is None:
            plan = fit_target(loaded, budget, say, optimizer=made, grads=grads, on_infeasible="floor")
        else:
            plan = load_plan(path)
            plan.apply(loaded.model)
        proof = prove_target(loaded, plan, say, optimizer=made)[0]
        loaded.step()
        stats = plan.stats
        findings = diagnose(report_target(loaded, plan, proof, None), plan, stats)
    io.data = {
        "command": "doctor",
        "target": target,
        "summary": plan.summary(),
        "findings": [dataclasses.asdict(f) for f in findings],
    }
    io.out.print(plan.summary(), soft_wrap=True)
    for question in dict.fromkeys(f.question for f in findings):
        io.out.print(f"\n{question}", style="bold")
        for finding in findings:
            if finding.question == question:
                _print(io, finding)
    return NO if any(f.serious for f in findings) else DONE


def _print(io: Io, finding: Finding) -> None:
    from rich.padding import Padding
    from rich.text import Text

    io.out.print(Padding(Text(finding.what, style="red" if finding.serious else ""), (0, 0, 0, 2)))
    if finding.remedy:
        io.out.print(Padding(Text.assemble(("try: ", "green"), finding.remedy), (0, 0, 0, 4)))
