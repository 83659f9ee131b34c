"""A step that was made deeper equals the recorded step of the deeper model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from msgspec.structs import replace

from keepwise.ir import Step
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.simulate import simulate
from keepwise.trace import trace_steps
from tests.session.models import Stack, loss


@pytest.fixture(scope="module")
def repeat() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "repeat.py"
    spec = importlib.util.spec_from_file_location("repeat", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["repeat"] = module
    spec.loader.exec_module(module)
    return module


def recorded(depth: int) -> Step:
    torch.manual_seed(0)
    model, x = Stack(depth), torch.randn(16, 8, 16)

    def run() -> torch.Tensor:
        value = loss(model(x))
        value.backward()
        return value.detach()

    return trace_steps(run, model=model, inputs=((x,), {})).recording.step


def facts(step: Step) -> list[object]:
    """Everything but durations and paths, in an order that does not depend on numbers of tensors."""
    ops = [
        (op.target, op.phase, len(op.inputs), len(op.outputs), len(op.writes), op.workspace_bytes) for op in step.ops
    ]
    storages = sorted(
        (s.birth, s.nbytes, s.held_until, s.saved_until, s.versions, str(s.category), s.copied) for s in step.storages
    )
    saves = [(s.at, s.node, tuple((r.first, r.last) for r in s.reads)) for s in step.saves]
    return [ops, storages, saves]


def priced_alike(step: Step) -> Step:
    """With one duration for all ops: equal plans are compared, not two clocks."""
    return replace(step, ops=tuple(replace(op, seconds=1e-6) for op in step.ops))


def test_deeper_by_repetition_is_deeper_by_construction(repeat: ModuleType) -> None:
    step, real = recorded(5), recorded(8)
    made = repeat.deepen(step, repeat.periods_of(step) + 3)
    assert facts(made) == facts(real)
    assert simulate(made).peak_bytes == simulate(real).peak_bytes
    floors = [plan_floor(priced_alike(s)).floor_bytes for s in (made, real)]
    assert floors[0] == pytest.approx(floors[1], rel=2e-3)  # copies of small leaves are not weighed between stages
    budget = (simulate(made).peak_bytes + plan_floor(made).floor_bytes) // 2
    assert plan_optimal(made, budget).peak_bytes <= budget
    assert made.seconds == pytest.approx(real.seconds, rel=10.0)


def test_what_does_not_repeat_is_refused(repeat: ModuleType) -> None:
    with pytest.raises(ValueError, match="nothing repeats"):
        repeat.deepen(recorded(2), 8)
    with pytest.raises(ValueError, match=r"has [45] periods already"):
        repeat.deepen(recorded(5), 3)
