"""What the chain says of a plan, against the judge."""

from __future__ import annotations

from msgspec.structs import replace

from keepwise.ir import Step
from keepwise.plan.optimal import plan_floor
from keepwise.plan.optimal.assemble import assemble
from keepwise.plan.optimal.workbench import workbench
from keepwise.simulate import simulate
from tests import steps


def with_copied_leaves(step: Step) -> Step:
    """The same step where forward must copy the norms' weights for replays."""
    storages = tuple(replace(s, copied=s.category.is_static and s.nbytes == 4) for s in step.storages)
    return replace(step, storages=storages)


def test_the_chain_charges_copies_of_leaves_for_segments() -> None:
    """Plans with bytes rounded up fit as they are.

    (What a segment's replay drew is charged beside an inner replay at the very same moment, too: that the chain leaves to the judge.)
    """
    step = with_copied_leaves(steps.gpt_like(8))
    low, high = plan_floor(step).floor_bytes, simulate(step).peak_bytes
    segments = 0
    for view in workbench(step).views:
        for i in range(40):
            budget = low + (high - low) * i // 39
            roots = view.upper.plan(budget)
            if roots is None:
                continue
            segments += sum(len(root.entries) < len(view.model.parts[0].chain.stages) for root in roots)
            assert simulate(step, assemble(view.model, roots)).peak_bytes <= budget
    assert segments > 5
