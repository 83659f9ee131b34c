"""Masks held as bits: the codec against what it packed, and whole steps against the plain ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import keepwise
from keepwise.ir.packing import with_packing
from keepwise.ir.validate import validate
from keepwise.runtime import packing, wiring
from keepwise.simulate import simulate

from .helpers import batch, made, mean_square, step, twice

DTYPES = [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]


def bits_of(t: Tensor) -> bytes:
    whole = torch.empty(0, dtype=torch.uint8).set_(t.untyped_storage())  # type: ignore[call-overload]
    return whole.numpy().tobytes()


def there_and_back(t: Tensor, bits: packing.Bits) -> Tensor:
    return packing.unpack(*bits, t.untyped_storage().nbytes() // t.element_size(), t.shape, t.stride(), t.dtype)


@given(
    numel=st.integers(2, 300),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
    transposed=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_two_values_come_back_bit_for_bit(numel: int, dtype: torch.dtype, seed: int, transposed: bool) -> None:
    rng = np.random.default_rng(seed)
    mask = torch.from_numpy(rng.random(numel) < rng.random())
    low, high = (False, True) if dtype is torch.bool else rng.choice([0, 1, 2, 3, 7], 2, replace=False).tolist()
    t = torch.where(mask, torch.tensor(high, dtype=dtype), torch.tensor(low, dtype=dtype))
    if transposed:
        t = torch.stack((t, t)).t()
        t = t.t().contiguous().t()
    bits = packing.pack(t)
    if mask.all() or not mask.any():
        assert bits is None
        return
    assert bits is not None
    assert bits[0].nbytes == -(-t.numel() // 8)
    back = there_and_back(t, bits)
    assert (back.shape, back.stride(), back.dtype) == (t.shape, t.stride(), t.dtype)
    assert bits_of(back) == bits_of(t)


def test_values_are_told_apart_by_their_bits() -> None:
    t = torch.tensor([0.0, -0.0, 0.0, -0.0, float("nan")])
    assert packing.pack(t) is None
    zeros = t[:4].clone()
    bits = packing.pack(zeros)
    assert bits is not None
    assert bits_of(there_and_back(zeros, bits)) == bits_of(zeros)


@pytest.mark.parametrize(
    "t",
    [
        torch.arange(100.0),
        torch.cat([torch.zeros(20_000), torch.ones(1), torch.full((1,), 2.0)]),
        torch.tensor([0.0, 1.0] * 50)[3:],
        torch.zeros(0),
        torch.zeros(8, dtype=torch.complex128),
    ],
    ids=["many values", "a third value at the end", "part of a storage", "empty", "16 bytes an element"],
)
def test_what_has_no_packed_form(t: Tensor) -> None:
    assert packing.pack(t) is None


def test_the_form_for_other_devices_is_the_same() -> None:
    """The arithmetic that stands in for NumPy there, run here."""
    for numel in (1, 7, 8, 9, 1003):
        mask = torch.rand(numel) < 0.4
        padded = torch.cat([mask, mask.new_zeros(-numel % 8)])
        words = (padded.view(torch.int64) * packing._GATHER).bitwise_right_shift_(56).to(torch.uint8)
        assert words.tolist() == np.packbits(mask.numpy(), bitorder="little").tolist()
        spread = words.to(torch.int64).mul_(packing._SPREAD).bitwise_and_(packing._SELECT)
        assert torch.equal(spread.view(torch.uint8).ne(0)[:numel], mask)


class Dropping(nn.Module):
    """Feed-forward blocks with two dropouts each."""

    def __init__(self, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(depth))
        self.back = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(depth))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        for wide, back in zip(self.wide, self.back, strict=True):
            x = x + self.drop(back(self.drop(torch.tanh(wide(x) * 2))))
        return x


@pytest.fixture
def cheap_packing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packing wins whatever the clock says."""
    real = packing.packed_price
    monkeypatch.setattr(
        "keepwise.trace.saved.packed_price", lambda t: (found[0], 1e-9) if (found := real(t)) is not None else None
    )


def planned(model: nn.Module, x: Tensor) -> keepwise.Plan:
    return keepwise.fit(model, x, loss=mean_square, budget="0.5x")


@pytest.mark.usefixtures("cheap_packing")
def test_masks_are_packed_and_the_step_is_the_plain_one() -> None:
    model, x = made(Dropping), batch(256, 64)
    plan = planned(model, x)
    packs = [d for d in plan.decisions if d.kind == "pack"]
    assert packs
    assert plan.packed_bytes == sum(d.nbytes for d in packs)
    assert plan.proof is not None
    assert plan.proof.identical
    for seed in (1, 2, 3):
        twice(plan, lambda: step(model, x), seed=seed)
        step(model, x)
        assert plan.stats.num_deviations == 0
    plan.audit()
    step(model, x)
    assert plan.stats.num_audited > 0
    assert "of bits, expanded in backward" in plan.explain("drop")


@pytest.mark.usefixtures("cheap_packing")
def test_a_mask_without_a_packed_form_is_kept() -> None:
    model, x = Dropping(), batch(256, 64)
    plan = planned(model, x)
    step(model, x)
    dropped = plan.stats.num_dropped
    model.drop.p = 0.0  # the recorded op gives ones only
    with pytest.warns(UserWarning, match="no two values that could be packed|differs from the recorded"):
        got = step(model, x)
    assert 0 < plan.stats.num_dropped < dropped
    with plan.paused():
        want = step(model, x)
    assert all(torch.equal(want[k], got[k]) for k in want if k.startswith("grad"))


@pytest.mark.usefixtures("cheap_packing")
def test_wrong_bits_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Dropping), batch(256, 64)
    plan = planned(model, x)

    def wrong(t: Tensor) -> packing.Bits | None:
        bits = packing.pack(t)
        return (bits[0].roll(1), bits[1]) if bits is not None else None

    monkeypatch.setattr(wiring, "pack", wrong)
    plan.audit()
    with pytest.raises(keepwise.MismatchError):
        step(model, x)


@pytest.mark.usefixtures("cheap_packing")
def test_the_rewritten_step_is_the_same_plain_step() -> None:
    model, x = made(Dropping), batch(256, 64)
    plan = keepwise.fit(model, x, loss=mean_square, planner="none", budget="max")
    packed = with_packing(plan.step)
    changed = [op for op in packed.ops if op.unpacks]
    assert len(changed) == 8
    assert validate(packed) == []
    ours, plain = simulate(packed), simulate(plan.step)
    for op in plan.step.ops:  # but for what packing itself needs
        extra = packed.ops[op.index].workspace_bytes - op.workspace_bytes
        assert ours.live_bytes[op.index] == plain.live_bytes[op.index] + extra
        assert (extra > 0) == packed.ops[op.index].unpacks
    some = frozenset(s.id for s in plan.step.storages if s.packed_bytes)
    assert with_packing(plan.step, but=some) is plan.step


def test_packing_that_is_dearer_than_drawing_again_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepwise.trace.saved.packed_price", lambda t: (t.nbytes // 32, 10.0))
    model, x = made(Dropping), batch(256, 64)
    plan = planned(model, x)
    assert not any(op.unpacks for op in plan.step.ops)
    assert plan.packed_bytes == 0
