"""One window: where each input of each replayed op comes from, and how long what is made lives inside the replay.

Notes.
1. A replay works on private buffers. A buffer is born by its storage's birth op, or is a copy taken in forward; it carries the
   version that it has reached and the tensor objects that were made over it.
2. A value is looked for, in this order: on a buffer of this replay; on what an enclosing window retains; on what is held from
   forward, or what forward copies of it for all windows; among the window's own copies. What is held, retained or copied for all is
   shared, so it is read at the version that it shows by then, and never written.
3. Whatever holds a whole storage (held, retained by an enclosing window, copied) serves every tensor object over it. A buffer of
   this replay serves the objects that the replayed ops returned, and those that came from no recorded op.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from keepwise.ir import NO_OP, Op, Schedule, Step, Window, spare
from keepwise.ir.schedule import NO_WINDOW
from keepwise.simulate.errors import ScheduleError
from keepwise.simulate.index import StepIndex

NO_COPY = -1


@dataclass(slots=True, kw_only=True)
class Buffer:
    """One private storage of a replay."""

    storage: int
    version: int
    born: int
    """Position in the window's ops at which it is allocated."""
    last: int
    """Position of its last use."""
    copy: int = NO_COPY
    """Value that it is a copy of (note 1)."""
    objects: set[int] = field(default_factory=set)
    """Tensor objects made over it (note 3)."""


@dataclass(slots=True, kw_only=True)
class Replay:
    """What one window reads and makes."""

    window: Window
    buffers: list[Buffer] = field(default_factory=list)
    retained: dict[int, Buffer] = field(default_factory=dict)
    """Storage -> the buffer that it leaves behind."""
    copied: dict[int, int] = field(default_factory=dict)
    """Copied value -> forward op that reads it first: the moment from which it is charged."""
    captured: set[int] = field(default_factory=set)
    """Storages read by reference from forward."""
    shared: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """(storage, version) of a leaf that forward copies for all windows -> forward op that reads it first, and the value it reads."""
    overwritten: list[tuple[int, list[Buffer]]] = field(default_factory=list)
    """(position, buffers over one of which its result may be written) of ops that can."""
    borrowed: set[tuple[int, int]] = field(default_factory=set)
    """(enclosing window, storage) read from what it retains."""


class Replayer:
    """Plays the windows of a schedule, parents first."""

    def __init__(self, step: Step, schedule: Schedule, index: StepIndex) -> None:
        self.step = step
        self.schedule = schedule
        self.index = index
        self.held = frozenset(schedule.held)
        self.done: list[Replay] = []

    def play(self, window: Window) -> Replay:
        """Replay `window`; every window with a smaller id must have been played.

        Raises:
            ScheduleError: an input is not there, a write would reach a shared storage, or a retained storage is not made or
                not at the version that its readers expect.
        """
        run = _Run(self, window)
        for position, i in enumerate(window.ops):
            run.op(position, i)
        run.finish()
        self.done.append(run.replay)
        return run.replay

    def retainer(self, window: Window, storage: int) -> int:
        """Innermost window strictly around `window` that retains `storage`, or `NO_WINDOW`."""
        around = window.parent
        while around != NO_WINDOW:
            if storage in self.done[around].retained:
                return around
            around = self.schedule.windows[around].parent
        return NO_WINDOW


