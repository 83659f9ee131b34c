"""What a chapter of the lesson consists of."""

from __future__ import annotations

from dataclasses import dataclass

from keepwise.lessons.training import Result

Cell = str | int | float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Measured rows."""

    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    """Strings, counts, gradient differences (float), or None where there is nothing to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chapter:
    """A question, the run that answers it, and why."""

    key: str
    """What `keepwise lesson KEY` calls it."""
    title: str
    text: str
    """Read before predicting."""
    question: str
    answer: Cell
    """Computed from the run."""
    why: str
    """Read after the run."""
    table: Table
    plot: str = ""


RUN_COLUMNS = ("run", "floats kept at the peak", "layer forwards run again", "largest gradient difference")


def run_row(label: str, result: Result, reference: Result | None) -> tuple[Cell, ...]:
    """A row under `RUN_COLUMNS`; `reference` is the run that keeps everything."""
    difference = None if reference is None else result.difference(reference)
    return label, result.peak_floats, result.forwards_again, difference


def show(cell: Cell) -> str:
    """A cell as the tables print it: counts with commas, 0.0 for equal bits, - for no comparison."""
    if cell is None:
        return "-"
    if isinstance(cell, str):
        return cell
    if isinstance(cell, int):
        return f"{cell:,}"
    return "0.0" if cell == 0.0 else f"{cell:.1e}"
