"""Every program, plain against planned, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

import keepwise

from . import kinds
from .harness import HOWS, check, programs
from .program import Program

pytestmark = pytest.mark.skipif(not hasattr(keepwise, "fit"), reason="keepwise.fit is not there yet")


# What is known not to work yet, each with its reason.
KNOWN: dict[str, str] = {}


def _cases() -> list[Any]:
    cases = []
    wild = [program for collection in kinds() if collection.is_wild for program in collection.programs]
    for how in HOWS:
        for program in programs():
            heavy = program.heavy or program in wild
            slow = program.slow or how == "0.6x" or (heavy and how != "everything")
            marks: list[Any] = [pytest.mark.slow] if slow else []
            if program.id in KNOWN:
                marks.append(pytest.mark.xfail(reason=KNOWN[program.id], strict=False))
            cases.append(pytest.param(program, how, id=f"{program.id}-{how}", marks=marks))
    return cases


@pytest.mark.parametrize(("program", "how"), _cases())
def test_planned_equals_plain(program: Program, how: str) -> None:
    assert check(program, how) == []
