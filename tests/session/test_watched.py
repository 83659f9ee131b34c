"""Steps that are not the same, or do not work, where a dispatch mode watches them; replays of another shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import keepwise
from keepwise import Status
from tests.runtime.helpers import SeenFunctions

from .models import Stack, stack

NUM_CALLS: list[int] = []
"""A global, which planning cannot put back."""
EVERYTHING: dict[str, Any] = {"planner": "recompute_everything", "budget": "max"}


def loss(out: torch.Tensor) -> torch.Tensor:
    return out.float().square().mean()


class Model(nn.Module):
    """Two layers; what happens between them is what a test is about."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.between = nn.Linear(8, 8), nn.Linear(8, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.between(torch.tanh(self.a(x)))).sin())


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None]:
    np.random.seed(0)
    model.zero_grad(set_to_none=True)
    loss(model(x)).backward()
    return [p.grad for p in model.parameters()]


def equal(a: list[torch.Tensor | None], b: list[torch.Tensor | None]) -> bool:
    return all(x is not None and y is not None and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_an_operator_that_is_carried_out_otherwise_under_a_mode() -> None:
    def normed(h: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            largest = torch.linalg.svdvals(h)[0]
        return h / largest

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    plain = step(Model(normed), x)
    model = Model(normed)
    plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
    assert equal(plain, step(model, x))
    assert plan.status is Status.INERT or plan.proof.identical  # type: ignore[union-attr]
    assert "repeatable" not in str(plan)
    plan.remove()


def test_an_operator_that_fails_under_a_mode() -> None:
    def mixed(h: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(torch.eye(16).to_sparse(), h)  # single times half precision

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain = step(Model(mixed), x)
        model = Model(mixed)
        plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
        assert equal(plain, step(model, x))
    assert plan.status is Status.INERT or plan.proof.identical  # type: ignore[union-attr]
    plan.remove()


def test_a_first_step_that_is_unlike_all_others_says_nothing_of_the_plan() -> None:
    NUM_CALLS.clear()

    def warming(h: torch.Tensor) -> torch.Tensor:
        NUM_CALLS.append(1)
        return h * 2 if len(NUM_CALLS) == 1 else h

    x = torch.randn(16, 8)
    model = Model(warming)
    plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
    assert plan.dropped_bytes > 0
    assert plan.proof is not None
    assert plan.proof.identical
    plain = step(Model(lambda h: h), x)
    assert equal(plain, step(model, x))
    plan.remove()


def assert_planned_and_equal(inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Something is dropped, the proof holds, and a step is the plain one."""
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    plain = step(Model(inside), x)
    model = Model(inside)
    np.random.seed(0)
    plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
    assert equal(plain, step(model, x))
    assert plan.proof is not None
    assert plan.proof.identical
    assert plan.dropped_bytes > 0
    plan.remove()


def test_a_replay_whose_shape_hangs_on_what_numpy_wrote() -> None:
    def chosen(h: torch.Tensor) -> torch.Tensor:
        noise = torch.zeros(h.shape)
        noise.numpy()[...] = np.random.rand(*h.shape)  # no operator, so no replay makes it
        h = (h * noise).sin()
        keep = h.detach().sum(1) > 0
        return h[keep] * h[keep].cos()

    assert_planned_and_equal(chosen)


class Ranked(torch.autograd.Function):
    """Orders by what it has just written; that it has is told to autograd at the end."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        noise.mul_(0.5)
        ctx.mark_dirty(noise)
        ranks = noise.argsort(-1)
        ctx.save_for_backward(noise, ranks)
        return h.gather(-1, ranks), noise

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        noise, ranks = ctx.saved_tensors
        return torch.zeros_like(g).scatter(-1, ranks, g * noise.cos()), None


def test_a_version_that_moves_without_an_operator() -> None:
    def ranked(h: torch.Tensor) -> torch.Tensor:
        return Ranked.apply(h, torch.from_numpy(np.random.rand(*h.shape).astype("f")))[0]  # type: ignore[index]

    assert_planned_and_equal(ranked)


@pytest.mark.parametrize("hidden", [False, True])
def test_what_the_proof_did_not_reach_is_audited_when_it_comes(hidden: bool) -> None:
    NUM_CALLS.clear()

    def sometimes(h: torch.Tensor) -> torch.Tensor:
        NUM_CALLS.append(1)
        if 3 <= len(NUM_CALLS) <= 5:  # after the recorded steps: the plain ones, and the one that proves
            return h.cos()
        noise = torch.zeros(h.shape)
        if hidden:
            noise.numpy()[...] = np.random.rand(*h.shape)
        return (h * (noise + 1)).sin()

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    model = Model(sometimes)
    plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
    assert plan.dropped_bytes > 0
    NUM_CALLS[:] = [1] * 9
    if hidden:
        with pytest.raises(keepwise.MismatchError):
            step(model, x)
        return
    plain = step(Model(sometimes), x)
    counts = []
    for _ in range(12):
        assert equal(plain, step(model, x))
        counts.append(plan.stats.num_audited)
    assert counts[0] > 0
    assert counts[1:] == [0] * 11
    plan.remove()


@pytest.mark.filterwarnings("ignore:keepwise. a batch of")
def test_plans_for_larger_batches_are_audited_where_the_recorded_one_dropped_nothing() -> None:
    model, x = Stack(depth=8), torch.randn(32, 16)
    plain = keepwise.fit(model, (x,), loss=loss, budget="max")
    plain.remove()
    plan = keepwise.fit(model, (x,), loss=loss, budget=int(plain.plain_peak_bytes * 1.01))
    assert plan.dropped_bytes == 0
    counts = []
    for _ in range(4):  # the second knows the size, and may run another plan than the first
        step(model, torch.randn(40, 16))
        counts.append((plan.stats.num_dropped > 0, plan.stats.num_audited > 0))
    assert counts[0] == (True, True)
    assert counts[2:] == [(True, False)] * 2
    plan.remove()


def test_what_is_cast_in_a_step_is_cast_in_the_proof() -> None:
    """`fit` runs inside of one `autocast`, whose cache would outlive its steps."""
    x = torch.randn(16, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plan = keepwise.fit(Model(lambda h: h), (x,), loss=loss, **EVERYTHING)
    assert plan.proof is not None
    assert plan.proof.num_replays_compared == sum(type(d).__name__ == "Recompute" for d in plan.decisions) > 0


class Marked(torch.autograd.Function):
    """Reads in backward what forward's caller put on the tensor that is saved; under hooks of any kind that is another object."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x.cos() * x.factor


def test_any_error_that_only_a_watched_step_has() -> None:
    def marked(h: torch.Tensor) -> torch.Tensor:
        h = h * 2
        h.factor = 3.0  # type: ignore[attr-defined]
        return Marked.apply(h)  # type: ignore[no-any-return]

    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    plain = step(Model(marked), x)
    model = Model(marked)
    plan = keepwise.fit(model, (x,), loss=loss, **EVERYTHING)
    assert plan.status is Status.INERT
    assert "factor" in str(plan)
    assert plan.explain() == str(plan)
    assert equal(plain, step(model, x))


def test_layers_that_have_no_shape_yet() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh())
    with pytest.raises(keepwise.KeepwiseError, match=r"0\.weight has no shape yet: run the model once"):
        keepwise.fit(model, (torch.randn(2, 3),), loss=loss, **EVERYTHING)
    model(torch.randn(2, 3))
    keepwise.fit(model, (torch.randn(2, 3),), loss=loss, **EVERYTHING)


def test_function_modes_see_nothing_of_how_a_plan_is_chosen() -> None:
    """The shapes of a batch are looked at before forward, to find the plan for its size."""

    def names(of: nn.Module, batch: torch.Tensor) -> list[str]:
        with SeenFunctions() as mode:
            loss(of(batch)).backward()
        return mode.names

    model, x = stack()
    wanted = [names(model, x), names(model, x[:32])]
    plan = keepwise.fit(model, x, loss=loss, budget="0.7x")
    assert names(model, x) == wanted[0]
    assert plan.stats.num_dropped
    assert names(model, x[:32]) == wanted[1]
