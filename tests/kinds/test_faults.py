"""Planted faults: each mechanism of the runtime is taken out, one by one, and the fuzzer has to notice every time.

A fault counts as found by a program that fails with it and passes without it. The faults are those of `tests/runtime`, where each
has a scenario of its own; here nobody tells the fuzzer what to look for.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

import keepwise
from tests.runtime import test_planted_faults as faults

from .fuzz import Spec, program_of
from .fuzz_search import random_spec
from .harness import AUDITED, check

Planter = Callable[[pytest.MonkeyPatch], None]
MOST = 400
"""Programs that are tried for a fault."""
HOWS = ("everything", "everything" + AUDITED, "planner sqrt", "planner every:2", "everything", "planner selective")


def _unproved(*args: Any, **kwargs: Any) -> Any:
    """`fit` without its own proof, which would refuse a faulty runtime by itself."""
    return keepwise.fit(*args, verify=False, **kwargs)


def _fails(spec: Spec, how: str) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(check(program_of(spec), how, _unproved))
        except Exception:
            return True


def _on_new_memory(plant: Planter) -> Planter:
    """What writes into given memory knows no autocast."""

    def planter(patch: pytest.MonkeyPatch) -> None:
        plant(patch)
        patch.setattr("keepwise.ir.spare.MIN_BYTES", 1 << 30)

    planter.__name__ = plant.__name__
    return planter


QUICK = frozenset(
    (
        "version_check",
        "generator_states",
        "this_steps_literals",
        "whose_write_it_was",
        "wiring",
        "captured_copies",
        "copies_compared",
        "copies_for_the_next_replay",
        "version_of_dropped",
        "detach_of_kept",
        "detach_of_captured",
    )
)
"""Found among the first programs; the others are left to `make test-all`."""
FORMS_OF = {
    "copies_of_buffers": "buffer written",
    "audit_under_new_modes": "mode later",
    "copies_compared": "moved unseen",
    "copies_for_the_next_replay": "regions twice",
    "version_of_dropped": "outputs written later",
    "weak_cells": "weighed inside",
}
"""What only some forms of a step can show: programs are random, and take that form. Of `version_of_dropped` what is to be seen is an
error: plain raises where what was saved is written, and so must a plan that dropped it."""
MOST_OF = {"copies_of_each_version": 800}
"""What few programs show: a buffer that is written between two ops that read it."""
SURROUNDINGS = (faults.clean_surroundings, faults.without_autocast)
PLANTS = [_on_new_memory(plant) if plant in SURROUNDINGS else plant for plant, _ in faults.FAULTS]
ALL = [
    pytest.param(plant, id=plant.__name__, marks=() if plant.__name__ in QUICK else pytest.mark.slow)
    for plant in PLANTS
]


@contextlib.contextmanager
def _planted(plant: Planter) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


def _most(plant: Planter) -> int:
    return MOST_OF.get(plant.__name__, MOST)


def finder(plant: Planter) -> int | None:
    """Number of the first random program that finds a fault; None: none does."""
    for n in range(_most(plant)):
        spec, how = random_spec(n), HOWS[n % len(HOWS)]
        if plant.__name__ in FORMS_OF:
            spec = replace(spec, form=FORMS_OF[plant.__name__])
        with _planted(plant):
            found = _fails(spec, how)
        if found and not _fails(spec, how):
            return n
    return None


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("plant", ALL)
def test_the_fuzzer_finds_a_planted_fault(plant: Planter) -> None:
    assert finder(plant) is not None, f"{_most(plant)} programs pass without this mechanism"
