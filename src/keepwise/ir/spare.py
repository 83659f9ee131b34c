"""`Spare`: how far a schedule stays below its own peak, moment by moment, and which memory may therefore be used again.

On the CPU new memory is slow: the system hands it out page by page at the first touch. Memory of results that are dead
can be held back for the next results instead. `simulate` says how much of it fits under the peak and when; the runtime obeys.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_BYTES = 1 << 16
"""Smaller memory is not worth holding."""
MAX_HANDLES = 64
"""So many storages are remembered at most, dead and alive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spare:
    """Bytes that may be held although nothing reads them any more."""

    moments: tuple[int, ...]
    """Bytes, for each op of the step."""
    replays: tuple[tuple[int, ...], ...] = ()
    """Bytes, for each op of each window's replay, less the loans that pass it by."""
    loans: dict[tuple[int, int], int] = field(default_factory=dict)
    """(window, storage that it retains) -> later window whose replay may write into that memory when its last reader is through; the
    window is `NO_WINDOW` where autograd keeps the storage."""

    def scaled(self, factor: float) -> Spare:
        """For a batch whose tensors are `factor` times as large."""
        return Spare(
            moments=tuple(int(n * factor) for n in self.moments),
            replays=tuple(tuple(int(n * factor) for n in replay) for replay in self.replays),
            loans=self.loans,
        )
