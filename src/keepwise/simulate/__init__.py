"""The judge: plays a `Schedule` over a `Step`, returns the memory timeline and the added seconds, refuses what cannot run.

It knows nothing of the planner. `index.py` holds what is asked of a step again and again, `check.py` the rules that need no
replay, `replay.py` one window, `machine.py` the whole step, `timeline.py` the answer.
"""

from __future__ import annotations

from keepwise.simulate.errors import ScheduleError
from keepwise.simulate.machine import simulate
from keepwise.simulate.spare import recycled_bytes, spare_of
from keepwise.simulate.timeline import Live, LiveKind, Timeline

__all__ = ["Live", "LiveKind", "ScheduleError", "Timeline", "recycled_bytes", "simulate", "spare_of"]
