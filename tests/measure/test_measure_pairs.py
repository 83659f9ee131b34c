import gc
import itertools
import statistics

import pytest

from keepwise._errors import UsageError
from keepwise.measure import Seconds, paired, pairs


@pytest.fixture
def clock(monkeypatch):
    """A clock that steps set themselves."""
    now = [0.0]
    monkeypatch.setattr(pairs.time, "perf_counter", lambda: now[0])
    return now


def test_steps_take_turns_and_ratios_compare_the_same_round(clock):
    order = []
    slow = itertools.cycle([9.0, 1.0, 2.0, 4.0])  # The first one is the warm-up's.

    def plain():
        order.append("plain")
        plain.seconds = next(slow)
        clock[0] += plain.seconds

    def planned():
        order.append("planned")
        clock[0] += 1.5 * plain.seconds

    found = paired({"plain": plain, "planned": planned}, 3)
    assert order == ["plain", "planned"] * 4
    assert found.seconds == {"plain": (1.0, 2.0, 4.0), "planned": (1.5, 3.0, 6.0)}
    assert found.ratios["plain"] == (1, 1, 1)
    assert found.ratio("planned") == pytest.approx(1.5)
    assert found.ratio_quartiles("planned") == pytest.approx((1.5, 1.5))


def test_no_garbage_collection_during_a_run_and_its_state_is_kept(clock):
    seen = []

    def step():
        seen.append(gc.isenabled())
        clock[0] += 1

    paired({"a": step}, 2, warmup=0)
    assert seen == [False, False]
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        paired({"a": lambda: 1 / 0}, 1, warmup=0)
    assert gc.isenabled()


def test_seconds():
    seconds = Seconds(samples=(5.0, 1.0, 2.0, 3.0, 4.0))
    assert seconds.median == float(seconds) == 3.0
    low, _, high = statistics.quantiles(seconds.samples, n=4, method="inclusive")
    assert seconds.spread == high - low == 2.0
    assert Seconds(samples=(1.0,)).spread == 0
    assert "3 s" in str(seconds)


@pytest.mark.parametrize(("steps", "rounds"), [({}, 3), ({"a": print}, 0)])
def test_nothing_to_time(steps, rounds):
    with pytest.raises(UsageError, match="at least one"):
        paired(steps, rounds)
