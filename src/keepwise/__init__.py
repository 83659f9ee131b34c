"""Keepwise makes a training step fit a memory budget at the least cost in time.

`import keepwise` loads no framework: every public name is resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from keepwise._errors import InfeasibleBudget, KeepwiseError, MismatchError, PlanMismatch

if TYPE_CHECKING:
    from keepwise.estimator.api import estimate as estimate

__version__ = "0.1.0"

# Public name -> the module that defines it.
_LAZY: dict[str, str] = {
    "estimate": "keepwise.estimator.api",
}

__all__ = [
    "InfeasibleBudget",
    "KeepwiseError",
    "MismatchError",
    "PlanMismatch",
    "__version__",
    "estimate",
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
