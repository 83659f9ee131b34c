"""bf16 autocast over padded batches of many lengths: every step stays within the budget, and every bit is that of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import keepwise
from keepwise.measure import allocator_peak

transformers = pytest.importorskip("transformers")

BUDGET = 8 * 2**20
LENGTHS = [61, 74, 87, 67, 80, 55, 40]


def batch(longest: int) -> dict[str, torch.Tensor]:
    numbers = torch.Generator().manual_seed(longest)
    ids = torch.zeros(4, longest, dtype=torch.long)
    for i, length in enumerate((longest, longest - 9, longest // 2, longest - 2)):
        ids[i, :length] = torch.randint(2, 256, (length,), generator=numbers)
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def train(budget: int | None) -> tuple[list[float], dict[str, torch.Tensor], list[int], keepwise.Plan | None]:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        n_layer=3, n_embd=64, n_head=4, vocab_size=256, n_positions=128, bos_token_id=1, eos_token_id=1
    )
    model: Any = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [batch(length) for length in LENGTHS]
    plan = None
    if budget is not None:
        with torch.autocast("cpu", torch.bfloat16):
            plan = keepwise.fit(model, batches[0], budget=budget, optimizer=optimizer)
    losses: list[float] = []
    peaks: list[int] = []
    for inputs in batches:

        def step(inputs: dict[str, torch.Tensor] = inputs) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**inputs).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

        above = allocator_peak(step)
        if len(losses) > 1:  # gradients and the optimizer's state are there from the second step on
            weights = sum(p.nbytes for p in model.parameters())
            state = sum(t.nbytes for s in optimizer.state.values() for t in s.values())
            peaks.append(2 * weights + state + sum(t.nbytes for t in inputs.values()) + above)
        optimizer.zero_grad(set_to_none=False)
    return losses, model.state_dict(), peaks, plan


def test_the_budget_holds_for_every_length_and_no_bit_changes() -> None:
    plain_losses, plain_weights, plain_peaks, _ = train(None)
    losses, weights, peaks, plan = train(BUDGET)
    assert losses == plain_losses
    assert all(torch.equal(weights[name], plain_weights[name]) for name in plain_weights)
    assert sum(peak > BUDGET for peak in plain_peaks) >= 4
    assert max(peaks) <= BUDGET * 1.005
    assert plan is not None
    assert plan.stats.num_deviations == 0
    assert plan.runner.chooser.num_plans > 2  # type: ignore[union-attr]
