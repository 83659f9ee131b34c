"""What a window holds for saved tensors that a step does not read is gone when plain autograd would have let go of it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import keepwise
from tests.kinds.fuzz_forms import live_bytes

WIDTH, BATCH = 64, 1024
NBYTES = WIDTH * BATCH * 4


class Sines(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin().sin().sin()


class Exp(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


class Branched(nn.Module):
    """What `exp` saves is kept, and read by the replay of `side`."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.exp, self.side, self.end = nn.Linear(WIDTH, WIDTH), Exp(), Sines(), nn.Linear(WIDTH, 1)
        self.reads_side = self.runs_end = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.exp(self.inp(x))
        side = self.side(x)
        x = x + side if self.reads_side else x * 2
        return self.end(x).mean() if self.runs_end else x.mean()


def _held_at_last_gradient(model: Branched, run: Callable[[], object]) -> int:
    run()
    model.zero_grad(set_to_none=False)
    gc.collect()
    before, held = live_bytes(), []
    handle = model.inp.weight.register_hook(lambda _: held.append(live_bytes() - before))
    run()
    handle.remove()
    return held[0]


@pytest.mark.parametrize(("reads_side", "runs_end"), [(True, True), (False, True), (False, False)])
def test_what_nobody_reads_is_gone_at_the_last_gradient(reads_side: bool, runs_end: bool) -> None:
    torch.manual_seed(0)
    model, x = Branched(), torch.randn(BATCH, WIDTH)

    def step() -> None:
        model(x).backward()

    model(x).backward()  # gradients are there
    plan = keepwise.fit(model, step=step, planner="recompute_everything", budget="max", pin={"exp": "keep"})
    assert plan.schedule.windows
    assert plan.schedule.held
    plan.remove()
    model.reads_side, model.runs_end = reads_side, runs_end
    plain = _held_at_last_gradient(model, step)
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def planned() -> None:
        with plan:
            step()

    plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the step differs
        assert _held_at_last_gradient(model, planned) < plain + NBYTES / 2
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))


def test_a_forward_that_goes_on_after_a_backward_still_drops() -> None:
    """A penalty inside of forward is a backward pass too: windows that forward has not finished are not given up."""
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), Sines(), nn.Linear(WIDTH, WIDTH), Sines()),
        torch.randn(BATCH, WIDTH),
    )

    def step() -> None:
        y = model[1](model[0](x))
        torch.autograd.grad(y.sum(), model[0].weight, retain_graph=True)
        model[3](model[2](y)).mean().backward()

    plan = keepwise.fit(model, step=step, planner="recompute_everything", budget="max")
    for _ in range(2):
        with plan:
            step()
        assert plan.stats.num_deviations == 0
        assert plan.stats.num_dropped > 0
