"""What the bytes at the peak of a step are: static tensors by role, activations, temporaries.

A block that a step allocates is counted by what becomes of it: one that is a gradient, a parameter, a buffer or optimizer
state at the end has that role; one that was allocated outside backward and is freed in backward, or lives on, is an
activation; all others (buffers inside kernels, gradients on their way, what a backward node recomputes) are temporaries.
"""

from __future__ import annotations

from keepwise.measure.events import AllocatorEvent

ACTIVATION, TEMPORARY = "activation", "temporary"


def peak_by_category(
    events: list[AllocatorEvent], before: dict[int, tuple[str, int]], after: dict[int, tuple[str, int]]
) -> dict[str, int]:
    """Bytes at the peak by category; they add up to `sum of before + peak_of(events)`.

    Args:
        events: of one step, in order of time.
        before: address -> (role, bytes) of static storages when the step begins.
        after: the same when it has ended.
    """
    position = _peak_position(events)
    totals: dict[str, int] = {}
    alive: dict[int, int] = {}
    for role, size in before.values():
        totals[role] = totals.get(role, 0) + size
    for index, event in enumerate(events[:position]):
        if event.delta_bytes > 0:
            alive[event.address] = index
        elif event.address in alive:
            del alive[event.address]
        else:
            # A block from before the step: of a static tensor, or of a tensor that nobody could name.
            role = before.get(event.address, (TEMPORARY, 0))[0]
            totals[role] = totals.get(role, 0) + event.delta_bytes
    frees: dict[int, AllocatorEvent] = {}
    for event in events[position:]:
        if event.delta_bytes < 0:
            frees.setdefault(event.address, event)
    for address, index in alive.items():
        free = frees.get(address)
        if free is None and address in after:
            category = after[address][0]
        elif events[index].node or (free is not None and not free.node):
            category = TEMPORARY
        else:
            category = ACTIVATION
        totals[category] = totals.get(category, 0) + events[index].delta_bytes
    return {category: size for category, size in totals.items() if size}


def _peak_position(events: list[AllocatorEvent]) -> int:
    """How many events have happened when the level is highest for the first time."""
    level = peak = position = 0
    for index, event in enumerate(events, start=1):
        level += event.delta_bytes
        if level > peak:
            peak, position = level, index
    return position
