"""Which moment and which tensors make a peak, in words."""

from __future__ import annotations

from keepwise.ir import Step
from keepwise.simulate import Timeline

MAX_NAMED = 5


def describe_peak(step: Step, timeline: Timeline) -> str:
    """The peak's moment, its op, and the largest of what is alive, in one sentence."""
    moment = timeline.peak_moment
    if moment < 0:
        return "the step has no ops"
    op = step.ops[moment]
    where = f"{op.phase} op {moment} ({op.target}{' in ' + op.path if op.path else ''})"
    if timeline.peak_window >= 0:
        window = timeline.schedule.windows[timeline.peak_window] if timeline.schedule else None
        where = f"the replay{' of ' + window.path if window and window.path else ''} before {where}"
    statics = timeline.static_bytes
    parts = []
    for live in timeline.at_peak:
        if not 0 <= live.id < len(step.storages) or live.kind in ("workspace", "rng", "copy", "outside"):
            continue
        storage = step.storages[live.id]
        if storage.category.is_static:
            continue
        birth = step.ops[storage.birth] if storage.birth >= 0 else None
        origin = (
            f"{birth.target}{' in ' + birth.path if birth.path else ''}"
            if birth
            else storage.name or str(storage.category)
        )
        parts.append(f"{origin} {live.nbytes / 2**20:.1f} MiB")
        if len(parts) == MAX_NAMED:
            break
    named = "; ".join(parts)
    return (
        f"{timeline.peak_bytes / 2**20:.1f} MiB at {where}: {statics / 2**20:.1f} MiB of parameters, gradients, buffers and inputs"
        f"{', then ' + named if named else ''}"
    )
