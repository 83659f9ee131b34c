"""Plots: what is drawn where."""

from __future__ import annotations

from keepwise.lessons import plot


def test_bars_are_in_proportion():
    first, second = plot.bars(["a", "long"], [10, 5], width=8).splitlines()
    assert first == "a     ████████ 10"
    assert second == "long  ████ 5"


def test_area_reaches_the_top_only_at_the_top():
    lines = plot.area([0, 5, 10, 5], top=10, title="t", width=4, height=2).splitlines()
    assert lines == ["t", "│  █", "│ ███", "└────"]


def test_a_column_shows_the_largest_value_of_its_stretch():
    lines = plot.area([0, 9, 0, 0], top=9, title="t", width=2, height=1).splitlines()
    assert lines[1] == "│█"


def test_points_stand_at_their_coordinates():
    lines = plot.plane([(0, 10, "a"), (8, 0, "b")], x_title="x", y_title="y", width=8, height=2).splitlines()
    assert lines[1] == "10 │a"
    assert lines[3] == " 0 │        b"
