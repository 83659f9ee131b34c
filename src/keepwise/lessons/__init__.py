"""Activation checkpointing from scratch, as a lesson.

Read `scratch.py` first: it is the whole algorithm. `placements.py` holds the policies, `training.py` a network to try
them on. `chapters()` runs every experiment and returns what `keepwise lesson` prints; `torch_lesson.py` is the same
lesson in PyTorch, and `notebook.py` goes through it cell by cell.
"""

from __future__ import annotations

from collections.abc import Callable

from keepwise.lessons import chapters_what, chapters_where
from keepwise.lessons.chapter import Chapter

# Chapter key -> the function that runs its experiments, in reading order.
CHAPTERS: dict[str, Callable[[], Chapter]] = {
    "every-k": chapters_where.every_k,
    "compute": chapters_where.compute,
    "sqrt": chapters_where.square_root,
    "budget": chapters_where.under_a_budget,
    "recursive": chapters_where.recursive,
    "uneven": chapters_where.uneven,
    "selective": chapters_what.selective,
    "offload": chapters_what.offload,
    "dropout": chapters_what.dropout,
    "accumulation": chapters_what.accumulation,
    "categories": chapters_what.not_reduced,
    "summary": chapters_what.summary,
}


def chapters() -> list[Chapter]:
    """Run all experiments."""
    return [run() for run in CHAPTERS.values()]
