"""The chain programs of all forward passes of a step, as one.

Passes follow one another or overlap (micro-batches in flight). Each gets the whole budget; what another holds meanwhile is left
to the judge, so that a bound stays one. Their seconds add.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from keepwise.plan.optimal.chain import ChainProgram, Pass, Table
from keepwise.plan.optimal.model import Model
from keepwise.plan.optimal.options import Option

_Choice = Literal["up", "down"]


class Programs:
    """One `ChainProgram` a pass, on one scale.

    Attributes:
        grain: bytes of a grain.
        low: bytes that count as zero.
        table: least added seconds of all passes at each number of grains.
    """

    def __init__(
        self, model: Model, menus: dict[int, list[Option]], *, high: int, grain: int, rounding: _Choice
    ) -> None:
        chains = [model.links(part, menus) for part in model.parts]
        self.low = min((link.level for links in chains for link in links), default=0)
        self.chains = [
            ChainProgram(links, low=self.low, high=max(high, self.low + 1), grain=grain, rounding=rounding)
            for links in chains
        ]
        self.grain = grain
        self.table: Table = np.sum([c.root[0] for c in self.chains], axis=0) if self.chains else np.zeros(1)
        self.up = rounding == "up"

    def budget_grains(self, budget_bytes: int) -> int:
        """A budget in grains, at most the largest of the table; -1 below the smallest."""
        above = budget_bytes - self.low
        if above < 0:
            return -1
        return min(above // self.grain if self.up else -(-above // self.grain), len(self.table) - 1)

    def seconds(self, budget_bytes: int) -> float:
        """Least added seconds at a budget; infinite where nothing fits."""
        m = self.budget_grains(budget_bytes)
        return float(self.table[m]) if m >= 0 else float("inf")

    def smallest(self, seconds: float = float("inf")) -> int | None:
        """Smallest budget in bytes at which no more than `seconds` are added; None if there is none."""
        found = np.flatnonzero(np.isfinite(self.table) & (self.table <= seconds))
        return self.low + int(found[0]) * self.grain if len(found) else None

    def plan(self, budget_bytes: int) -> list[Pass] | None:
        """Decisions of each pass that reach `seconds(budget_bytes)`; None where nothing fits."""
        m = self.budget_grains(budget_bytes)
        if m < 0 or not np.isfinite(self.table[m]):
            return None
        return [c.plan(m) for c in self.chains]

    # Plans that leave little behind, for micro-batches in flight.

    def leaving(self, budget_bytes: int, left_bytes: int) -> tuple[float, list[list[Table]]]:
        """Least added seconds at a budget where each forward pass leaves at most `left_bytes` behind, and the tables to plan by."""
        m = self.budget_grains(budget_bytes)
        if m < 0:
            return float("inf"), []
        most = left_bytes // self.grain if self.up else -(-left_bytes // self.grain)
        roots = [c.build_root(m - most) for c in self.chains]
        return float(sum(root[0][m] for root in roots)), roots

    def plan_leaving(self, budget_bytes: int, left_bytes: int) -> list[Pass] | None:
        """Decisions that reach `leaving`; None where nothing fits."""
        seconds, roots = self.leaving(budget_bytes, left_bytes)
        m = self.budget_grains(budget_bytes)
        return [c.plan(m, r) for c, r in zip(self.chains, roots, strict=True)] if np.isfinite(seconds) else None
