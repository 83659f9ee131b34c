"""What a step really takes: allocator events, resident memory, times.

The room can be called: `keepwise.measure(step)` is `keepwise.measure.measure(step)`, whichever of the two a name refers to.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from keepwise.measure.device import measure_device
from keepwise.measure.events import AllocatorEvent, allocator_peak, allocator_timeline, op_workspace, peak_of
from keepwise.measure.pairs import Paired, Seconds, paired
from keepwise.measure.resident import ResidentRise, map_large_blocks, release_free_memory, resident_bytes
from keepwise.measure.step import Measurement, measure
from keepwise.measure.tracker import PeakTracker

__all__ = [
    "AllocatorEvent",
    "Measurement",
    "Paired",
    "PeakTracker",
    "ResidentRise",
    "Seconds",
    "allocator_peak",
    "allocator_timeline",
    "map_large_blocks",
    "measure",
    "measure_device",
    "op_workspace",
    "paired",
    "peak_of",
    "release_free_memory",
    "resident_bytes",
]


class _Room(ModuleType):
    """A package with the name of its main function: importing a module of it makes `keepwise.measure` the package."""

    def __call__(self, *args: Any, **kwargs: Any) -> Measurement:
        return measure(*args, **kwargs)


sys.modules[__name__].__class__ = _Room
