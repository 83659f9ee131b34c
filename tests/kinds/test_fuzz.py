"""Random programs, plain against planned, bit for bit.

The stress plan drops whatever has a recipe. A failure prints the shortest program that still fails; `program_of(Spec(...))`
in `fuzz.py` runs it again.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import keepwise

from .fuzz import EFFECTS, OPS, Spec, program_of, specs
from .harness import check, fresh, inert_fit, steps, stock_fit

needs_fit = pytest.mark.skipif(not hasattr(keepwise, "fit"), reason="keepwise.fit is not there yet")

FIXED: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
PLANNERS = ("recompute_everything", "full", "every:2", "sqrt", "selective", "none")


def _agrees(spec: Spec, how: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check(program_of(spec), how)
    assert found == [], f"\n{spec}\n" + "\n".join(found)


@needs_fit
@settings(max_examples=200, **FIXED)
@given(specs())
def test_random_programs_under_the_stress_plan(spec: Spec) -> None:
    _agrees(spec, "everything")


@needs_fit
@settings(max_examples=25, **FIXED)
@given(specs(), st.sampled_from(PLANNERS))
def test_random_programs_under_named_planners(spec: Spec, planner: str) -> None:
    _agrees(spec, f"planner {planner}")


@needs_fit
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=3000, **FIXED)
@given(specs(most_lines=12))
def test_thousands_of_random_programs(spec: Spec) -> None:
    _agrees(spec, "everything")


@needs_fit
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=1000, **FIXED)
@given(specs(), st.sampled_from([*(f"planner {name}" for name in PLANNERS), "min", "0.6x", "0.8x"]))
def test_thousands_of_random_programs_under_random_plans(spec: Spec, how: str) -> None:
    _agrees(spec, how)


def test_random_programs_repeat_and_reach_every_instruction() -> None:
    seen: Counter[str] = Counter()

    @settings(max_examples=150, **FIXED)
    @given(specs())
    def run(spec: Spec) -> None:
        program = program_of(spec)
        assert check(program, fit=inert_fit) == []
        raised = any(record.raised for record in steps(program, fresh(program)))
        seen.update(["raised" if raised else "ran"])
        for lines in spec.blocks:
            seen.update({line.op for line in lines})

    run()
    assert seen["ran"] > 5 * seen["raised"] > 0, seen
    assert {name for name in OPS if not seen[name]} == set(), seen
    assert set(EFFECTS) == {
        "pointwise", "literal", "matmul", "view", "in place", "random", "state", "structure", "types", "autograd",
        "overwriting",
    }  # fmt: skip


def _stock_is_wrong(spec: Spec) -> bool:
    try:
        return any("gradient" in text for text in check(program_of(spec), fit=stock_fit))
    except Exception:
        return False


def test_the_fuzzer_finds_wrong_gradients_of_whole_model_checkpointing() -> None:
    quick = settings(max_examples=200, phases=[Phase.generate], **FIXED)
    assert find(specs(), _stock_is_wrong, settings=quick).blocks
