"""Steps that are wired otherwise than the recorded one: what is still dropped, what is kept and said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from .helpers import Chain, Outcome, batch, differences, fit, made, outcome, step, twice


class Masked(nn.Module):
    """Attention with a mask in some batches only, between layers that do not know of it."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = Chain(64, 4), Chain(64, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.before(x)
        q = h.unflatten(-1, (2, 32)).transpose(1, 2)
        o = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        return self.after(h + o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [6, 100])
def test_a_mask_that_only_some_batches_have_costs_nothing(length: int) -> None:
    model, x = made(Masked), batch(2, length, 64)
    plan = fit(model, x)
    mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
    step(model, x)
    usual = plan.stats.num_dropped
    for _ in range(2):
        twice(plan, lambda: step(model, x, mask))
        step(model, x, mask)
        assert plan.stats.num_deviations == 0
        assert plan.stats.num_dropped >= usual - 1
        twice(plan, lambda: step(model, x))


class Swapping(nn.Module):
    """The first product is of another tensor in some steps, and nothing saves that one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 512), Chain(512, 2)
        self.swaps = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.a(x)
        other = self.a(x + 1)  # a result that addmm does not save
        return self.b(torch.sin(other.detach() * 2 + h if not self.swaps else h * 2 + other)), other


def test_what_plain_lets_be_overwritten_is_not_held() -> None:
    """The result of a linear layer is saved by nobody: a user may write to it after forward."""
    model, x = made(Swapping), batch(64, 64)
    plan = fit(model, x, loss=lambda out: out[0].square().mean())

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        value, other = model(x)
        with torch.no_grad():
            other.mul_(3.0)
        loss = value.square().mean()
        loss.backward()
        return outcome(model, loss)

    for swaps in (False, True, False, True):
        setattr(model, "swaps", swaps)  # noqa: B010
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            twice(plan, run)


class Branching(nn.Module):
    """Goes another way in some steps."""

    other = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(64, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        if self.other:
            return torch.sinh(torch.cosh(self.b(torch.erf(h))).atan())
        return torch.tanh(torch.sigmoid(self.b(torch.tanh(h))) * 2)


def test_one_warning_says_that_more_than_planned_is_kept() -> None:
    model, x = made(Branching), batch(64, 64)
    plan = fit(model, x)
    step(model, x)
    setattr(model, "other", True)  # noqa: B010
    with pytest.warns(
        UserWarning, match=r"differs from the recorded one, so .* [KM]iB are held that the plan does not hold"
    ) as found:
        got = step(model, x)
    assert found[0].filename.endswith("helpers.py")
    assert "First difference: aten." in str(found[0].message)
    with plan.paused():
        assert differences(step(model, x), got) == []
    step(model, x)  # warnings are errors: a second one would raise
    assert plan.stats.kept_share > 0.05
