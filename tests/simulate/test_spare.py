"""What a schedule leaves free: never more than fits under the peak, whoever borrows."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import NO_WINDOW, Schedule, Spare, Step
from keepwise.plan import get_planner
from keepwise.simulate import Timeline, recycled_bytes, simulate, spare_of
from keepwise.simulate.timeline import LiveKind
from tests.steps import chain, gpt_like, random_steps, unet_like

PLANNERS = ["full", "every:2", "sqrt", "recursive", "recompute_everything"]


def held_by_loans(timeline: Timeline, spare: Spare) -> tuple[np.ndarray, Counter[int]]:
    """Bytes that loans hold at each moment, and while each window's replay runs but the borrower's."""
    moments = np.zeros(len(timeline.step.ops), dtype=np.int64)
    replays: Counter[int] = Counter()
    retained = {(c.live.window, c.live.id): c for c in timeline.charges if c.live.kind is LiveKind.RETAINED}
    for (lender, storage), borrower in spare.loans.items():
        start, nbytes = timeline.replays[borrower].start, timeline.index.charge[storage]
        if lender == NO_WINDOW:
            last = int(timeline.ends[storage])
            assert storage in timeline.step.saved_storages
            assert all(storage != s for _, s in retained)
        else:
            last = retained[lender, storage].last
        assert last < start, "lent while it is live"
        moments[last + 1 : start] += nbytes
        for r in timeline.replays:
            if last < r.start and (r.start, r.window) < (start, borrower):
                replays[r.window] += nbytes
    return moments, replays


def check(step: Step, schedule: Schedule) -> Spare:
    timeline = simulate(step, schedule)
    spare = spare_of(timeline)
    moments, replays = held_by_loans(timeline, spare)
    assert (timeline.live_bytes + moments).max(initial=0) <= timeline.peak_bytes
    for r in timeline.replays:
        assert len(spare.replays[r.window]) == len(r.ops)
        for inside, free in zip(r.inner_bytes, spare.replays[r.window], strict=True):
            assert free >= 0
            assert r.base_bytes + inside + free + replays[r.window] == timeline.peak_bytes
    assert all(n + free == timeline.peak_bytes for n, free in zip(timeline.live_bytes, spare.moments, strict=True))
    wanted = Counter((b, timeline.index.charge[s]) for (_, s), b in spare.loans.items())
    for (borrower, size), n in wanted.items():
        assert n <= sum(b[1] == size for b in timeline.replays[borrower].buffers)
    return spare


@settings(max_examples=150, deadline=None)
@given(random_steps(), st.sampled_from(PLANNERS))
def test_loans_never_raise_the_peak(step: Step, planner: str) -> None:
    check(step, get_planner(planner).plan(step, None))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("step", [chain(9), gpt_like(4), gpt_like(3, dropout=True), unet_like(2)])
def test_families(step: Step, planner: str) -> None:
    check(step, get_planner(planner).plan(step, None))


def test_a_block_lends_to_the_next_one() -> None:
    step = gpt_like(4)
    spare = check(step, get_planner("full").plan(step, None))
    assert spare.loans
    assert all(lender != borrower for (lender, _), borrower in spare.loans.items())


def test_everything_is_recycled_only_where_ops_can() -> None:
    step = gpt_like(4)
    timeline = simulate(step, get_planner("full").plan(step, None))
    spare = spare_of(timeline)
    assert recycled_bytes(timeline, spare, lambda target: False) == 0
    most = recycled_bytes(timeline, spare, lambda target: True)
    made = sum(timeline.index.charge[s.id] for s in step.storages if s.birth >= 0)
    assert 0 < most <= made


def test_scaled() -> None:
    spare = Spare(moments=(4, 10), replays=((3,),), loans={(0, 1): 2}).scaled(0.5)
    assert (spare.moments, spare.replays, spare.loans) == ((2, 5), ((1,),), {(0, 1): 2})
