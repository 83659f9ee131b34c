"""A recorded step planned again: for another budget, or with the prices of a machine that is not here. No model is needed."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace

from keepwise._errors import UsageError
from keepwise._units import show_bytes
from keepwise.cost import DeviceProfile, on_device
from keepwise.session.budget import is_word, parse_budget
from keepwise.session.device import auto_budget, device_bytes
from keepwise.session.document import PlanDocument
from keepwise.session.overheads import Overheads, overheads_of
from keepwise.session.planning import decided, plan_step
from keepwise.session.status import Status
from keepwise.simulate import simulate


def replan(
    document: PlanDocument, budget: int | float | str, *, device: DeviceProfile | None, planner: Any, on_infeasible: str
) -> PlanDocument:
    """Plan the step of a document again.

    Args:
        document: of a plan that `fit` made.
        budget: as for `fit`; percentages and `"auto"` refer to `device`, if one is given.
        device: prices every op by that machine's roofline; None: the prices that were measured when the step was recorded.
        planner: as for `fit`.
        on_infeasible: as for `fit`.

    Returns:
        The document of the new plan. Views whose replay was compared with its original stay proven; where the new plan drops
        others, its first steps are audited.

    Raises:
        InfeasibleBudget: no plan fits.
        UsageError: the document holds no step, or a bad argument.
    """
    if document.status == Status.INERT.name:
        raise UsageError(f"nothing can be planned for this step, whatever the budget: {'; '.join(document.notes)}")
    step = document.step if device is None else on_device(document.step, device)
    plain = simulate(step)
    if device is not None:
        memory, auto = device.memory_bytes, device.usable_bytes
    else:
        where = torch.device(step.device)
        if where.type == "cuda" and not torch.cuda.is_available() and (is_word(budget, "auto") or "%" in str(budget)):
            raise UsageError(f"budget {budget!r} refers to {where}, which is not here: write bytes, or name a device")
        where = where if where.type != "cuda" or torch.cuda.is_available() else torch.device("cpu")
        memory, (auto, _) = device_bytes(where), auto_budget(where, plain.static_bytes)
    limit = parse_budget(
        budget, plain_peak_bytes=plain.peak_bytes, floor_bytes=None, device_bytes=memory, auto_bytes=auto
    )
    wants_floor = is_word(budget, "min")
    step, planned = plan_step(
        step,
        planner,
        packs=not any(op.unpacks for op in step.ops),
        forced=frozenset(),
        budget_bytes=limit,
        on_infeasible=on_infeasible,
        want_floor=wants_floor,
        progress=None,
    )
    note = "planned again from the recorded step" + (
        f", with the prices of {device.name} ({show_bytes(device.memory_bytes)}) by its roofline: compare plans with them, not clocks"
        if device is not None
        else ""
    )
    return replace(
        document,
        **decided(step, planned, budget, limit, Overheads() if device is not None else overheads_of(planned.timeline)),
        scales=document.restarts and planner == "auto",
        notes=(*document.notes, *(n for n in (note, *planned.notes) if n not in document.notes)),
        variants=tuple(
            replan(
                v,
                budget if limit is None or wants_floor else limit,
                device=device,
                planner=planner,
                on_infeasible=on_infeasible,
            )
            for v in document.variants
        ),
    )
