"""Saved tensors that are read outside of backward: replays cache nothing there, and every value is the plain one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from .helpers import fit, graph_nodes, same_bits, step, twice


class TwoStreams(nn.Module):
    """Two results go from each stage to the next, so that inner windows read two of what an outer one makes."""

    def __init__(self, depth: int = 9) -> None:
        super().__init__()
        self.a = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.b = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.sin(), x.cos()
        for a, b in zip(self.a, self.b, strict=True):
            h, c = torch.tanh(a(h) + c), torch.tanh(b(c) + h)
        return h * c


def saved(value: Tensor) -> Iterator[Tensor]:
    """What every node of the graph saved, in a fixed order."""
    for node in graph_nodes(value):
        for name in sorted(n for n in dir(node) if n.startswith("_saved_")):
            t = getattr(node, name)
            if isinstance(t, Tensor):
                yield t.detach().clone()


@pytest.mark.parametrize("planner", ["recompute_everything", "full", "every:2", "sqrt", "recursive"])
def test_every_saved_tensor_read_before_backward_is_the_plain_one(planner: str) -> None:
    torch.manual_seed(0)
    model, x = TwoStreams(), torch.randn(3, 4)
    plan = fit(model, x, planner=planner)
    nested = any(w.parent >= 0 for w in plan.schedule.windows)
    assert nested == (planner == "recursive")
    with plan.paused():
        want = list(saved(model(x)))
    got = list(saved(model(x)))
    assert len(want) == len(got) > 0
    assert all(map(same_bits, want, got))
    twice(plan, lambda: step(model, x))
