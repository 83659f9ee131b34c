"""Planners of the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from keepwise._errors import UsageError
from keepwise.ir import Schedule, Step
from keepwise.plan import get_planner, register_planner, registered_planners, unregister_planner
from keepwise.plan.optimal import plan_optimal
from keepwise.simulate import simulate
from tests.steps import gpt_like


class Mine:
    """Another planner's schedule under a name of its own."""

    def __init__(self, name: str = "boundaries:h.1,h.2") -> None:
        self.name = name
        self.budgets: list[int | None] = []

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        self.budgets.append(budget_bytes)
        return msgspec.structs.replace(get_planner(self.name).plan(step, None), planner="what it calls itself")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    for name in registered_planners():
        unregister_planner(name)


def test_a_registered_planner_is_found_by_its_name_and_asked_by_auto() -> None:
    mine = Mine()
    register_planner("mine", mine)
    assert get_planner("mine") is mine
    step = gpt_like(3)
    peak = simulate(step, mine.plan(step, None)).peak_bytes
    result = plan_optimal(step, peak)
    assert mine.budgets == [None, peak]
    assert "candidates" in result.layers
    unregister_planner("mine")
    with pytest.raises(UsageError, match="no planner is called 'mine'"):
        get_planner("mine")


def test_where_its_schedule_wins_auto_says_so() -> None:
    mine = Mine("boundaries:h.1,h.2,h.3,h.5")
    step = gpt_like(7)
    register_planner("mine", mine)
    timeline = simulate(step, mine.plan(step, None))

    def interrupt(what: str, gap: float) -> None:
        if what == "chain":  # what others propose has been seen by then, the search has not begun
            raise KeyboardInterrupt

    result = plan_optimal(step, timeline.peak_bytes, progress=interrupt)
    assert result.added_seconds == pytest.approx(timeline.added_seconds)
    assert result.schedule.planner == "optimal"
    assert "found by the planner 'mine'" in result.schedule.why
    # The search finds better.
    result = plan_optimal(step, timeline.peak_bytes)
    assert result.added_seconds < timeline.added_seconds
    assert "found by" not in result.schedule.why


def test_a_planner_that_raises_or_returns_nonsense_costs_a_candidate_only() -> None:
    class Broken:
        def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
            raise RuntimeError("no idea")

    class Wrong:
        def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
            return Schedule()  # everything is dropped and nothing replayed

    class Mute:
        def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
            return None  # pyright: ignore[reportReturnType]

    step = gpt_like(2)
    budget = simulate(step, get_planner("full").plan(step, None)).peak_bytes
    expected = plan_optimal(gpt_like(2), budget)
    for planner, fault in (
        (Wrong(), "returned an illegal schedule: .*dropped and read"),
        (Broken(), "raised RuntimeError"),
        (Mute(), "returned NoneType, not a keepwise.ir.Schedule"),
    ):
        register_planner("other", planner, replace=True)
        with pytest.warns(UserWarning, match=f"the planner 'other' {fault}.*; it is left out"):
            assert plan_optimal(step, budget).schedule == expected.schedule


def test_names() -> None:
    for wrong in ("", "auto", "full", "every", "a b", "x:y"):
        with pytest.raises(UsageError, match="cannot name a planner"):
            register_planner(wrong, Mine())
    with pytest.raises(UsageError, match=r"an object with plan\(step, budget_bytes\), got int"):
        register_planner("mine", 3)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match=r"pass Mine\(\), not the class"):
        register_planner("mine", Mine)  # pyright: ignore[reportArgumentType]
    register_planner("mine", Mine())
    with pytest.raises(UsageError, match="replace=True"):
        register_planner("mine", Mine())
    other = Mine()
    register_planner("mine", other, replace=True)
    assert registered_planners() == {"mine": other}
    with pytest.raises(UsageError, match="no registered planner"):
        unregister_planner("yours")
