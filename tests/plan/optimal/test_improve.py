"""Local search beyond the family, against schedules of other methods at their own peaks."""

from __future__ import annotations

from keepwise.ir import Schedule, Step
from keepwise.plan.optimal.improve import MAX_JUDGED, LocalSearch
from keepwise.simulate import simulate
from tests.steps import StepBuilder, check_step, gpt_like


def unsaved_in_the_middle() -> Step:
    """A cheap saved tensor is made from one that is dear and that nobody saves: holding that one costs nothing in time."""
    b = StepBuilder()
    x = b.input(4)
    dear = b.one(x, size=2, seconds=50.0, target="aten.fft.default")
    losses = [b.one(dear, size=16, seconds=1.0, save_outputs=(0,)) for _ in range(3)]
    return check_step(b.build(b.one(*losses, size=2, seconds=1.0)))


def climbed(step: Step, start: Schedule, budget: int | None) -> tuple[list[tuple[int, float]], int]:
    """(peak, seconds) of every schedule that was judged, in order."""
    seen: list[tuple[int, float]] = []

    def judge(schedule: Schedule) -> tuple[int, float]:
        timeline = simulate(step, schedule)  # raises where the search made an illegal schedule
        seen.append((timeline.peak_bytes, timeline.added_seconds))
        return seen[-1]

    LocalSearch(step, judge).run([start], budget)
    return seen, len(seen)


def plain(step: Step) -> Schedule:
    formal = {step.values[save.value].storage for save in step.saves}
    return Schedule(held=tuple(sorted(s for s in formal if step.storages[s].birth >= 0)))


def test_a_tensor_that_nobody_saves_is_held_for_a_replay() -> None:
    step = unsaved_in_the_middle()
    most = simulate(step, plain(step)).peak_bytes
    seen, _ = climbed(step, plain(step), most - 10)
    best = min(seconds for peak, seconds in seen if peak <= most - 10)
    assert best < 50.0


def test_every_schedule_is_legal_and_the_number_is_bounded() -> None:
    step = gpt_like(1)
    seen, number = climbed(step, plain(step), None)
    assert 10 < number <= MAX_JUDGED
    assert min(peak for peak, _ in seen) < seen[0][0]


def test_it_is_the_same_every_time() -> None:
    step = gpt_like(1)
    assert climbed(step, plain(step), None) == climbed(step, plain(step), None)
