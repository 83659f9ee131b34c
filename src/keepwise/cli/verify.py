"""`keepwise verify`: the proof that a plan changes nothing, over any number of training steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from keepwise.cli._common import DONE, NO, Io, reports
from keepwise.cli._planning import budget_option, fit_target, load_plan, proof_for_report, prove_target
from keepwise.cli._target import DEVICE, load_target, make_optimizer

if TYPE_CHECKING:
    from keepwise.proof.proof import Proof

SHOWN = 30
"""Digests that are printed at most; the others are in `--json`."""


@click.command("verify")
@click.argument("target")
@click.option("--plan", "path", metavar="FILE", help="What to prove; without it a plan is made first, for --budget.")
@click.option(
    "--steps", type=click.IntRange(1), default=1, show_default=True, help="Training steps, each on a batch of its own."
)
@budget_option("min")
@click.option(
    "--optimizer",
    default="AdamW",
    show_default=True,
    metavar="NAME",
    help="A class of torch.optim whose step ends each step; none: gradients only.",
)
@click.option("--rate", type=float, default=1e-3, show_default=True, help="Its learning rate.")
@DEVICE
@reports
def command(
    io: Io, target: str, path: str | None, steps: int, budget: str, optimizer: str, rate: float, device: str | None
) -> int:
    """Run the plain steps twice and the planned ones once from the same state, and compare everything bit for bit.

    Exit code 0: identical. 1: not, or the plain step does not repeat itself, so that there is no verdict.
    """
    with io.progress() as say:
        say(f"building {target}")
        loaded = load_target(target, device)
        plan = load_plan(path) if path is not None else None
        if plan is None:
            plan = fit_target(loaded, budget, say)
        else:
            plan.apply(loaded.model)  # Another model's plan is refused here.
        made = make_optimizer(optimizer, loaded, rate=rate)
        proof, losses = prove_target(loaded, plan, say, optimizer=made, steps=steps)
    import msgspec

    io.data = {
        "command": "verify",
        "target": target,
        "plan": path,
        "summary": plan.summary(),
        "optimizer": None if made is None else type(made).__name__,
        "losses": losses,
        "first_difference": proof.first_difference,
        **msgspec.to_builtins(proof_for_report(proof)),
    }
    io.out.print(f"{loaded.name}  {loaded.description}", soft_wrap=True)
    io.out.print(plan.summary(), soft_wrap=True)
    _print_digests(io, proof, losses)
    verdict = str(proof)
    style = (
        "bold green" if proof.identical else "bold yellow" if proof.identical is None and proof.holds else "bold red"
    )
    io.out.print(verdict, style=style)
    return DONE if proof.identical and proof.recomputed_identical else NO


def _print_digests(io: Io, proof: Proof, losses: list[float]) -> None:
    """Digest of everything compared after each step; those of the plain run are the same where it is identical."""
    if not proof.digests or proof.num_steps == 1:
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    every = max(1, -(-len(proof.digests) // SHOWN))
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("step", "loss", "digest of the planned step", "equal to plain"):
        table.add_column(name, justify="right" if name in ("step", "loss") else "left")
    equal = "yes" if proof.identical else "no verdict" if proof.identical is None else ""
    for i, digest in enumerate(proof.digests):
        if i % every == 0 or i == len(proof.digests) - 1:
            loss = f"{losses[i]:.5f}" if i < len(losses) else ""
            table.add_row(str(i + 1), loss, digest, equal)
    io.out.print(table)
    if every > 1:
        io.out.print(
            f"every {every}th of {len(proof.digests)} steps is shown; all were compared, all are in --json", style="dim"
        )
