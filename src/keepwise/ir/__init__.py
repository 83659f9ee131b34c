"""The two documents that the rooms of Keepwise exchange: `Step` (what one training step did) and `Schedule` (what to change).

Plain data, versioned JSON, no framework. Start with `step.py`, then `schedule.py`.
"""

from __future__ import annotations

from keepwise.ir.schedule import NO_WINDOW, Schedule, Window
from keepwise.ir.spare import Spare
from keepwise.ir.step import NO_OP, Category, Op, Phase, Read, Save, Step, Storage, Value

__all__ = [
    "NO_OP",
    "NO_WINDOW",
    "Category",
    "Op",
    "Phase",
    "Read",
    "Save",
    "Schedule",
    "Spare",
    "Step",
    "Storage",
    "Value",
    "Window",
]
