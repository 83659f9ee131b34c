"""`Timeline`: what is live when, at what cost.

A moment has two readings. `live_bytes[t]` is the high water while op `t` runs: every storage that is live then, the op's own
workspace, and what the schedule holds. `replay_bytes[t]` is the high water of the replays that run just before op `t` (0 if
none): what is live between ops `t - 1` and `t`, plus the replay's own temporaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

import numpy as np

from keepwise.ir import Schedule, Step
from keepwise.ir.schedule import NO_WINDOW
from keepwise.simulate.index import StepIndex


class LiveKind(StrEnum):
    """Why something is live."""

    STORAGE = "storage"
    """A storage of the step, in the step's own time or held by the schedule."""
    RETAINED = "retained"
    """A replayed storage that its window retains."""
    REPLAY = "replay"
    """A temporary of the replay that runs."""
    COPY = "copy"
    RNG = "rng"
    """A captured generator state."""
    WORKSPACE = "workspace"
    OUTSIDE = "outside"
    IN_FLIGHT = "in flight"
    """What the forward passes of other micro-batches left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Live:
    """Something that is live at a moment."""

    kind: LiveKind
    id: int
    """Storage; for `COPY` the value, for `RNG` and `WORKSPACE` the op, for `OUTSIDE` and `IN_FLIGHT` -1."""
    nbytes: int
    category: str
    """Category of the storage; for what is no storage, the kind."""
    window: int = NO_WINDOW
    """Window that retains, makes or copies it; of a copy that several share the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Bytes that the schedule adds during the moments `first <= t <= last`."""

    live: Live
    first: int
    last: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayTrace:
    """The inside of one replay."""

    window: int
    start: int
    ops: tuple[int, ...]
    base_bytes: int
    """Live just before the window's first moment, without what this replay makes."""
    buffers: tuple[tuple[int, int, int, int], ...]
    """(storage, bytes, position of its birth, position of its last use) of each private storage; a copy has 0 bytes here,
    because it is charged from forward."""
    inner_bytes: np.ndarray
    """int64 [ops]: bytes of the replay's own storages and workspace while each op runs."""

    @property
    def peak_bytes(self) -> int:
        """Highest total during the replay; 0 if it replays nothing."""
        return int(self.base_bytes + self.inner_bytes.max()) if len(self.ops) else 0

    @property
    def peak_position(self) -> int:
        """Position in `ops` at which the replay is highest (the first of equals)."""
        return int(self.inner_bytes.argmax())


