"""Batches that take different paths: a plan for each structure that was recorded.

A batch with another set of tensors (an attention mask, labels) runs other ops. Where the plan of the largest batch would keep
tensors for that reason, the structure is recorded and planned for itself, within the same budget; which tensors a batch has
decides which of the plans runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepwise.runtime.program import Program
from keepwise.session.ladder import Ladder
from keepwise.session.sizes import Key, key_of, structure


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """The plan of one structure."""

    program: Program
    """For the recorded batch."""
    ladder: Ladder | None
    """For batches of other sizes; None: the same program."""


class Switch:
    """Chooses the plan for a batch by the tensors that it has."""

    def __init__(self, main: Branch, others: Mapping[tuple[str, ...], Branch]) -> None:
        self.main = main
        self.others = dict(others)

    def _branch(self, key: Key) -> Branch:
        return self.others.get(structure(key), self.main)

    def choose(self, args: Any, kwargs: Any) -> tuple[Program, Key, bool]:
        """The program for a batch, its key, and whether even the smallest plan is over the budget."""
        key = key_of(args, kwargs)
        branch = self._branch(key)
        return (branch.program, key, False) if branch.ladder is None else branch.ladder.choose(args, kwargs)

    def knows(self, key: Key) -> bool:
        """Whether a forward of these shapes was seen."""
        ladder = self._branch(key).ladder
        return ladder is None or ladder.knows(key)

    def learn(self, key: Key, saved_bytes: int, extra_bytes: int) -> bool:
        """Remember what a forward of these shapes held; whether it is more than the budget leaves."""
        ladder = self._branch(key).ladder
        return ladder is not None and ladder.learn(key, saved_bytes, extra_bytes)

    @property
    def num_plans(self) -> int:
        """Plans made so far."""
        return sum(b.ladder.num_plans if b.ladder is not None else 1 for b in (self.main, *self.others.values()))
