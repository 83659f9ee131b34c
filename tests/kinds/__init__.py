"""Programs by kind: what people do to a model, each compared bit for bit with plain autograd."""

from __future__ import annotations

import importlib

from .program import Collection

KINDS = (
    "randomness",
    "mutation",
    "structure",
    "autograd",
    "precision",
    "modes",
    "shapes",
    "time_threads",
    "compiled",
    "ddp",
    "devices",
    "differing_steps",
)

WILD = (
    "wild_state",
    "wild_structure",
    "wild_classes",
    "wild_autograd",
    "wild_types",
    "wild_steps",
    "wild_training",
    "families",
)
"""More of the same kinds, each file of several; with budgets they are left to `make test-all`."""


def kinds() -> list[Collection]:
    """The programs of each kind, in the order of `KINDS`."""
    found = [importlib.import_module(f".{name}", __name__).PROGRAMS for name in KINDS]
    return [*found, *(c for name in WILD for c in importlib.import_module(f".{name}", __name__).COLLECTIONS)]
