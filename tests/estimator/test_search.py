"""What fits: borders are borders."""

import hypothesis.strategies as st
import pytest
from hypothesis import given
from msgspec.structs import replace

from keepwise.cost import DEVICES, device_of
from keepwise.estimator.api import architecture_of, make_setup
from keepwise.estimator.compute import Estimator
from keepwise.estimator.search import cheapest, largest, largest_batch, longest_sequence, policies

LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "intermediate_size": 2816,
    "vocab_size": 4096,
}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=300), st.integers(0, 200_000), st.integers(1, 7))
def test_largest_is_the_border(increments, budget, step):
    """Against trying every number, over any growing function."""
    sums = [0]
    for n in increments:
        sums.append(sums[-1] + n)
    most = len(increments) * step

    def peak(number):
        assert number % step == 0
        return sums[number // step]

    expected = max((n * step for n in range(len(sums)) if n and sums[n] <= budget), default=0)
    assert largest(peak, budget, most, step) == expected


@pytest.mark.parametrize("checkpointing", ["none", "full", "sac", "keepwise"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_batch_and_sequence_fit_and_one_more_does_not(attention, checkpointing):
    estimator = Estimator(architecture_of(LLAMA))
    budget = 12 << 30
    setup = make_setup(checkpointing=checkpointing, sequence=1024, attention=attention, budget=budget)
    batch = largest_batch(estimator, setup, budget)
    assert batch >= 1
    assert estimator.run(replace(setup, batch=batch)).peak_bytes <= budget
    assert estimator.run(replace(setup, batch=batch + 1)).peak_bytes > budget
    sequence = longest_sequence(estimator, setup, budget)
    assert sequence >= 128
    assert estimator.run(replace(setup, sequence=sequence)).peak_bytes <= budget
    assert estimator.run(replace(setup, sequence=sequence + 128)).peak_bytes > budget


def test_nothing_fits_too_little():
    estimator = Estimator(architecture_of(LLAMA))
    setup = make_setup(checkpointing="none")
    assert largest_batch(estimator, setup, 1 << 20) == 0
    assert longest_sequence(estimator, setup, 1 << 20) == 0
    assert cheapest(estimator, setup, 1 << 20) is None


def test_cheapest_takes_no_more_than_is_needed():
    estimator = Estimator(architecture_of(LLAMA))
    setup = make_setup(checkpointing="none", sequence=4096, batch=8)
    plain = estimator.run(setup).peak_bytes
    full = estimator.run(make_setup(checkpointing="full", sequence=4096, batch=8)).peak_bytes
    enough = cheapest(estimator, setup, plain)
    assert enough is not None
    assert enough.changes == ("checkpointing none",)
    between = cheapest(estimator, setup, (plain + full) // 2)
    assert between is not None
    assert between.fits
    assert enough.step_seconds < between.step_seconds
    side_by_side = [c for c in policies(estimator, setup, (plain + full) // 2) if c.fits]
    assert between.step_seconds == min(c.step_seconds for c in side_by_side)
    scarce = cheapest(estimator, setup, full - (1 << 28))
    assert scarce is not None
    assert len(scarce.changes) > 1


def test_devices_by_name_and_by_size():
    assert device_of("H100") is DEVICES["h100"]
    assert device_of("24GiB").memory_bytes == 24 << 30
    for device in DEVICES.values():
        assert 0 < device.usable_bytes <= device.memory_bytes
    assert DEVICES["rtx4090"].usable_bytes == (24 << 30) - (24 << 30) // 20
    assert DEVICES["t4"].usable_bytes == 15 << 30
