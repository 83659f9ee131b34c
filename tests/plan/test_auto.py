"""`auto` says what it would do, and does it."""

from __future__ import annotations

from keepwise.plan import get_planner
from keepwise.plan.auto import AutoPlanner
from keepwise.plan.optimal import plan_floor
from keepwise.simulate import simulate
from tests.steps import gpt_like


def test_each_choice_is_what_is_done() -> None:
    step = gpt_like(3)
    plain, floor = simulate(step).peak_bytes, plan_floor(step).floor_bytes
    auto = AutoPlanner()
    for budget, planner in (
        (None, "none"),
        (plain, "none"),
        ((plain + floor) // 2, "optimal"),
        (floor, "optimal"),
        (floor - 1, "floor"),
    ):
        choice = auto.choose(step, budget)
        assert choice.planner == planner
        schedule = auto.plan(step, budget)
        assert choice.why in schedule.why
        assert schedule.planner == planner
        timeline = simulate(step, schedule)
        if planner == "floor":
            assert timeline.peak_bytes == floor
        elif budget is not None:
            assert timeline.peak_bytes <= budget
            assert f"{budget:,}" in choice.why


def test_auto_has_a_name() -> None:
    step = gpt_like(3)
    plain, floor = simulate(step).peak_bytes, plan_floor(step).floor_bytes
    auto = get_planner("auto")
    assert isinstance(auto, AutoPlanner)
    schedule = auto.plan(step, (plain + floor) // 2)
    assert schedule == AutoPlanner().plan(step, (plain + floor) // 2)
    assert schedule.windows
