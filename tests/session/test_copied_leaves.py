"""Small leaves that replays read: what is predicted of their copies is what the allocator sees, with a bias a layer and with one for all."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import keepwise
from keepwise.runtime.geometry import SMALL_BYTES
from keepwise.simulate import LiveKind

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
