"""Batches of other sizes than the recorded one: a few plans for the same step, each for a range of sizes.

A replay takes literals and shapes from the step that runs, so one recording serves every size; what changes is how many bytes a
decision saves. The bytes of activations of a batch are `scale` times the recorded ones: guessed (`sizes`) before the first step of
its shape, known from the saved tensors after it. The plan for a scale is the one for the recorded step that leaves
`budget - static` divided by the scale to everything that is not static. Scales are rounded up to powers of 2 ** (1/4), so that a
loader with hundreds of lengths needs a handful of plans. Those for smaller batches than the recorded one are solved together when
the first of another size comes, so that later sizes cost no step more time; those for larger ones when they are first needed.

Where batches of some structure (a mask that the recorded batch lacks) hold more than the plan does, because their step differs, what
they hold is taken off the room that later plans for that structure have.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable
from typing import Any

import torch

from keepwise._units import show_bytes
from keepwise._warn import warn
from keepwise.ir import Schedule, Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import plan_floor, plan_optimal
from keepwise.runtime.program import Program, compile_program
from keepwise.session.sizes import MAX_SHAPES, Key, Sizes, key_of, quadratic_share, shapes_in_words, structure
from keepwise.simulate import simulate, spare_of

RUNGS_PER_DOUBLING = 4
MAX_RUNGS = 12
"""Plans for smaller batches that are made at once."""


class Ladder:
    """Chooses the program for a batch."""

    def __init__(
        self,
        step: Step,
        budget_bytes: int,
        program: Program,
        key: Key,
        peak_bytes: int,
        scales: Iterable[tuple[Key, float]] = (),
        proven: set[int] | None = None,
    ) -> None:
        """Start with the recorded batch.

        Args:
            step: the recorded step.
            budget_bytes: of the whole step.
            program: the plan for the recorded batch.
            key: of the recorded batch (`sizes.key_of`).
            peak_bytes: predicted peak of the recorded batch under the plan.
            scales: what is known of other batches.
            proven: as in `compile_program`.
        """
        self.step = step
        self._proven = proven
        self.budget_bytes = budget_bytes
        self.saved_bytes = max(recorded_saved_bytes(step), 1)
        self._plain = simulate(step)
        self._static = self._plain.static_bytes
        self._recorded = key
        self._programs: dict[int, tuple[Program, int]] = {}
        self._base = (program, peak_bytes)
        self._sizes = Sizes(key, quadratic_share(step, key), scales)
        room = (self.budget_bytes - self._static) / max(self._plain.peak_bytes - self._static, 1)
        self._lowest = math.floor(math.log2(max(room, 1e-9)) * RUNGS_PER_DOUBLING)
        """At this rung and below, the plain step fits."""
        self._highest = 64 * RUNGS_PER_DOUBLING
        """At this rung and above, nothing is smaller than the floor plan."""
        self._extra: dict[tuple[str, ...], float] = {}
        """Places of a batch's tensors -> bytes held besides, for activations of the recorded size."""
        self._peaks: dict[Key, int] = {}
        """Peak of the plan that each shape got, in bytes, for activations of the recorded size."""
        self._warned = False
        self._lock = threading.Lock()

    def choose(self, args: Any, kwargs: Any) -> tuple[Program, Key, bool]:
        """The program for a batch, its key, and whether even the smallest plan is over the budget."""
        key = key_of(args, kwargs)
        if key == self._recorded:
            return self._base[0], key, self._base[1] > self.budget_bytes
        with self._lock:
            if not self._programs:
                for rung in range(max(self._lowest, -MAX_RUNGS), 0):
                    self._programs[rung] = self._plan(2 ** (rung / RUNGS_PER_DOUBLING), rung)
            scale = self._sizes.scale(key)
            extra = self._extra.get(structure(key), 0.0) * scale
            room = self.budget_bytes - self._static
            program, peak = self._program(scale * room / (room - extra) if extra < 0.9 * room else 10 * scale)
            self._peaks[key] = peak
            if len(self._peaks) > MAX_SHAPES:
                del self._peaks[next(iter(self._peaks))]
        expected = self._static + int((peak - self._static) * scale + extra)
        over = expected > self.budget_bytes
        if over and not self._warned:
            self._warned = True
            warn(
                f"keepwise: a batch of {shapes_in_words(key)} needs about {show_bytes(expected)} at least, "
                f"the budget is {show_bytes(self.budget_bytes)}; the smallest plan is used. Split it, or raise the budget"
            )
        return program, key, over

    def knows(self, key: Key) -> bool:
        """Whether a forward of these shapes was seen."""
        return self._sizes.knows(key)

    def learn(self, key: Key, saved_bytes: int, extra_bytes: int) -> bool:
        """Remember how large the activations of a shape really were, and what was held that the plan does not hold.

        Returns:
            Whether what was held is more than the budget leaves.
        """
        if not saved_bytes:
            return False
        with self._lock:
            scale = saved_bytes / self.saved_bytes
            self._sizes.learn(key, scale)
            if not extra_bytes:
                return False
            if key != self._recorded:
                kind = structure(key)
                self._extra[kind] = max(self._extra.get(kind, 0.0), extra_bytes / scale)
            peak = self._peaks.get(key, self._base[1])
        return self._static + (peak - self._static) * scale + extra_bytes > self.budget_bytes

    @property
    def scales(self) -> tuple[tuple[Key, float], ...]:
        """What was learned, by key."""
        return self._sizes.learned

    @property
    def num_plans(self) -> int:
        """Plans made so far, the recorded batch's included."""
        return 1 + len(self._programs)

    def _program(self, scale: float) -> tuple[Program, int]:
        rung = max(math.ceil(math.log2(max(scale, 1e-9)) * RUNGS_PER_DOUBLING - 1e-9), self._lowest)
        rung = min(rung, self._highest)
        found = self._programs.get(rung)
        if found is None:
            found = self._programs[rung] = self._plan(2 ** (rung / RUNGS_PER_DOUBLING), rung)
        return found

    def _plan(self, scale: float, rung: int) -> tuple[Program, int]:
        budget = self._static + int((self.budget_bytes - self._static) / scale)
        if self._plain.peak_bytes <= budget:
            schedule: Schedule = get_planner("none").plan(self.step, None)
        else:
            result = plan_optimal(self.step, budget)
            schedule = result.schedule
            if result.status.name == "INFEASIBLE":
                schedule = plan_floor(self.step).schedule
                self._highest = rung
        timeline = simulate(self.step, schedule)
        spare = spare_of(timeline).scaled(scale)
        return compile_program(self.step, schedule, spare, self._proven), timeline.peak_bytes


def recorded_saved_bytes(step: Step) -> int:
    """What `StepStats.saved_bytes` would be for the recorded step."""
    total = 0
    for save in step.saves:
        v = step.values[save.value]
        storage = step.storages[v.storage]
        if not storage.category.is_static:
            total += math.prod(v.shape) * _itemsize(v.dtype)
    return total


def _itemsize(dtype: str) -> int:
    found = getattr(torch, dtype, None)
    return found.itemsize if isinstance(found, torch.dtype) else 4
