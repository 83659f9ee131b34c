"""A slow judge that knows no versions: it computes what every storage *contains*, symbolically, and walks moments with sets.

The content of a storage is a number that stands for "op i on inputs with these contents". A replay is right if what it leaves
behind contains what the plain step's storage contained. Liveness is found by asking, at every moment, who still needs what.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepwise.ir import NO_OP, Category, Schedule, Step, Window, spare
from keepwise.ir.schedule import NO_WINDOW


class Refused(Exception):
    """The schedule cannot run."""


@dataclass
class Buffer:
    storage: int
    content: int
    position: int
    uses: list[int] = field(default_factory=list)
    objects: set[int] = field(default_factory=set)
    is_copy: bool = False


@dataclass
class Played:
    window: Window
    buffers: list[Buffer]
    final: dict[int, Buffer]
    copied: dict[int, int]
    captured: set[int]
    borrowed: list[tuple[int, int]]
    leaves: dict[tuple[int, int], int] = field(default_factory=dict)
    """(leaf that forward copies, what it contained) -> op that reads it first."""


class Oracle:
    def __init__(self, step: Step, schedule: Schedule) -> None:
        self.step = step
        self.schedule = schedule
        self.numbers: dict[tuple, int] = {}
        self.content_of: dict[int, int] = {}
        self.before: list[dict[int, int]] = []
        self._run_plain()
        kept = schedule.held
        if len(set(kept)) != len(kept):
            raise Refused("decided twice")
        if any(not 0 <= s < len(step.storages) for s in kept):
            raise Refused("unknown storage")
        self.dropped = {s.id for s in step.storages if self._may_drop(s.id)} - set(kept)
        self._nesting()
        self.played: list[Played] = []
        for window in schedule.windows:
            self.played.append(self._play(window))
        self.wanted: dict[tuple[int, int], int] = {}
        self._serve()

    # The plain step -------------------------------------------------------

    def _number(self, key: tuple) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _results(self, i: int, inputs: tuple[int, ...]) -> dict[int, int]:
        """Content of every storage that op i makes or writes."""
        op = self.step.ops[i]
        touched = {self.step.values[o].storage for o in op.outputs if self._birth(self.step.values[o].storage) == i}
        return {s: self._number((i, s, inputs)) for s in sorted(touched | set(op.writes))}

    def _birth(self, s: int) -> int:
        return self.step.storages[s].birth

    def _run_plain(self) -> None:
        memory = {s.id: self._number(("leaf", s.id)) for s in self.step.storages if s.birth == NO_OP}
        for op in self.step.ops:
            self.before.append(dict(memory))
            inputs = tuple(memory[self.step.values[v].storage] for v in op.inputs)
            for v, content in zip(op.inputs, inputs, strict=True):
                assert self.content_of.setdefault(v, content) == content
            memory.update(self._results(op.index, inputs))
            for v in op.outputs:
                self.content_of.setdefault(v, memory[self.step.values[v].storage])

    def _may_drop(self, s: int) -> bool:
        x = self.step.storages[s]
        saved = any(self.step.values[save.value].storage == s for save in self.step.saves)
        kind = x.category in (Category.ACTIVATION, Category.TEMPORARY)
        return saved and kind and not x.keep_reason and x.saved_until > x.held_until

    # Windows --------------------------------------------------------------

    def _ancestors(self, window: Window) -> list[int]:
        found = []
        while window.parent != NO_WINDOW:
            found.append(window.parent)
            window = self.schedule.windows[window.parent]
        return found

    def _nesting(self) -> None:
        windows = self.schedule.windows
        for i, w in enumerate(windows):
            if w.id != i or not NO_WINDOW <= w.parent < i or not 0 <= w.start <= w.stop < len(self.step.ops):
                raise Refused("malformed window")
        for a in windows:
            for b in windows[a.id + 1 :]:
                overlap = a.start <= b.stop and b.start <= a.stop
                related = a.id in self._ancestors(b)
                if related and not a.start <= b.start <= b.stop <= a.stop:
                    raise Refused("child outside its parent")
                if overlap and not related:
                    raise Refused("windows cross")
        for w in windows:
            if list(w.ops) != sorted(set(w.ops)) or any(not 0 <= i < w.start for i in w.ops):
                raise Refused("ops out of order")
            if any(not self.step.ops[i].replayable for i in w.ops):
                raise Refused("not replayable")
            if len(set(w.retain)) != len(w.retain) or len(set(w.copies)) != len(w.copies):
                raise Refused("listed twice")

    def _play(self, window: Window) -> Played:
        play = Played(window, [], {}, {}, set(), [])
        keys = [(self.step.values[c].storage, self.content_of.get(c)) for c in window.copies]
        if len(set(keys)) != len(keys):
            raise Refused("copied twice")
        for position, i in enumerate(window.ops):
            op = self.step.ops[i]
            sources = [self._source(play, v, position, i) for v in op.inputs]
            contents = tuple(b.content if isinstance(b, Buffer) else b for b in sources)
            read = {self.step.values[v].storage for v in op.inputs}
            for s in read & set(op.writes):
                mine = [b for v, b in zip(op.inputs, sources, strict=True) if self.step.values[v].storage == s]
                if not all(isinstance(b, Buffer) for b in mine) or s not in play.final:
                    raise Refused("writes what is not private")
            for s, content in self._results(i, contents).items():
                if s in op.writes and s not in read:
                    continue
                if s in op.writes:
                    play.final[s].content = content
                    play.final[s].uses.append(position)
                else:
                    play.final[s] = Buffer(s, content, position, uses=[position])
                    play.buffers.append(play.final[s])
            for o in op.outputs:
                v = self.step.values[o]
                if v.storage in play.final and (self._birth(v.storage) == i or v.storage in read):
                    play.final[v.storage].objects.add(v.view)
        for s in window.retain:
            if s not in play.final or play.final[s].content != self.before[window.start].get(s):
                raise Refused("retains what it does not make")
        if set(play.copied) != set(window.copies):
            raise Refused("a copy of no use")
        return play

    def _source(self, play: Played, value: int, position: int, i: int) -> Buffer | int:
        """The buffer, or the content of what is shared."""
        v = self.step.values[value]
        s, want = v.storage, self.content_of[value]
        buffer = play.final.get(s)
        if buffer and buffer.content == want and self._shows(buffer, v.view):
            buffer.uses.append(position)
            return buffer
        start = play.window.start
        shown = self.before[start].get(s)
        retainers = [w for w in self._ancestors(play.window) if s in self.played[w].window.retain]
        if retainers and self.played[retainers[0]].final[s].content == want == shown:
            play.borrowed.append((retainers[0], s))
            return want
        x = self.step.storages[s]
        if (s in self.schedule.held or (x.birth == NO_OP and x.category.is_static)) and shown == want:
            if x.copied:
                play.leaves.setdefault((s, want), i)
            else:
                play.captured.add(s)
            return want
        for c in play.window.copies:
            if self.step.values[c].storage == s and self.content_of[c] == want:
                play.copied.setdefault(c, i)
                copy = Buffer(s, want, position, uses=[position], is_copy=True)
                play.final[s] = copy
                play.buffers.append(copy)
                return copy
        raise Refused(f"window {play.window.id} op {i} value {value} is not there")

    def _shows(self, buffer: Buffer, view: int) -> bool:
        """Whether the buffer serves a tensor object."""
        return buffer.is_copy or view in buffer.objects or self.step.values[view].producer == NO_OP

    def _serve(self) -> None:
        for play in self.played:
            for window, s in play.borrowed:
                self.wanted[window, s] = max(self.wanted.get((window, s), -1), play.window.start)
        for save in self.step.saves:
            v = self.step.values[save.value]
            if v.storage not in self.dropped:
                continue
            for read in save.reads:
                around = [w for w in self.schedule.windows if w.start <= read.first <= w.stop and v.storage in w.retain]
                if not around:
                    raise Refused(f"nothing serves {v.storage} at {read.first}")
                inner = max(around, key=lambda w: len(self._ancestors(w)))
                buffer = self.played[inner.id].final[v.storage]
                if buffer.content != self.content_of[save.value]:
                    raise Refused("serves other contents")
                if not self._shows(buffer, v.view):
                    raise Refused("the tensor object is not made")
                key = (inner.id, v.storage)
                self.wanted[key] = max(self.wanted.get(key, -1), read.last)

    # Bytes ----------------------------------------------------------------

    def _size(self, s: int) -> int:
        return self.step.storages[s].nbytes if self.step.storages[s].device == self.step.device else 0

    def _until(self, s: int) -> int:
        """Last moment at which a storage of the step is there."""
        x = self.step.storages[s]
        until = x.held_until if s in self.dropped else x.death
        return max([until, *(p.window.start for p in self.played if s in p.captured)])

    def live(self, t: int) -> int:
        """Bytes while op t runs."""
        total = self.step.outside_bytes + self.step.ops[t].workspace_bytes
        total += sum(self._size(s.id) for s in self.step.storages if s.birth <= t <= self._until(s.id))
        return total + self._leaf_copies(t, t) + self._extra(t, lambda w: w.start <= t)

    def _leaf_copies(self, t: int, begun: int) -> int:
        """Copies of leaves that some window needs at t, of those whose reader is no later than `begun`."""
        there = {key for p in self.played for key, i in p.leaves.items() if i <= begun and t <= p.window.start}
        return sum(self._size(s) for s, _ in there)

    def _extra(self, t: int, replayed) -> int:
        """Copies, generator states and retained storages at t, for the windows that have replayed by then."""
        total = 0
        for play in self.played:
            w = play.window
            for c, first in play.copied.items():
                if first <= t <= w.start and (first < t or replayed(w) or first != w.start):
                    total += self._size(self.step.values[c].storage)
            for s in w.retain:
                last = self.wanted.get((w.id, s), -1)
                charged = play.final[s].is_copy and t == w.start
                if replayed(w) and t <= last and not charged:
                    total += self._size(s)
        drawn = {i for p in self.played for i in p.window.ops if self.step.ops[i].random}
        for i in drawn:
            if i <= t <= max(p.window.start for p in self.played if i in p.window.ops):
                total += self.step.ops[i].rng_bytes
        return total

    def replay(self, window: Window) -> int:
        """Highest bytes while a window replays."""
        t = window.start
        base = self.step.outside_bytes
        base += sum(self._size(s.id) for s in self.step.storages if s.birth < t <= self._until(s.id))
        ancestors = self._ancestors(window)
        base += self._leaf_copies(t, t - 1) + self._extra(t, lambda w: w.start < t or w.id in ancestors)
        play = self.played[window.id]
        highest = 0
        for position, i in enumerate(window.ops):
            total = base + self.step.ops[i].workspace_bytes
            there = []
            for b in play.buffers:
                kept = b.storage in window.retain and play.final[b.storage] is b
                kept = kept and self.wanted.get((window.id, b.storage), -1) >= t
                if not b.is_copy and b.position <= position and (kept or max(b.uses) >= position):
                    there.append((b, kept))
            total += sum(self._size(b.storage) for b, _ in there) - self._given(i, position, there)
            highest = max(highest, total)
        return highest

    def _given(self, i: int, position: int, there: list[tuple[Buffer, bool]]) -> int:
        """Bytes that the result of op i takes over from an argument that dies with it."""
        op = self.step.ops[i]
        if not op.overwrites or len(op.outputs) != 1 or op.outputs[0] < 0:
            return 0
        result = self.step.values[op.outputs[0]]
        size = self._size(result.storage)
        if self._birth(result.storage) != i or size < spare.MIN_BYTES:
            return 0
        for value in op.inputs:
            v = self.step.values[value]
            alike = (v.shape, v.stride, v.offset, v.dtype) == (result.shape, result.stride, 0, result.dtype)
            for b, kept in there:
                if (
                    b.storage == v.storage
                    and alike
                    and not kept
                    and max(b.uses) == position
                    and self._size(b.storage) == size
                ):
                    return size
        return 0

    def timeline(self) -> tuple[list[int], list[int]]:
        """(bytes while each op runs, highest bytes of the replays before it)."""
        live = [self.live(t) for t in range(len(self.step.ops))]
        before = [0] * len(self.step.ops)
        for w in self.schedule.windows:
            before[w.start] = max(before[w.start], self.replay(w))
        return live, before
