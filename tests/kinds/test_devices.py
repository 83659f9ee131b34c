"""A model on several devices: a plan or one clear error."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import keepwise

from .parts import Stack
from .program import mean_square


def test_a_model_on_two_devices_gets_one_clear_error() -> None:
    model = Stack()
    model.blocks[2] = nn.Linear(8, 8, device="meta")
    with pytest.raises(keepwise.KeepwiseError, match="meta"):
        keepwise.fit(model, (torch.randn(4, 8),), loss=mean_square, budget="max")
    assert type(model) is Stack


def test_a_batch_on_another_device_gets_one_clear_error() -> None:
    with pytest.raises(keepwise.KeepwiseError, match="meta"):
        keepwise.fit(Stack(), (torch.randn(4, 8, device="meta"),), loss=mean_square, budget="max")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator")
def test_generators_of_the_accelerator_are_as_before() -> None:
    model = Stack(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.GELU())).cuda()
    before = torch.cuda.get_rng_state()
    plan = keepwise.fit(
        model, (torch.randn(4, 8, device="cuda"),), loss=mean_square, planner="recompute_everything", budget="max"
    )
    assert torch.equal(before, torch.cuda.get_rng_state())
    plan.remove()
