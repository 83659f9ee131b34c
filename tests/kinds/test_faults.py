"""Planted faults: each mechanism of the runtime is taken out, one by one, and the fuzzer has to notice every time.

A fault counts as found by a program that fails with it and passes without it. The faults are those of `tests/runtime`, where each
has a scenario of its own; here nobody tells the fuzzer what to look for.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import keepwise
from tests.runtime import test_planted_faults as faults

from .fuzz import Spec, program_of
from .fuzz_search import random_spec
from .harness import check, fit_program, fresh
from .program import Program

Planter = Callable[[pytest.MonkeyPatch], None]
MOST = 400
"""Programs that are tried."""


def _unproved(*args: Any, **kwargs: Any) -> Any:
    """`fit` without its own proof, which would refuse a faulty runtime by itself."""
    return keepwise.fit(*args, verify=False, **kwargs)


def _differs(spec: Spec) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(check(program_of(spec), "everything", _unproved))
        except Exception:
            return True


def _leaks(spec: Spec) -> bool:
    """Whether tensors stay alive after forwards whose backward never runs."""
    program = program_of(spec)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = fresh(program)
        try:
            plan = fit_program(program, built, _unproved, "everything")
        except Exception:
            return False
        counts = []
        for _ in range(2):
            for _ in range(3):
                _forward(program, built, plan)
            gc.collect()
            counts.append(sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects()))
        plan.remove()
    return counts[1] > counts[0]


def _forward(program: Program, built: Any, plan: Any) -> None:
    with plan if program.step is not None else contextlib.nullcontext(), contextlib.suppress(RuntimeError):
        built.loss(built.model(*built.args))


def _without_detach(patch: pytest.MonkeyPatch) -> None:
    """Kept tensors are held with their history."""
    faults.detach_of_kept(patch)
    faults.detach_of_captured(patch)


def _without_clean_surroundings(patch: pytest.MonkeyPatch) -> None:
    """Replays run under whatever mode backward runs under. (What writes into given memory knows no autocast.)"""
    faults.clean_surroundings(patch)
    patch.setattr("keepwise.ir.spare.MIN_BYTES", 1 << 30)


NAMED: list[tuple[str, Planter, Callable[[Spec], bool]]] = [
    ("version check", faults.version_check, _differs),
    ("random state", faults.generator_states, _differs),
    ("numbers of this step", faults.this_steps_literals, _differs),
    ("detach", _without_detach, _leaks),
    ("clean surroundings", _without_clean_surroundings, _differs),
]
OTHERS: tuple[Planter, ...] = (
    faults.version_of_dropped,
    faults.wiring,
    faults.whose_write_it_was,
    faults.captured_copies,
)
ALL = [
    *(pytest.param(plant, fails, id=name) for name, plant, fails in NAMED),
    *(pytest.param(plant, _differs, id=plant.__name__, marks=pytest.mark.slow) for plant in OTHERS),
]


@contextlib.contextmanager
def _planted(plant: Planter) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@pytest.mark.parametrize(("plant", "fails"), ALL)
def test_the_fuzzer_finds_a_planted_fault(plant: Planter, fails: Callable[[Spec], bool]) -> None:
    for spec in map(random_spec, range(MOST)):
        with _planted(plant):
            found = fails(spec)
        if found and not fails(spec):
            return
    pytest.fail(f"{MOST} programs pass without this mechanism")