class _Run:
    """State of one replay."""

    def __init__(self, replayer: Replayer, window: Window) -> None:
        self.replayer = replayer
        self.step = replayer.step
        self.index = replayer.index
        self.window = window
        self.replay = Replay(window=window)
        self.current: dict[int, Buffer] = {}
        self.copies: dict[tuple[int, int], int] = {}
        for value in window.copies:
            v = self.step.values[value]
            if (v.storage, v.version) in self.copies:
                raise ScheduleError(
                    f"version {v.version} of its storage is copied twice", window=window.id, value=value
                )
            self.copies[v.storage, v.version] = value

    def op(self, position: int, i: int) -> None:
        """Run op `i` as the `position`-th of the replay."""
        op = self.step.ops[i]
        read: dict[int, list[Buffer | None]] = {}
        for value in op.inputs:
            read.setdefault(self.step.values[value].storage, []).append(self._find(value, position, i))
        for s in op.writes:
            if s in read:  # what an op writes without reading it (running statistics) its replay leaves alone
                self._write(s, read[s], position, i)
        for s in self.index.fresh[i]:
            buffer = Buffer(storage=s, version=0, born=position, last=position)
            self.current[s] = buffer
            self.replay.buffers.append(buffer)
        if op.overwrites and len(op.outputs) == 1 and op.outputs[0] >= 0:
            self._note_overwritten(op, position)
        for value in op.outputs:
            v = self.step.values[value]
            buffer = self.current.get(v.storage)
            # The result of a view op over a shared storage is found there again, over a buffer it belongs to the buffer.
            if (
                buffer is not None
                and buffer.version == v.version
                and (v.storage in self.index.fresh[i] or v.storage in read)
            ):
                buffer.objects.add(v.view)

    def _note_overwritten(self, op: Op, position: int) -> None:
        """Private buffers whose memory could become that of the result, if this is their last use."""
        result = self.step.values[op.outputs[0]]
        nbytes = self.index.charge[result.storage]
        if result.storage not in self.index.fresh[op.index] or nbytes < spare.MIN_BYTES:
            return
        found: list[Buffer] = []
        for value in op.inputs:
            v = self.step.values[value]
            buffer = self.current.get(v.storage)
            if (
                buffer is not None
                and buffer.copy == NO_COPY
                and (v.shape, v.stride, v.dtype, v.offset) == (result.shape, result.stride, result.dtype, 0)
                and self.index.charge[v.storage] == nbytes
            ):
                found.append(buffer)
        if found:
            self.replay.overwritten.append((position, found))

    def _find(self, value: int, position: int, i: int) -> Buffer | None:
        v = self.step.values[value]
        s = v.storage
        buffer = self.current.get(s)
        if buffer is not None and buffer.version == v.version and self._has_object(buffer, v.view):
            buffer.last = position
            return buffer
        start = self.window.start
        settled = v.version == self.index.version_before(s, start)
        around = self.replayer.retainer(self.window, s)
        if around != NO_WINDOW and settled and self.replayer.done[around].retained[s].version == v.version:
            self.replay.borrowed.add((around, s))
            return None
        if settled and (self.index.is_leaf[s] or s in self.replayer.held):
            if self.step.storages[s].copied:
                self.replay.shared.setdefault((s, v.version), (i, value))
            else:
                self.replay.captured.add(s)
            return None
        copy = self.copies.get((s, v.version))
        if copy is None:
            raise ScheduleError(
                f"{self.step.ops[i].target} reads it, and {self._why_absent(value, buffer)}",
                window=self.window.id,
                op=i,
                value=value,
                storage=s,
            )
        self.replay.copied.setdefault(copy, i)
        buffer = Buffer(storage=s, version=v.version, born=position, last=position, copy=copy)
        self.current[s] = buffer
        self.replay.buffers.append(buffer)
        return buffer

    def _has_object(self, buffer: Buffer, view: int) -> bool:
        return buffer.copy != NO_COPY or view in buffer.objects or self.step.values[view].producer == NO_OP

    def _write(self, s: int, sources: list[Buffer | None], position: int, i: int) -> None:
        """Advance the buffer of `s`: only a private one may be written, and no version may be skipped."""
        version = bisect_left(self.index.write_moments[s], i) + 1
        buffer = self.current.get(s)
        if buffer is None or any(source is None for source in sources):
            raise ScheduleError(
                f"{self.step.ops[i].target} writes in place a storage that this replay did not make and does not copy",
                window=self.window.id,
                op=i,
                storage=s,
            )
        if buffer.version != version - 1:
            raise ScheduleError(
                f"{self.step.ops[i].target} writes version {version}, the replayed storage is at version {buffer.version}",
                window=self.window.id,
                op=i,
                storage=s,
            )
        buffer.version = version
        buffer.last = position

    def finish(self) -> None:
        """Judge what is retained and whether each copy was of use."""
        window = self.window
        for s in window.retain:
            buffer = self.current.get(s)
            if buffer is None:
                raise ScheduleError("it is retained, but no op of the window makes it", window=window.id, storage=s)
            final = self.index.version_before(s, window.start)
            if buffer.version != final:
                raise ScheduleError(
                    f"it is retained at version {buffer.version}, its final version is {final}",
                    window=window.id,
                    storage=s,
                )
            self.replay.retained[s] = buffer
        for value in window.copies:
            if value not in self.replay.copied:
                raise ScheduleError(
                    "it is copied, but no op of the window reads the copy", window=window.id, value=value
                )

    def _why_absent(self, value: int, buffer: Buffer | None) -> str:
        v = self.step.values[value]
        s = v.storage
        now = self.index.version_before(s, self.window.start)
        if buffer is not None and buffer.version == v.version:
            return f"the op {self.step.values[v.view].producer} that returns this tensor object is not replayed"
        if buffer is not None:
            return f"needs version {v.version}, the replayed storage is at version {buffer.version}"
        if v.version != now:
            return f"needs version {v.version}, which op {self.step.writers[s, v.version + 1]} overwrote, and no copy of it"
        return "it is neither made in this replay nor retained around it nor held from forward"
