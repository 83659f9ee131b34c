"""`keepwise explain`: why each tensor of a module is kept, recomputed, packed or offloaded."""

from __future__ import annotations

import dataclasses

import click

from keepwise._units import show_bytes
from keepwise.cli._common import DONE, Io, reports
from keepwise.cli._planning import load_plan

_VERBS = {"keep": "kept", "recompute": "recomputed", "pack": "packed", "offload": "offloaded"}


@click.command("explain")
@click.argument("plan")
@click.argument("module", default="")
@reports
def command(io: Io, plan: str, module: str) -> int:
    """Why each tensor of MODULE is kept, recomputed, packed or offloaded in PLAN, a file that `keepwise fit --save` wrote.

    Each has two prices: the bytes that it holds, and the time to make it again; beside them stands what a GiB is worth at the
    plan's budget.

    MODULE is a path such as transformer.h.3.mlp, or a pattern such as 'transformer.h.*.mlp'; without it, the whole model.
    """
    loaded = load_plan(plan)
    text = loaded.explain(module)  # Raises for a module that saves nothing.
    found = loaded.decisions_in(module)
    sums = {
        kind: (sum(d.kind == kind for d in found), sum(d.nbytes for d in found if d.kind == kind)) for kind in _VERBS
    }
    io.data = {
        "command": "explain",
        "plan": plan,
        "module": module,
        "summary": loaded.summary(),
        "memory_price": loaded.memory_price,
        "decisions": [{"kind": d.kind, **dataclasses.asdict(d), "seconds_per_gib": d.seconds_per_gib} for d in found],
    }
    io.out.print(loaded.summary(), soft_wrap=True)
    parts = [f"{n} {_VERBS[kind]} ({show_bytes(b)})" for kind, (n, b) in sums.items() if n]
    io.out.print(f"{module or 'the whole model'}: {', '.join(parts)}", style="bold", soft_wrap=True)
    io.out.print()
    io.out.print(text, soft_wrap=True)
    return DONE
