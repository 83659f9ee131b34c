"""Every program, plain against planned, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

from . import kinds
from .harness import HOWS, check, programs
from .program import Program


def _cases() -> list[Any]:
    cases = []
    wild = [program for collection in kinds() if collection.is_wild for program in collection.programs]
    for how in HOWS:
        for program in programs():
            heavy = program.heavy or program in wild
            slow = program.slow or how == "0.6x" or (heavy and how != "everything")
            marks = [pytest.mark.slow] if slow else []
            cases.append(pytest.param(program, how, id=f"{program.id}-{how}", marks=marks))
    return cases


@pytest.mark.parametrize(("program", "how"), _cases())
def test_planned_equals_plain(program: Program, how: str) -> None:
    assert check(program, how) == []