def inner_bytes(buffers: tuple[tuple[int, int, int, int], ...], workspaces: list[int]) -> np.ndarray:
    """Bytes of a replay's own buffers and workspaces, int64 [ops], from their positions of birth and last use."""
    steps = [0] * (len(workspaces) + 1)
    for _, nbytes, born, last in buffers:
        steps[born] += nbytes
        steps[last + 1] -= nbytes
    return np.fromiter(
        (live + extra for live, extra in zip(accumulate(steps), workspaces, strict=False)),
        dtype=np.int64,
        count=len(workspaces),
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """What one step costs under a schedule."""

    step: Step
    schedule: Schedule | None
    index: StepIndex
    ends: np.ndarray
    """int64 [storages]: last moment at which each storage of the step is live under the schedule."""
    charges: tuple[Charge, ...]
    """What the schedule adds."""
    replays: tuple[ReplayTrace, ...]
    """One a window, in order of ids."""
    live_bytes: np.ndarray
    """int64 [moments]: high water while each op runs."""
    replay_bytes: np.ndarray
    """int64 [moments]: high water of the replays just before each op, 0 where none runs."""
    added_seconds: float
    """Seconds of all replayed ops."""
    replayed_ops: int
    held_bytes: int
    """Bytes of the droppable storages that are kept, and of others that are held for replays."""
    dropped_bytes: int
    static_bytes: int
    """Bytes that exist throughout the step, whatever is planned: leaves and what is outside."""
    others_bytes: int
    """Bytes of other micro-batches in flight, at every moment."""
    served: dict[tuple[int, int], int]
    """(save, position of the read in its `reads`) -> window that serves it, for every read of a dropped save."""

    @property
    def high_water(self) -> np.ndarray:
        """int64 [moments]: the higher of `live_bytes` and `replay_bytes`."""
        return np.maximum(self.live_bytes, self.replay_bytes)

    @property
    def peak_bytes(self) -> int:
        """Highest bytes of the whole step."""
        return int(self.high_water.max()) if len(self.live_bytes) else self.static_bytes

    @property
    def peak_moment(self) -> int:
        """Moment of the peak (the first of equals); -1 for a step without ops."""
        return int(self.high_water.argmax()) if len(self.live_bytes) else -1

    @property
    def peak_window(self) -> int:
        """Window whose replay makes the peak, or `NO_WINDOW` if an op of the step does."""
        t = self.peak_moment
        if t < 0 or self.live_bytes[t] >= self.replay_bytes[t]:
            return NO_WINDOW
        return next(r.window for r in self.replays if r.start == t and r.peak_bytes == self.replay_bytes[t])

    @property
    def at_peak(self) -> tuple[Live, ...]:
        """What is live at the peak, largest first."""
        window = self.peak_window
        return self.live_in_replay(window) if window != NO_WINDOW else self.live_at(self.peak_moment)

    def live_at(self, moment: int) -> tuple[Live, ...]:
        """What is live while op `moment` runs, largest first; sums to `live_bytes[moment]`."""
        if not 0 <= moment < len(self.live_bytes):
            return self._sorted(self._outside())
        found = self._outside() + self._storages((self.index.births <= moment) & (self.ends >= moment))
        found += [c.live for c in self.charges if c.first <= moment <= c.last]
        workspace = self.step.ops[moment].workspace_bytes
        found.append(Live(kind=LiveKind.WORKSPACE, id=moment, nbytes=workspace, category=LiveKind.WORKSPACE))
        return self._sorted(found)

    def live_in_replay(self, window: int, position: int | None = None) -> tuple[Live, ...]:
        """What is live while the `position`-th op of a window's replay runs (at its highest if None), largest first."""
        replay = self.replays[window]
        if not replay.ops:
            return ()
        at = replay.peak_position if position is None else position
        t = replay.start
        found = self._outside() + self._storages((self.index.births < t) & (self.ends >= t))
        found += [c.live for c in self.charges if before_replay(c, t, window)]
        category = {s: str(self.step.storages[s].category) for s, *_ in replay.buffers}
        found += [
            Live(kind=LiveKind.REPLAY, id=s, nbytes=n, category=category[s], window=window)
            for s, n, born, last in replay.buffers
            if born <= at <= last
        ]
        op = self.step.ops[replay.ops[at]]
        found.append(
            Live(
                kind=LiveKind.WORKSPACE,
                id=op.index,
                nbytes=op.workspace_bytes,
                category=LiveKind.WORKSPACE,
                window=window,
            )
        )
        return self._sorted(found)

    def by_category(self, moment: int) -> dict[str, int]:
        """Bytes by category at the high water of a moment, largest first; sums to `high_water[moment]`."""
        live = self.live_at(moment)
        if 0 <= moment < len(self.live_bytes) and self.replay_bytes[moment] > self.live_bytes[moment]:
            inside = [r for r in self.replays if r.start == moment]
            live = self.live_in_replay(max(inside, key=lambda r: r.peak_bytes).window)
        table: dict[str, int] = {}
        for x in live:
            table[str(x.category)] = table.get(str(x.category), 0) + x.nbytes
        return dict(sorted(table.items(), key=lambda item: -item[1]))

    def _outside(self) -> list[Live]:
        return [
            Live(kind=LiveKind.OUTSIDE, id=-1, nbytes=self.step.outside_bytes, category=LiveKind.OUTSIDE),
            Live(kind=LiveKind.IN_FLIGHT, id=-1, nbytes=self.others_bytes, category=LiveKind.IN_FLIGHT),
        ]

    def _storages(self, mask: np.ndarray) -> list[Live]:
        return [
            Live(kind=LiveKind.STORAGE, id=s, nbytes=self.index.charge[s], category=str(self.step.storages[s].category))
            for s in np.flatnonzero(mask).tolist()
        ]

    @staticmethod
    def _sorted(found: list[Live]) -> tuple[Live, ...]:
        return tuple(sorted((x for x in found if x.nbytes), key=lambda x: -x.nbytes))


def before_replay(charge: Charge, start: int, window: int) -> bool:
    """Whether a charge is live when `window` replays before `start`.

    What an enclosing window retains is there although it starts at the same moment, because parents replay first; what this
    window or an inner one retains is not there yet.
    """
    if charge.live.kind is LiveKind.RETAINED and charge.first == start:
        return charge.live.window < window and charge.last >= start
    return charge.first < start <= charge.last
