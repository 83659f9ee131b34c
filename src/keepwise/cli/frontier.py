"""`keepwise frontier`: the time that each budget costs."""

from __future__ import annotations

import dataclasses

import click

from keepwise.cli._common import DONE, Io, check_writable, reports
from keepwise.cli._target import DEVICE, GRADS, OPTIMIZER, load_target, make_optimizer
from keepwise.report.frontier import FrontierReport, print_frontier, render_frontier


@click.command("frontier")
@click.argument("target")
@click.option(
    "--points", type=click.IntRange(2), default=20, show_default=True, help="Budgets from the floor to the plain peak."
)
@click.option("--report", metavar="FILE", help="Write an HTML page that needs no network.")
@GRADS
@click.option(
    "--in-flight",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Micro-batches whose forward runs before the first backward, as on a stage of a pipeline.",
)
@OPTIMIZER
@DEVICE
@click.option("--force", is_flag=True, help="Overwrite files.")
@reports
def command(
    io: Io,
    target: str,
    points: int,
    report: str | None,
    grads: str,
    in_flight: int,
    optimizer: str | None,
    device: str | None,
    force: bool,
) -> int:
    """Plan TARGET's step for many budgets; nothing is applied and nothing is trained."""
    import keepwise

    check_writable(report, force=force)
    with io.progress() as say:
        say(f"building {target}")
        loaded = load_target(target, device)
        found = keepwise.frontier(
            loaded.model,
            loaded.args,
            loaded.kwargs,
            points=points,
            loss=loaded.loss,
            optimizer=make_optimizer(optimizer, loaded),
            grads=grads,
            in_flight=in_flight,
            progress=say,
        )
    knee = found.knee
    shown = FrontierReport(
        title=loaded.name,
        description=loaded.description,
        plain_peak_bytes=found.plain_peak_bytes,
        step_seconds=found.step_seconds,
        points=tuple((p.budget_bytes, p.peak_bytes, p.added_seconds, p.bound_seconds) for p in found.points),
        knee=found.points.index(knee),
    )
    io.data = {
        "command": "frontier",
        "target": target,
        "in_flight": in_flight,
        "plain_peak_bytes": found.plain_peak_bytes,
        "step_seconds": found.step_seconds,
        "points": [dataclasses.asdict(p) for p in found.points],
        "knee": dataclasses.asdict(knee),
    }
    print_frontier(shown, io.out)
    if report is not None:
        io.write(report, render_frontier(shown))
    return DONE
