"""The lesson on a terminal: read, predict, run, compare."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from keepwise.lessons.chapter import Cell, Chapter, show


def print_chapter(chapter: Chapter, console: Console, *, number: int, ask: Callable[[str], str] | None = None) -> bool:
    """Print one chapter. With `ask`, stop for a prediction before the measured rows; returns whether it was right."""
    console.print(Text(f"\n{number}. {chapter.title}", style="bold"))
    console.print(Text(chapter.text))
    console.print(Text("\nPredict: " + chapter.question, style="italic"))
    prediction = ask("Your prediction") if ask else None
    console.print()
    console.print(as_table(chapter))
    if chapter.plot:
        console.print(Text(chapter.plot, no_wrap=True, overflow="ignore"), soft_wrap=True)
    right = prediction is not None and matches(prediction, chapter.answer)
    verdict = "" if prediction is None else "Right. " if right else f"You said {prediction}. "
    console.print(Text(f"\n{verdict}Measured: {show(chapter.answer)}", style="bold"))
    console.print(Text(chapter.why))
    return right


def as_table(chapter: Chapter) -> RichTable:
    """The measured rows of a chapter; numbers to the right."""
    table = RichTable(pad_edge=False)
    for index, column in enumerate(chapter.table.columns):
        words = all(isinstance(row[index], str) for row in chapter.table.rows)
        table.add_column(column, justify="left" if words else "right", overflow="fold")
    for row in chapter.table.rows:
        table.add_row(*(Text(show(cell)) for cell in row))
    return table


def matches(prediction: str, answer: Cell) -> bool:
    """Whether what was typed is the answer: 1234, 1,234 and 1_234 are one number; 33% is +33.3 % rounded."""
    typed = prediction.strip().lower().replace(",", "").replace("_", "").replace(" ", "")
    if isinstance(answer, str) and answer.endswith("%"):
        try:
            value = abs(float(typed.strip("%+-")))
        except ValueError:
            return False
        return abs(value - abs(float(answer.strip("%+-")))) < 0.5
    return typed == show(answer).replace(",", "").lower()
