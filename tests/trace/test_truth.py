"""The memory that a `Step` says the plain step takes, against the allocator's events of a step that nobody watches."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from keepwise.ir import NO_OP, Phase, Step
from keepwise.measure.events import allocator_timeline, peak_of
from keepwise.trace import trace_steps
from tests.steps import check_step
from tests.trace.models import MODELS, build, plain_step

TOLERANCE_BYTES = 512
"""Scalars that autograd and the engine hold outside of any op."""


def levels(step: Step) -> list[int]:
    """Bytes live at each moment that did not exist before the step, kernels' workspace included."""
    change = [0] * (len(step.ops) + 1)
    for s in step.storages:
        if s.birth == NO_OP and s.category.is_static:
            continue
        change[max(s.birth, 0)] += s.nbytes
        change[s.death + 1] -= s.nbytes
    found, level = [], 0
    for op in step.ops:
        level += change[op.index]
        found.append(level + op.workspace_bytes)
    return found


@pytest.mark.parametrize("grads", ["held", "fresh"])
@pytest.mark.parametrize("name", list(MODELS))
def test_the_peak_is_the_allocators(name: str, grads: Literal["held", "fresh"]) -> None:
    model, x = build(name)
    run = plain_step(model, x)
    step = check_step(trace_steps(run, model=model, inputs=x, grads=grads).recording.step)
    run()
    if grads == "fresh":
        model.zero_grad(set_to_none=True)
    assert max(levels(step)) == pytest.approx(peak_of(allocator_timeline(run)), rel=0.01, abs=TOLERANCE_BYTES)


@pytest.mark.parametrize(
    "name", ["gpt2-tiny", "gpt2-dropout-tiny", "bert-tiny", "llama-tiny", "convnext-tiny", "lstm-tiny"]
)
def test_the_peak_of_the_built_in_targets(name: str) -> None:
    pytest.importorskip("transformers")
    from keepwise.targets.registry import build as build_target

    target = build_target(name)
    traced = trace_steps(target.step, model=target.model, inputs=(target.args, target.kwargs))
    step = check_step(traced.recording.step)
    target.step()
    assert max(levels(step)) == pytest.approx(peak_of(allocator_timeline(target.step)), rel=0.01, abs=TOLERANCE_BYTES)


def test_the_optimizers_state_and_step_count() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), foreach=True)
    plain = plain_step(model, x)

    def run() -> None:
        plain()
        optimizer.step()

    step = check_step(trace_steps(run, model=model, inputs=x, optimizer=optimizer).recording.step)
    assert not optimizer.state, "the state that the trace made is gone again"
    run()
    assert max(levels(step)) == pytest.approx(peak_of(allocator_timeline(run)), rel=0.01, abs=TOLERANCE_BYTES)
    state = sum(s.nbytes for s in step.storages if s.category == "optimizer")
    assert state == sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())


@pytest.mark.parametrize("name", list(MODELS))
def test_what_others_hold_is_what_stays_when_saved_tensors_leave(name: str) -> None:
    """`held_until` against the allocator: bytes that a forward leaves behind if autograd holds nothing."""
    model, x = build(name)
    torch.manual_seed(1)
    recorded = trace_steps(plain_step(model, x), model=model, inputs=x).recording.step
    forward = [op.index for op in recorded.ops if op.phase is Phase.FORWARD]
    end = next(op.index for op in recorded.ops if op.target == "aten.ones_like.default" and op.index in forward) - 1
    expected = sum(s.nbytes for s in recorded.storages if not s.category.is_static and s.birth <= end < s.held_until)

    away: list[object] = []

    def pack(t: torch.Tensor) -> int:
        # Statistics and parameters are no allocations of the step: what they are packed to does not matter.
        away.append((t.detach().numpy().copy(), t.shape))
        return len(away) - 1

    def forward_only() -> torch.Tensor:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda i: torch.zeros(away[i][1])):  # type: ignore[index]
            return model(x).square().mean()

    events = allocator_timeline(forward_only)
    assert expected == pytest.approx(sum(e.delta_bytes for e in events), abs=TOLERANCE_BYTES)


def test_static_storages_are_there_even_if_no_op_touches_them() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used = nn.Linear(4, 4)
            self.unused = nn.Linear(8, 8, bias=False)
            self.register_buffer("table", torch.zeros(100))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    model = Unused()
    x = torch.randn(2, 4)
    step = check_step(trace_steps(plain_step(model, x), model=model, inputs=x).recording.step)
    static = {(s.category.value, s.name): s.nbytes for s in step.storages if s.category.is_static}
    assert static == {
        ("parameter", "used.weight"): 64,
        ("parameter", "used.bias"): 16,
        ("parameter", "unused.weight"): 256,
        ("gradient", "used.weight"): 64,
        ("gradient", "used.bias"): 16,
        ("buffer", "table"): 400,
        ("input", ""): 32,
    }
