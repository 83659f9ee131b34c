"""What a timeline leaves free, which storages may lend their memory to a later window, and how much is used again.

A loan holds a dead storage from its last read until the borrower replays. It is given only where that stays under the peak at
every moment and in every replay between; what happens inside of the borrower's replay is decided there, op by op. Loans that wait
least come first. Nobody gets more than it can use at once: the most storages of that size that are live together in its replay.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np

from keepwise.ir import NO_WINDOW, Phase, Spare, spare
from keepwise.simulate.timeline import LiveKind, ReplayTrace, Timeline


def spare_of(timeline: Timeline) -> Spare:
    """What `timeline` leaves free under its own peak."""
    peak = timeline.peak_bytes
    live = peak - timeline.live_bytes
    inside = [peak - (r.base_bytes + r.inner_bytes) for r in timeline.replays]
    return Spare(
        moments=tuple(live.tolist()),
        loans=_loans(timeline, live, inside),
        replays=tuple(tuple(free.tolist()) for free in inside),
    )


def _loans(timeline: Timeline, live: np.ndarray, inside: list[np.ndarray]) -> dict[tuple[int, int], int]:
    """The loans; takes what they hold from what is free in the replays that they pass by."""
    replays = timeline.replays
    order = sorted((r.window for r in replays if r.ops), key=lambda w: (replays[w].start, w))
    starts = [replays[w].start for w in order]
    wanted = {w: _most_at_once(replays[w]) for w in order}
    borrowers: dict[int, list[int]] = {}
    """Size -> places in `order` where it is wanted, ascending."""
    for k, w in enumerate(order):
        for n in wanted[w]:
            borrowers.setdefault(n, []).append(k)
    live = live.copy()
    offers: list[tuple[int, int, int, int, int, int]] = []
    for lender, storage, n, last in (*_retained(timeline), *_kept(timeline)):
        able = borrowers.get(n, ())
        i = bisect_left(able, bisect_right(starts, last))
        if i < len(able):
            offers.append((starts[able[i]] - last, able[i], lender, storage, n, last))
    loans: dict[tuple[int, int], int] = {}
    for _, k, lender, storage, n, last in sorted(offers):
        borrower = order[k]
        if not wanted[borrower][n]:
            continue
        between = live[last + 1 : starts[k]]
        passed = order[bisect_right(starts, last) : k]
        if (len(between) and between.min() < n) or any(inside[w].min() < n for w in passed):
            continue
        between -= n
        for w in passed:
            inside[w] -= n
        wanted[borrower][n] -= 1
        loans[lender, storage] = borrower
    return loans


def _retained(timeline: Timeline) -> Iterator[tuple[int, int, int, int]]:
    """(window, storage, bytes, last moment) of what windows retain."""
    for charge in timeline.charges:
        held = charge.live
        if held.kind is LiveKind.RETAINED and charge.last >= charge.first:
            yield held.window, held.id, held.nbytes, charge.last


def _kept(timeline: Timeline) -> Iterator[tuple[int, int, int, int]]:
    """(`NO_WINDOW`, storage, bytes, last moment) of what forward made and autograd keeps until backward reads it."""
    step = timeline.step
    dropped = {s for w in timeline.schedule.windows for s in w.retain} if timeline.schedule is not None else set()
    for s, saves in step.saved_storages.items():
        last = int(timeline.ends[s])
        if s not in dropped and step.storages[s].birth >= 0 and any(r.first <= last for v in saves for r in v.reads):
            yield NO_WINDOW, s, timeline.index.charge[s], last


def _most_at_once(replay: ReplayTrace) -> Counter[int]:
    """Size -> the most storages of that size that live together in a replay."""
    changes: dict[int, list[tuple[int, int]]] = {}
    for _, n, born, last in replay.buffers:
        if n >= spare.MIN_BYTES:
            changes.setdefault(n, []).extend(((born, 1), (last + 1, -1)))
    most: Counter[int] = Counter()
    for n, steps in changes.items():
        now = 0
        for _, step in sorted(steps):
            now += step
            most[n] = max(most[n], now)
    return most


def recycled_bytes(timeline: Timeline, left: Spare, writes_into: Callable[[str], bool]) -> int:
    """Bytes of forward's results that are written into dead memory instead of new one.

    Args:
        timeline: the simulated step.
        left: what it leaves free.
        writes_into: whether an op of that target can write its first result into given memory.
    """
    bytes_of = timeline.index.charge
    total = 0
    shelf = _Shelf()
    made = {
        op.index: [s for s in timeline.index.fresh[op.index] if bytes_of[s] >= spare.MIN_BYTES]
        for op in timeline.step.ops
        if op.phase is Phase.FORWARD
    }
    takers: dict[int, int] = {}
    """Op -> bytes of its first result."""
    for k, fresh in made.items():
        op = timeline.step.ops[k]
        first = timeline.step.values[op.outputs[0]].storage if fresh and op.outputs[0] >= 0 else -1
        if first in fresh and writes_into(op.target):
            takers[k] = bytes_of[first]
    sizes = set(takers.values())
    for k, fresh in made.items():
        if k in takers and shelf.take(takers[k], k):
            total += takers[k]
        shelf.trim(left.moments[k], k)
        for s in fresh:
            if bytes_of[s] in sizes:
                shelf.put(bytes_of[s], int(timeline.ends[s]))
    return total


class _Shelf:
    """The handles that the runtime would have."""

    def __init__(self) -> None:
        self.handles: list[tuple[int, int]] = []
        """(bytes, last moment at which it is live), oldest first."""

    def put(self, nbytes: int, last: int) -> None:
        self.handles.append((nbytes, last))

    def take(self, nbytes: int, now: int) -> bool:
        for i in range(len(self.handles) - 1, -1, -1):
            if self.handles[i][0] == nbytes and self.handles[i][1] < now:
                del self.handles[i]
                return True
        return False

    def trim(self, most: int, now: int) -> None:
        excess = sum(n for n, last in self.handles if last < now) - most
        for i in [i for i, (_, last) in enumerate(self.handles) if last < now]:
            if excess <= 0:
                break
            excess -= self.handles[i][0]
            self.handles[i] = (0, -1)
        self.handles = [h for h in self.handles if h[0]][-spare.MAX_HANDLES :]
