"""`simulate`: a whole step under a schedule.

Conventions (the rules of `ir.schedule`, made exact).
1. All spans are inclusive. What a window reads by reference is charged through the window's `start`; so is a copy, a captured
   generator state (once an op, until the last window that replays it) and what an enclosing window retains for an inner one.
2. A retained storage is charged from the end of its replay until the last read that *it* serves: a read of a dropped save is
   served by the innermost window around the read's first moment that retains the storage.
3. The bytes of a dropped storage end at `held_until`, those of a kept one at its death, or at the last window that reads it.
4. With `Step.in_flight` micro-batches, what one forward leaves for its backward under the schedule (storages born before the first
   op of backward that live on, copies, generator states) is charged `in_flight - 1` times more at every moment.
5. A copy of a leaf that all windows share is there as long as one of them still needs it: from its op in forward, for each window,
   through the window's `start`, and only once where those spans meet.

Linear in ops, storages, saves and replayed ops, apart from sorting.
"""

from __future__ import annotations

import numpy as np

from keepwise.ir import NO_OP, Schedule, Step
from keepwise.simulate.check import check_structure
from keepwise.simulate.errors import ScheduleError
from keepwise.simulate.index import StepIndex, index_of
from keepwise.simulate.replay import NO_COPY, Replay, Replayer
from keepwise.simulate.timeline import Charge, Live, LiveKind, ReplayTrace, Timeline, before_replay, inner_bytes


def simulate(step: Step, schedule: Schedule | None = None) -> Timeline:
    """Play `schedule` over `step` (the plain step if None).

    Returns:
        The memory timeline on the step's device and the seconds that the schedule adds.

    Raises:
        ScheduleError: the schedule reads what is not there or breaks a rule; the message names window, op and value.
    """
    return _Machine(step, schedule).run()


