"""One real training step, written down as an `ir.Step`.

Read in this order: `recorder` (what is seen), `values` (who is who), `saved` and `spill` (saved tensors leave memory), `admission`
(what an op really does), `assemble` (the document), `driver` (two steps of a model that
is left as it was, by `saved_state`).
"""

from __future__ import annotations

from keepwise.trace.driver import Traced, trace_steps
from keepwise.trace.record import Recording, record

__all__ = ["Recording", "Traced", "record", "trace_steps"]
