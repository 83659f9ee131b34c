"""What the judge asks of a step again and again, computed once for each `Step` object."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from keepwise.ir import NO_OP, Category, Step

_KEY = "_simulate_index"


class StepIndex:
    """Lookup tables over one step. `charge` is in bytes on the step's device: storages elsewhere cost nothing here."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.charge = [s.nbytes if s.device == step.device else 0 for s in step.storages]
        self.births = np.array([s.birth for s in step.storages], dtype=np.int64)
        self.deaths = np.array([s.death for s in step.storages], dtype=np.int64)
        self.held_until = np.array([s.held_until for s in step.storages], dtype=np.int64)
        self.charges = np.array(self.charge, dtype=np.int64)
        self.is_leaf = [s.birth == NO_OP and s.category.is_static for s in step.storages]
        self.write_moments: dict[int, list[int]] = {}
        for op in step.ops:
            for s in op.writes:
                self.write_moments.setdefault(s, []).append(op.index)
        self.fresh: list[tuple[int, ...]] = [
            tuple(
                dict.fromkeys(
                    s for s in (step.values[o].storage for o in op.outputs) if step.storages[s].birth == op.index
                )
            )
            for op in step.ops
        ]
        self.droppable = frozenset(s.id for s in step.storages if self._is_droppable(s.id))

    def _is_droppable(self, storage: int) -> bool:
        s = self.step.storages[storage]
        return (
            storage in self.step.saved_storages
            and s.category in (Category.ACTIVATION, Category.TEMPORARY)
            and not s.keep_reason
            and s.saved_until > s.held_until
        )

    def version_before(self, storage: int, moment: int) -> int:
        """Version of a storage after every op before `moment`: the one that a reference taken in forward shows by then.

        This is `Step.is_final` seen from a moment. The two differ where the optimizer updates a parameter in place: backward
        may read the parameter by reference although the step writes it later.
        """
        return bisect_left(self.write_moments.get(storage, ()), moment)


def index_of(step: Step) -> StepIndex:
    """The index of `step`, computed at the first call."""
    table = vars(step)
    if _KEY not in table:
        table[_KEY] = StepIndex(step)
    return table[_KEY]
