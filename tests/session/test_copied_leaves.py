"""Small leaves that replays read: what is predicted of their copies is what the allocator sees, with a bias a layer and with one for all."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor, nn

import keepwise
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.runtime.geometry import SMALL_BYTES
from keepwise.simulate import LiveKind
from tests.session.models import Stack, loss

DEPTH = 8
WIDTH = SMALL_BYTES // 4


class Biased(nn.Module):
    """Adds biases, which autograd does not save, to little else: a copy of one is half as large as what a layer saves."""

    def __init__(self, num_biases: int) -> None:
        super().__init__()
        self.biases = nn.ParameterList(torch.randn(WIDTH) for _ in range(num_biases))

    def forward(self, x: Tensor) -> Tensor:
        for i in range(DEPTH):
            x = torch.tanh(x + self.biases[i % len(self.biases)])
        return x.sum()


@pytest.mark.parametrize("num_biases", [1, DEPTH])
@pytest.mark.parametrize("budget", ["0.9x", "min"])
def test_the_predicted_peak_is_the_allocators(num_biases: int, budget: str) -> None:
    torch.manual_seed(0)
    model, x = Biased(num_biases), torch.randn(2, WIDTH)
    plan = keepwise.fit(model, (x,), budget=budget, grads="fresh")
    copies = sum(c.live.nbytes for c in plan.timeline.charges if c.live.kind is LiveKind.COPY)
    replayed = {i for w in plan.schedule.windows for i in w.ops if plan.step.ops[i].target == "aten.add.Tensor"}
    assert copies == min(len(replayed), num_biases) * SMALL_BYTES > 0.03 * plan.peak_bytes

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    measured = keepwise.measure(run, model=model, warmup=2, steps=1).peak_bytes
    plan.remove()
    assert 0.99 * plan.peak_bytes <= measured <= 1.01 * plan.peak_bytes


def test_copies_of_a_few_bytes_leave_the_bound_where_it_is() -> None:
    """Without them plans are never slower, and equal stages are bounded alike: that bound holds with them, too."""
    torch.manual_seed(0)
    model, x = Stack(6, width=32), torch.randn(32, 64, 32)
    step = keepwise.fit(model, x, loss=loss, budget="max", verify=False).step
    storages = tuple(replace(s, copied=False) for s in step.storages)
    by_reference = replace(step, storages=storages)
    assert by_reference != step
    floor, plain = plan_floor(step).floor_bytes, plan_optimal(step, 1 << 60).plain_peak_bytes
    for share in (0.2, 0.4, 0.6, 0.8):
        budget = int(floor + share * (plain - floor))
        found, without = plan_optimal(step, budget), plan_optimal(by_reference, budget)
        assert without.bound_seconds <= found.added_seconds + 1e-9
        assert found.bound_seconds <= found.added_seconds + 1e-9
        assert found.gap <= 0.01 or found.bound_seconds >= without.bound_seconds - 1e-9
