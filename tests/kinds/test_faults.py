"""Planted faults: each mechanism of the runtime is taken out, one by one, and the fuzzer has to notice every time.

A fault counts as found by a program that fails with it and passes without it. Should the runtime be rearranged, the five
`_without_...` functions below are what has to follow: each names the one place where its mechanism acts.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, find, settings

import keepwise

from .fuzz import Spec, program_of, specs
from .harness import check, fit_program, fresh
from .program import Program
from .test_fuzz import FIXED

pytestmark = pytest.mark.skipif(not hasattr(keepwise, "fit"), reason="keepwise.fit is not there yet")

Planter = Callable[[pytest.MonkeyPatch], None]


def _without_version_check(patch: pytest.MonkeyPatch) -> None:
    """Nothing that was written since forward is noticed."""
    for room in ("holding", "guard", "replay"):
        patch.setattr(f"keepwise.runtime.{room}.version_of", lambda t: 0)


def _without_random_state(patch: pytest.MonkeyPatch) -> None:
    """Replays draw from wherever the generators are by then."""
    patch.setattr("keepwise.runtime.replay.call_with_state", lambda func, args, kwargs, random: func(*args, **kwargs))


def _without_this_steps_numbers(patch: pytest.MonkeyPatch) -> None:
    """The guard lets each op pass with the numbers of the step in which it first saw it."""
    from keepwise.runtime.guard import Guard

    capture, first = Guard._capture, {}

    def stale(self: Any, run: Any, use: Any, entry: Any, func: Any, args: Any, kwargs: Any, *rest: Any) -> Any:
        known, _ = first.setdefault((id(self.program), entry.index), (args, self.program))
        if len(known) == len(args):
            args = tuple(old if isinstance(old, int | float) else new for old, new in zip(known, args, strict=True))
        return capture(self, run, use, entry, func, args, kwargs, *rest)

    patch.setattr(Guard, "_capture", stale)


def _without_detach(patch: pytest.MonkeyPatch) -> None:
    """Kept tensors are held with their history."""
    patch.setattr("keepwise.runtime.holding.alias_in_pack", lambda t: t)
    patch.setattr("keepwise.runtime.guard.alias", lambda t: t)


def _without_clean_surroundings(patch: pytest.MonkeyPatch) -> None:
    """Replays run under whatever mode backward runs under. (What writes into given memory knows no autocast.)"""
    patch.setattr("keepwise.runtime.replay.clean", contextlib.nullcontext)
    patch.setattr("keepwise.runtime.reuse.MIN_BYTES", 1 << 30)


def _differs(spec: Spec) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return bool(check(program_of(spec), "everything", _unproved))
        except Exception:
            return True


def _unproved(*args: Any, **kwargs: Any) -> Any:
    """`fit` without its own proof, which would refuse a faulty runtime by itself."""
    return keepwise.fit(*args, verify=False, **kwargs)


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


FAULTS: list[tuple[str, Planter, Callable[[Spec], bool]]] = [
    ("version check", _without_version_check, _differs),
    ("random state", _without_random_state, _differs),
    ("numbers of this step", _without_this_steps_numbers, _differs),
    ("detach", _without_detach, _leaks),
    ("clean surroundings", _without_clean_surroundings, _differs),
]


@contextlib.contextmanager
def _planted(plant: Planter) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        yield


@pytest.mark.parametrize(("plant", "fails"), [fault[1:] for fault in FAULTS], ids=[fault[0] for fault in FAULTS])
def test_the_fuzzer_finds_a_planted_fault(plant: Planter, fails: Callable[[Spec], bool]) -> None:
    def found(spec: Spec) -> bool:
        with _planted(plant):
            if not fails(spec):
                return False
        return not fails(spec)

    quick = settings(max_examples=300, phases=[Phase.generate], **FIXED)
    spec = find(specs(), found, settings=quick)
    assert found(spec)
