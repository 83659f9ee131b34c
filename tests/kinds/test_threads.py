"""Several threads at once: each model trains as it does alone, and nobody's draws are disturbed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import keepwise

from .compare import frozen, mapping_differences
from .harness import options, seed_all
from .parts import Block, Stack
from .program import mean_square


class Noisy(Block):
    """Draws from a generator of its own: the global one belongs to all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        keep = torch.empty_like(h).bernoulli_(0.7, generator=self.generator)
        return torch.tanh(h) * keep * h.sin()


def built(seed: int) -> tuple[Any, torch.Tensor]:
    seed_all(seed)
    return Stack(Noisy), torch.randn(6, 8)


def train(model: Any, x: torch.Tensor, num_steps: int = 15) -> list[dict[str, Any]]:
    records = []
    for i in range(num_steps):
        model.zero_grad(set_to_none=True)
        loss = mean_square(model(x[: 6 - i % 3]))
        loss.backward()
        records.append({"loss": frozen(loss), **{n: frozen(p.grad) for n, p in model.named_parameters()}})
        with torch.no_grad():
            for p in model.parameters():
                p.add_(p.grad, alpha=-0.05)
    return records


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run each in a thread of its own, all from the same moment."""
    found: list[Any] = [None] * len(works)
    errors: list[BaseException] = []
    barrier = threading.Barrier(len(works))

    def run(k: int) -> None:
        try:
            barrier.wait()
            found[k] = works[k]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def same(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> None:
    for k, (x, y) in enumerate(zip(a, b, strict=True)):
        assert mapping_differences(x, y) == [], k


@pytest.mark.parametrize("how", ["everything", "min"])
def test_two_planned_models_train_at_once(how: str) -> None:
    plain = [train(*built(seed)) for seed in (1, 2)]
    models = [built(seed) for seed in (1, 2)]
    plans = [keepwise.fit(m, (x,), loss=mean_square, **options(how)) for m, x in models]
    got = at_once(*(lambda m=m, x=x: train(m, x) for m, x in models))
    for a, b in zip(plain, got, strict=True):
        same(a, b)
    for plan in plans:
        assert plan.stats.num_dropped > 0
        plan.remove()


def test_one_plan_on_two_models_that_train_at_once() -> None:
    plain = [train(*built(seed)) for seed in (1, 2)]
    models = [built(seed) for seed in (1, 2)]
    plan = keepwise.fit(models[0][0], (models[0][1],), loss=mean_square, **options("everything"))
    plan.apply(models[1][0])
    got = at_once(*(lambda m=m, x=x: train(m, x) for m, x in models))
    for a, b in zip(plain, got, strict=True):
        same(a, b)
    plan.remove()


def test_planning_while_another_model_trains() -> None:
    plain = [train(*built(seed)) for seed in (1, 2)]
    (first, x), (second, y) = built(1), built(2)
    plan = keepwise.fit(first, (x,), loss=mean_square, **options("everything"))
    got, other = at_once(
        lambda: train(first, x),
        lambda: keepwise.fit(second, (y,), loss=mean_square, **options("everything")),
    )
    same(plain[0], got)
    same(plain[1], train(second, y))
    assert other.proof.identical
    plan.remove()
    other.remove()


class Drawing(nn.Module):
    """Draws from the global generator by operators that take none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sin(layer(x) * torch.rand_like(x) + torch.randn_like(x))
        return x


def test_another_thread_draws_while_replays_do() -> None:
    seed_all(1)
    model, x = Drawing(), torch.randn(64, 8)
    plan = keepwise.fit(model, (x,), loss=mean_square, **options("everything"))
    losses = [mean_square(model(x)) for _ in range(40)]
    seed_all(5)
    alone = [torch.rand(3) for _ in range(4000)]
    seed_all(5)
    _, drawn = at_once(
        lambda: [loss.backward() for loss in losses],
        lambda: [torch.rand(3) for _ in range(4000)],
    )
    assert plan.stats.num_dropped > 0
    assert all(torch.equal(a, b) for a, b in zip(alone, drawn, strict=True))
    plan.remove()
