"""Random programs, plain against planned, bit for bit.

The stress plan drops whatever has a recipe. A failure prints the shortest program that still fails; `program_of(Spec(...))`
in `fuzz.py` runs it again.
"""

from __future__ import annotations

import os
import random
import warnings
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings

from .fuzz import EFFECTS, FORM_NAMES, OPS, Spec, program_of, specs
from .fuzz_forms import RARE_FORMS
from .fuzz_found import FOUND
from .fuzz_search import random_spec, shortened
from .harness import check, fresh, inert_fit, steps, stock_fit

FIXED: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
PLANNERS = ("recompute_everything", "full", "every:2", "sqrt", "selective", "none")


HOWS = ("everything",) * 6 + tuple(f"planner {name}" for name in PLANNERS) + ("min", "0.6x", "0.8x")
"""Program number n runs under `HOWS[n % len(HOWS)]`."""
NUM_CHUNKS, CHUNK = 25, 120
"""What `make test-all` tries, in tests of some seconds each; other programs in each run under `HYPOTHESIS_PROFILE=search`."""


def _differences(spec: Spec, how: str) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return check(program_of(spec), how)
        except Exception as error:
            return [f"raises {type(error).__name__}: {error}"]


def _agrees(spec: Spec, how: str) -> None:
    found = _differences(spec, how)
    assert found == [], f"\n{spec}\n{how}\n" + "\n".join(found)


def _kinds(differences: list[str]) -> set[str]:
    """What differs, without the numbers: a shorter program has to fail in the same way."""
    return {text.split(":")[0] for text in differences}


def _agree(first: int, last: int) -> None:
    """Programs with these numbers; of the first that fails the shortest form is shown."""
    for n in range(first, last):
        spec, how = random_spec(n), HOWS[n % len(HOWS)]
        kinds = _kinds(_differences(spec, how))
        if kinds:
            _agrees(
                shortened(spec, lambda s, how=how, kinds=kinds: not kinds.isdisjoint(_kinds(_differences(s, how)))), how
            )
            _agrees(spec, how)  # should the short one have passed now


@settings(max_examples=60, **FIXED)
@given(specs())
def test_random_programs_under_the_stress_plan(spec: Spec) -> None:
    _agrees(spec, "everything")


def test_two_hundred_random_programs() -> None:
    _agree(0, 200)


@pytest.mark.parametrize("form", RARE_FORMS)
def test_random_programs_in_rare_forms(form: str) -> None:
    for n in range(30):
        _agrees(replace(random_spec(n), form=form), HOWS[n % len(HOWS)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_thousands_of_random_programs(chunk: int) -> None:
    base = random.SystemRandom().randrange(10**9) if os.environ.get("HYPOTHESIS_PROFILE") == "search" else 0
    _agree(base + 200 + CHUNK * chunk, base + 200 + CHUNK * (chunk + 1))


@pytest.mark.parametrize("name", FOUND)
def test_what_the_search_found(name: str) -> None:
    spec, how = FOUND[name]
    _agrees(spec, how)


def test_random_programs_repeat_and_reach_every_instruction_and_form() -> None:
    specs_seen = [random_spec(n) for n in range(400)]
    drawn = {line.op for spec in specs_seen for lines in spec.blocks for line in lines}
    assert set(OPS) == drawn
    assert set(FORM_NAMES) <= {spec.form for spec in specs_seen}
    seen: Counter[str] = Counter()
    for spec in specs_seen[:60]:
        program = program_of(spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert check(program, fit=inert_fit) == []
            raised = any(record.raised for record in steps(program, fresh(program)))
        seen["raised" if raised else "ran"] += 1
    assert seen["ran"] > 4 * seen["raised"] > 0, seen
    assert set(EFFECTS) == {
        "pointwise", "literal", "matmul", "view", "in place", "random", "state", "structure", "types", "autograd",
        "overwriting", "indexing", "tuples", "layout", "resizing",
    }  # fmt: skip


def test_a_failing_program_is_shortened_to_what_fails() -> None:
    spec = next(s for s in map(random_spec, range(999)) if any(i.op == "batch_norm" and i.k for i in s.blocks[0]))
    short = shortened(spec, lambda s: any(i.op == "batch_norm" and i.k for block in s.blocks for i in block))
    assert [i.op for block in short.blocks for i in block] == ["batch_norm"]
    assert (short.form, short.skipped, len(short.order), len(set(short.sizes))) == ("", (), 1, 1)


def _stock_is_wrong(spec: Spec) -> bool:
    try:
        return any("gradient" in text for text in check(program_of(spec), fit=stock_fit))
    except Exception:
        return False


def test_the_fuzzer_finds_wrong_gradients_of_whole_model_checkpointing() -> None:
    quick = settings(max_examples=200, phases=[Phase.generate], **FIXED)
    assert find(specs(), _stock_is_wrong, settings=quick).blocks