class _Machine:
    def __init__(self, step: Step, schedule: Schedule | None) -> None:
        self.step = step
        self.plain = schedule is None
        self.given = schedule
        self.index: StepIndex = index_of(step)
        self.schedule = schedule if schedule is not None else Schedule(held=tuple(sorted(self.index.droppable)))
        self.dropped = frozenset(self.index.droppable - set(self.schedule.held))
        self.replays: list[Replay] = []
        self.charges: list[Charge] = []
        self.served: dict[tuple[int, int], int] = {}
        self.until: dict[tuple[int, int], int] = {}

    def run(self) -> Timeline:
        check_structure(self.step, self.schedule)
        replayer = Replayer(self.step, self.schedule, self.index)
        for window in self.schedule.windows:
            self.replays.append(replayer.play(window))
        self._serve()
        ends = self._ends()
        self._charge_windows()
        others = self._others(ends)
        live, before = self._live(ends, others)
        traces = self._traces(before)
        highest = np.zeros(len(self.step.ops), dtype=np.int64)
        for trace in traces:
            highest[trace.start] = max(highest[trace.start], trace.peak_bytes)
        bytes_of = self.index.charge
        ops = [i for w in self.schedule.windows for i in w.ops]
        leaves = (s.id for s in self.step.storages if s.birth == NO_OP and s.category.is_static)
        return Timeline(
            step=self.step,
            schedule=self.given,
            index=self.index,
            ends=ends,
            charges=tuple(self.charges),
            replays=tuple(traces),
            live_bytes=live,
            replay_bytes=highest,
            added_seconds=float(sum(self.step.ops[i].seconds for i in ops)),
            replayed_ops=len(ops),
            held_bytes=sum(bytes_of[s] for s in self.schedule.held),
            dropped_bytes=sum(bytes_of[s] for s in self.dropped),
            static_bytes=sum(bytes_of[s] for s in leaves) + self.step.outside_bytes,
            others_bytes=others,
            served=self.served,
        )

    # ------------------------------------------------------------ who serves

    def _serve(self) -> None:
        """Find the window of each read of a dropped save, and until when each retained storage is wanted."""
        retainers: dict[int, list[int]] = {}
        for replay in self.replays:
            for s in replay.retained:
                retainers.setdefault(s, []).append(replay.window.id)
            for around, s in replay.borrowed:
                self._want(around, s, replay.window.start)
        for s in sorted(self.dropped):
            for save in self.step.saved_storages[s]:
                for position, read in enumerate(save.reads):
                    window = self._server(s, save.value, read.first, retainers.get(s, ()))
                    self.served[save.index, position] = window
                    self._want(window, s, read.last)

    def _want(self, window: int, storage: int, moment: int) -> None:
        key = (window, storage)
        self.until[key] = max(self.until.get(key, NO_OP), moment)

    def _server(self, s: int, value: int, moment: int, retainers: list[int] | tuple[int, ...]) -> int:
        windows = self.schedule.windows
        around = [w for w in retainers if windows[w].start <= moment <= windows[w].stop]
        if not around:
            late = [w for w in retainers if windows[w].start > moment]
            why = f"; window {late[0]} retains it but starts later, at {windows[late[0]].start}" if late else ""
            raise ScheduleError(
                f"it is dropped and read at {moment}, where no window retains it{why}", value=value, storage=s
            )
        # Windows nest and parents come first: of those around one moment the innermost has the highest id.
        window = max(around)
        v = self.step.values[value]
        buffer = self.replays[window].retained[s]
        if buffer.version != v.version:
            raise ScheduleError(
                f"it is saved at version {v.version}, the window retains version {buffer.version}",
                window=window,
                value=value,
                storage=s,
            )
        producer = self.step.values[v.view].producer
        if buffer.copy == NO_COPY and v.view not in buffer.objects and producer != NO_OP:
            raise ScheduleError(
                f"it is read at {moment}, but the window does not replay the op that returns this tensor object",
                window=window,
                op=producer,
                value=value,
                storage=s,
            )
        return window

    # --------------------------------------------------------------- charges

    def _ends(self) -> np.ndarray:
        ends = self.index.deaths.copy()
        lost = list(self.dropped)
        ends[lost] = self.index.held_until[lost]
        for replay in self.replays:
            for s in replay.captured:
                ends[s] = max(ends[s], replay.window.start)
        return ends

    def _charge_windows(self) -> None:
        """Retained storages, copies and generator states (conventions 1 and 2)."""
        draws: dict[int, tuple[int, int]] = {}
        for replay in self.replays:
            w = replay.window
            for value, first in replay.copied.items():
                s = self.step.values[value].storage
                self._add(LiveKind.COPY, value, self.index.charge[s], LiveKind.COPY, w.id, first, w.start)
            for s, buffer in replay.retained.items():
                last = self.until.get((w.id, s), NO_OP)
                category = str(self.step.storages[s].category)
                # A retained copy is already charged through the start.
                first = w.start if buffer.copy == NO_COPY else w.start + 1
                if last >= first:
                    self._add(LiveKind.RETAINED, s, self.index.charge[s], category, w.id, first, last)
            for i in w.ops:
                if self.step.ops[i].random and draws.get(i, (w.id, NO_OP))[1] < w.start:
                    draws[i] = (w.id, w.start)
        for i, (window, start) in draws.items():
            self._add(LiveKind.RNG, i, self.step.ops[i].rng_bytes, LiveKind.RNG, window, i, start)
        self._charge_shared()

    def _charge_shared(self) -> None:
        """Copies of leaves that all windows share (convention 5)."""
        spans: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
        for replay in self.replays:
            w = replay.window
            for key, (first, value) in replay.shared.items():
                spans.setdefault(key, []).append((first, w.start, w.id, value))
        for (s, _), found in spans.items():
            joined: list[tuple[int, int, int, int]] = []
            for first, last, window, value in sorted(found):
                if joined and first <= joined[-1][1]:
                    begin, end, latest, named = joined[-1]
                    joined[-1] = (begin, last, window, named) if last > end else (begin, end, latest, named)
                else:
                    joined.append((first, last, window, value))
            for first, last, window, value in joined:
                self._add(LiveKind.COPY, value, self.index.charge[s], LiveKind.COPY, window, first, last)

    def _add(self, kind: LiveKind, i: int, nbytes: int, category: str, window: int, first: int, last: int) -> None:
        live = Live(kind=kind, id=i, nbytes=nbytes, category=category, window=window)
        self.charges.append(Charge(live=live, first=first, last=last))

    # ------------------------------------------------------------------ sums

    def _others(self, ends: np.ndarray) -> int:
        """Bytes of the other micro-batches in flight (convention 4)."""
        split = self.step.span("backward").start
        if self.step.in_flight < 2 or not split:
            return 0
        left = (self.index.births >= 0) & (self.index.births < split) & (ends >= split)
        aside = (LiveKind.COPY, LiveKind.RNG)
        charges = sum(c.live.nbytes for c in self.charges if c.live.kind in aside and c.first < split <= c.last)
        return (self.step.in_flight - 1) * (int(self.index.charges[left].sum()) + charges)

    def _live(self, ends: np.ndarray, others: int) -> tuple[np.ndarray, np.ndarray]:
        """Bytes while each op runs, and bytes of the step's own storages just before each op."""
        n = len(self.step.ops)
        steps = np.zeros(n + 1, dtype=np.int64)
        births = np.maximum(self.index.births, 0)
        alive = (ends >= births) & (births < max(n, 1))
        np.add.at(steps, births[alive], self.index.charges[alive])
        np.add.at(steps, np.minimum(ends[alive] + 1, n), -self.index.charges[alive])
        own = np.cumsum(steps)[:n] + self.step.outside_bytes + others
        born = np.zeros(n + 1, dtype=np.int64)
        fresh = alive & (self.index.births >= 0)
        np.add.at(born, births[fresh], self.index.charges[fresh])
        extra = np.zeros(n + 1, dtype=np.int64)
        for c in self.charges:
            if c.last >= c.first:
                extra[c.first] += c.live.nbytes
                extra[c.last + 1] -= c.live.nbytes
        workspace = np.fromiter((op.workspace_bytes for op in self.step.ops), dtype=np.int64, count=n)
        return own + np.cumsum(extra)[:n] + workspace, own - born[:n]

    def _traces(self, before: np.ndarray) -> list[ReplayTrace]:
        starts: dict[int, list[Charge]] = {}
        n = len(self.step.ops)
        steps = np.zeros(n + 1, dtype=np.int64)
        for c in self.charges:
            if c.last > c.first:
                steps[c.first + 1] += c.live.nbytes
                steps[c.last + 1] -= c.live.nbytes
            if c.live.kind is LiveKind.RETAINED:
                starts.setdefault(c.first, []).append(c)
        # Charges that began strictly before each moment and last through it; those that begin at it are added one by one.
        earlier = np.cumsum(steps)[:n]
        traces = []
        for replay in self.replays:
            w = replay.window
            same = sum(c.live.nbytes for c in starts.get(w.start, ()) if before_replay(c, w.start, w.id))
            buffers = self._buffers(replay)
            traces.append(
                ReplayTrace(
                    window=w.id,
                    start=w.start,
                    ops=w.ops,
                    base_bytes=int(before[w.start] + earlier[w.start]) + same,
                    buffers=buffers,
                    inner_bytes=inner_bytes(buffers, [self.step.ops[i].workspace_bytes for i in w.ops]),
                )
            )
        return traces

    def _buffers(self, replay: Replay) -> tuple[tuple[int, int, int, int], ...]:
        """(storage, bytes, birth, last use) of the private storages; what is wanted after the replay lasts to its end."""
        end = len(replay.window.ops) - 1
        wanted = {
            id(buffer)
            for s, buffer in replay.retained.items()
            if self.until.get((replay.window.id, s), NO_OP) >= replay.window.start
        }
        given: set[int] = set()
        """Buffers whose memory the last op that reads them gives to its result."""
        for position, buffers in replay.overwritten:
            dying = [id(b) for b in buffers if b.last == position and id(b) not in wanted]
            given.update(dying[:1])
        return tuple(
            (
                b.storage,
                0 if b.copy != NO_COPY else self.index.charge[b.storage],
                b.born,
                end if id(b) in wanted else b.last - (id(b) in given),
            )
            for b in replay.buffers
        )
