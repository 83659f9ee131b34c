"""Many shapes: each step as in plain, and a handful of plans."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import keepwise

from .compare import mapping_differences
from .harness import options, seed_all
from .shapes import _Tokens, tokens


def _built() -> Any:
    seed_all(1)
    return _Tokens(longest=256).train()


def _step(model: Any, ids: torch.Tensor) -> dict[str, Any]:
    model.zero_grad(set_to_none=True)
    loss = model(ids)
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters()}
    return {"loss": loss.detach(), "generator": torch.get_rng_state(), **grads}


def _train(model: Any, batches: list[torch.Tensor]) -> list[dict[str, Any]]:
    seed_all(2)
    return [_step(model, ids) for ids in batches]


@pytest.mark.parametrize("how", ["everything", "min"])
def test_a_plan_for_several_batches(how: str) -> None:
    batches = [tokens(2, 16), tokens(2, 7), tokens(3, 4)]
    plain = _train(_built(), batches * 2)
    model = _built()
    plan = keepwise.fit(model, batches=[(ids,) for ids in batches], **options(how))
    assert len(plan.shapes) >= 1
    for a, b in zip(plain, _train(model, batches * 2), strict=True):
        assert mapping_differences(a, b) == []
    plan.remove()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["everything", "min", "0.6x"])
def test_two_hundred_lengths(how: str) -> None:
    lengths = list(range(3, 203))
    random.Random(0).shuffle(lengths)
    batches = [tokens(2, n) for n in lengths]
    plain = _train(_built(), batches)
    model = _built()
    plan = keepwise.fit(model, (tokens(2, max(lengths)),), **options(how))
    for n, a, b in zip(lengths, plain, _train(model, batches), strict=True):
        assert mapping_differences(a, b) == [], n
    assert len(plan.shapes) <= 6
    chooser: Any = plan.runner.chooser
    assert (chooser is None) == (how != "0.6x")
    assert chooser is None or 1 < chooser.num_plans <= 8, "plans for two hundred lengths"
    plan.remove()


def test_a_shape_that_was_not_planned_drops_as_much_of_its_tensors() -> None:
    model = _built()
    plan = keepwise.fit(model, (tokens(2, 12),), **options("everything"))
    counts = []
    for length in (12, 9, 20):
        seed_all(2)
        _step(model, tokens(2, length))
        counts.append((plan.stats.num_dropped, plan.stats.num_deviations))
    assert len(set(counts)) == 1, counts
    assert counts[0][0] > 0
    plan.remove()
