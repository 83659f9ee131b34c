"""Keepwise makes a training step fit a memory budget at the least cost in time.

`import keepwise` loads no framework: every public name is resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keepwise._errors import InfeasibleBudget, KeepwiseError, MismatchError, PlanMismatch

if TYPE_CHECKING:
    from keepwise.estimator import estimate as estimate
    from keepwise.measure import Measurement as Measurement
    from keepwise.measure import measure as measure
    from keepwise.proof.proof import Proof as Proof
    from keepwise.runtime.checkpoint import checkpoint as checkpoint
    from keepwise.runtime.checkpoint import checkpoint_sequential as checkpoint_sequential
    from keepwise.session.fit import fit as fit
    from keepwise.session.frontier import Frontier as Frontier
    from keepwise.session.frontier import frontier as frontier
    from keepwise.session.plan import Plan as Plan
    from keepwise.session.status import Status as Status
    from keepwise.session.verify import verify as verify

__version__ = "0.1.0"

# Public name -> the module that defines it.
_LAZY: dict[str, str] = {
    "Frontier": "keepwise.session.frontier",
    "Measurement": "keepwise.measure",
    "Plan": "keepwise.session.plan",
    "Proof": "keepwise.proof.proof",
    "Status": "keepwise.session.status",
    "checkpoint": "keepwise.runtime.checkpoint",
    "checkpoint_sequential": "keepwise.runtime.checkpoint",
    "estimate": "keepwise.estimator",
    "fit": "keepwise.session.fit",
    "frontier": "keepwise.session.frontier",
    "measure": "keepwise.measure",
    "verify": "keepwise.session.verify",
}

__all__ = [
    "Frontier",
    "InfeasibleBudget",
    "KeepwiseError",
    "Measurement",
    "MismatchError",
    "Plan",
    "PlanMismatch",
    "Proof",
    "Status",
    "__version__",
    "checkpoint",
    "checkpoint_sequential",
    "estimate",
    "fit",
    "frontier",
    "measure",
    "verify",
]


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'keepwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
