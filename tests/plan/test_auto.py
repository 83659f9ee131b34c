"""`auto` does what its name says, and says which it was."""

from __future__ import annotations

from keepwise.plan import get_planner
from keepwise.plan.auto import AutoPlanner
from keepwise.plan.optimal import plan_floor
from keepwise.simulate import simulate
from tests.steps import gpt_like


def test_each_choice_is_named_with_its_numbers() -> None:
    step = gpt_like(3)
    plain, floor = simulate(step).peak_bytes, plan_floor(step).floor_bytes
    auto = get_planner("auto")
    assert isinstance(auto, AutoPlanner)
    for budget, planner in (
        (None, "none"),
        (plain, "none"),
        ((plain + floor) // 2, "optimal"),
        (floor, "optimal"),
        (floor - 1, "floor"),
    ):
        schedule = auto.plan(step, budget)
        assert schedule.planner == planner
        assert bool(schedule.windows) == (planner != "none")
        timeline = simulate(step, schedule)
        if planner == "floor":
            assert timeline.peak_bytes == floor
        elif budget is not None:
            assert timeline.peak_bytes <= budget
        assert budget is None or f"{budget:,}" in schedule.why
