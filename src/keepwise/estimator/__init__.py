"""The analytic estimator: memory and cost of a training step from shapes alone; no model is built or run.

The public function is `keepwise.estimate` (this folder is called `estimator` so that no import of it can shadow the function).

The way through the folder: a configuration becomes an architecture (`families`, `spec`), each distinct block becomes a small
graph of operators that says what autograd saves (`graph`, `layers`), a checkpointing policy decides what of it is held
(`policy`), and the step's moments are walked on each distinct rank (`timeline`, `states`, `ranks`). `rule` holds the
published rules of thumb, `search` what fits, `emit` the settings of other systems, `page` the interactive report.
"""

from __future__ import annotations

from keepwise.estimator.api import estimate

__all__ = ["estimate"]
