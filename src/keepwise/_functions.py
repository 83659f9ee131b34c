"""What a Python function holds."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any


def bound_cells(function: types.FunctionType) -> Iterator[tuple[types.CellType, Any]]:
    """Its closure's cells with their contents; not those of names that are not bound yet."""
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError:
            continue
        yield cell, content
