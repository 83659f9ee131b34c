"""A dynamic program over the chain of stages: which option each takes, and which segments are replayed whole.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2020), "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (persistent schedules), with a menu of options a stage in place of their two,
and with a first pass, the real forward, that costs nothing:

    R[s](m)    least added seconds of the backward of stages s..., the real forward being about to enter stage s
    V[s,t](m)  least seconds of the backward of stages s..t when only the inputs of s are there, replays included

m counts bytes on the whole device above a common level, inputs of s included. Either the pass drops everything up to the
inputs of a later stage k (a segment s..k-1, to be replayed), or stage s takes an option and the pass goes on to s + 1.
A segment leaves behind its inputs and what forward sets aside for its replays (copies of leaves, generator states, packed masks).
Equal sequences of stages share a table. Bytes are counted in grains: rounded up they give plans, rounded down a bound.

Complexity: O(K (n + options)) vector operations over the grains, K distinct sequences (n of them for equal stages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.options import Option

Table = npt.NDArray[np.float64]

_TINY = 1e-9

EXACT_LENGTH = 64
"""Segments of at most as many stages are split anywhere."""

NUM_SPLITS = 40
"""Longer ones at as many places."""


MAX_LENGTH = 256
"""No segment has more stages: in a longer chain some inputs are held, whatever the budget."""


def splits(first: int, last: int) -> list[int]:
    """Where a pass over stages `first..last` may leave its next inputs: all of `first + 1..last`, or a sample of them.

    The sample is dense at both ends. It is a restriction of the family, for plans and bound alike.
    """
    length = last - first
    if length <= EXACT_LENGTH:
        return list(range(first + 1, last + 1))
    edge = NUM_SPLITS // 4
    # Relative to the first stage, so that equal segments are split alike.
    inner = {
        first + round(edge + i * (length - 2 * edge) / (NUM_SPLITS - 2 * edge))
        for i in range(NUM_SPLITS - 2 * edge + 1)
    }
    ends = {*range(first + 1, first + edge + 1), *range(last - edge + 1, last + 1)}
    return sorted(inner | ends)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """An input of a stage."""

    storage: int
    nbytes: int
    """Bytes that holding it adds."""
    held_until: int
    """Moment until which it is there anyway."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A stage as the chain sees it."""

    kind: int
    """Equal for stages that are the same problem."""
    options: tuple[Option, ...]
    forward_bytes: tuple[int, ...]
    """High water of the stage's forward above `forward_level` under each option, in bytes."""
    inputs: tuple[Held, ...]
    """What crosses the cut before it."""
    level: int
    """Smallest base in the stage's backward, in bytes."""
    gap_bytes: int
    """Highest base above `level` after the stage's backward, before that of the next stage to run, in bytes."""
    forward_level: int
    """Smallest base in the stage's forward, in bytes."""
    forward_high: int
    """High water of the stage's forward above `forward_level` where everything is dropped, in bytes."""
    forward_stop: int
    """First moment after its forward."""
    pass_seconds: float
    """Time to make the stage's outputs from its inputs; infinite where that cannot be replayed."""
    pass_bytes: int
    """High water of that replay beyond the inputs, in bytes."""
    start_bytes: int
    """Base just before the stage's backward above `level`, in bytes."""
    aside_bytes: int
    """Bytes that forward sets aside until the stage's backward where nothing of it is held: copies of leaves, what its ops drew."""
    aside_bytes_through: int
    """The same where its outputs are made again too."""

    @property
    def input_bytes(self) -> int:
        """Bytes of the stage's inputs."""
        return sum(i.nbytes for i in self.inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageEntry:
    """A stage that takes an option in a pass."""

    stage: int
    option: Option


@dataclass(frozen=True, kw_only=True, slots=True)
class SegmentEntry:
    """Stages `first..last` that a pass drops, and how their backward is run."""

    first: int
    last: int
    inner: Pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Pass:
    """One run of forward over consecutive stages (the real one, or a replay) and what it leaves."""

    entries: tuple[StageEntry | SegmentEntry, ...]


class _Steps:
    """A table that falls with the budget: where it becomes finite, and from where on it is flat."""

    __slots__ = ("first", "flat", "last", "values")

    def __init__(self, values: Table) -> None:
        self.last = float(values[-1])
        finite = np.isfinite(values)
        self.first = int(finite.argmax()) if finite.any() else len(values)
        falling = np.flatnonzero(values != self.last)
        self.flat = int(falling[-1]) + 1 if len(falling) else 0
        self.values = values[: self.flat + 1].copy()

    def at(self, m: int) -> float:
        """Value at m >= 0."""
        return float(self.values[m]) if m < len(self.values) else self.last

    def piece(self, a: int, b: int) -> Table:
        """Values at a..b-1, a >= 0."""
        if b <= len(self.values):
            return self.values[a:b]
        known = self.values[a:]
        return (
            np.concatenate([known, np.full(b - max(a, len(self.values)), self.last)])
            if a < len(self.values)
            else np.full(b - a, self.last)
        )


class ChainProgram:
    """Tables for one chain and one grain.

    Args:
        links: the stages.
        low: bytes that count as zero (at most the smallest level).
        high: largest budget of interest, in bytes.
        grain: bytes of a grain.
        rounding: `up` for plans that fit, `down` for a bound.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        low: int,
        high: int,
        grain: int,
        rounding: Literal["up", "down"],
    ) -> None:
        self.links = tuple(links)
        self.low = low
        self.grain = grain
        self.size = -(-(high - low) // self.grain) + 1
        self.up = rounding == "up"
        # Storage -> last stage that it is an input of.
        self._crosses = {i.storage: s for s, link in enumerate(self.links) for i in link.inputs}
        self._keys: dict[tuple[int, int, int, tuple[tuple[int, int], ...]], int] = {}
        self._tables: dict[int, _Steps] = {}
        self._key_of: dict[tuple[int, int], int] = {}
        self._until = [0.0]
        self._dead = [0]
        self._aside = [0]
        for link in self.links:
            finite = np.isfinite(link.pass_seconds)
            self._until.append(self._until[-1] + (link.pass_seconds if finite else 0.0))
            self._dead.append(self._dead[-1] + (not finite))
            self._aside.append(self._aside[-1] + link.aside_bytes_through)
        self._highs: dict[int, list[int]] = {}
        self._fronts: dict[int, list[int]] = {}
        self._build_segments()
        self.root = self.build_root()

    def grains(self, num_bytes: int) -> int:
        """Bytes in grains."""
        return -(-num_bytes // self.grain) if self.up else num_bytes // self.grain

    # The tables.

    def _relax(self, best: Table, need: int, seconds: float, *parts: tuple[_Steps, int]) -> None:
        """`best[m] = min(best[m], seconds + sum of table[m - shift])` where `m >= need`; a table goes on flat beyond its end."""
        first = max(need, 0, *(steps.first + shift for steps, shift in parts))
        stop = min(self.size, max(0, *(steps.flat + shift for steps, shift in parts)))
        if first >= self.size:
            return
        stop = max(stop, first)
        if stop > first:
            steps, shift = parts[0]
            total = steps.piece(first - shift, stop - shift) + seconds
            for steps, shift in parts[1:]:
                total += steps.piece(first - shift, stop - shift)
            np.minimum(best[first:stop], total, out=best[first:stop])
        if stop < self.size:
            tail = seconds + sum(steps.last for steps, _ in parts)
            np.minimum(best[stop:], tail, out=best[stop:])

    def _need(self, s: int, number: int) -> int:
        """Grains that an option needs in its stage in the first pass, on the absolute scale."""
        link = self.links[s]
        need = max(link.options[number].peak_bytes, link.gap_bytes) + link.level
        return self.grains(max(need, link.forward_bytes[number] + link.forward_level) - self.low)

    def _inputs_left(self, s: int, k: int) -> int:
        """Bytes of the inputs of s that are not inputs of k too: what a pass leaves behind."""
        return sum(i.nbytes for i in self.links[s].inputs if self._crosses[i.storage] < k)

    def _left(self, s: int, number: int) -> int:
        """Grains that a pass leaves behind where stage s takes an option."""
        return self.grains(self._inputs_left(s, s + 1)) + self.grains(self.links[s].options[number].held_bytes)

    def _left_by_segment(self, s: int, k: int) -> int:
        """Grains that a pass leaves behind where it drops stages s..k-1."""
        return self.grains(self._inputs_left(s, k) + self._set_aside(s, k - 1))

    def _set_aside(self, s: int, t: int) -> int:
        """Bytes that forward sets aside for replays of stages s..t, of which nothing but the inputs of s is held."""
        return self._aside[t] - self._aside[s] + self.links[t].aside_bytes

    def _steps(self, s: int, t: int) -> _Steps:
        return self._tables[self._key_of[s, t]]

    def _build_segments(self) -> None:
        count = len(self.links)
        links = self.links
        for t in range(count):
            for s in range(t, max(t - MAX_LENGTH, -1), -1):
                # All inputs, also those that end here: a stage whose input exists anyway has none, and leaves nothing behind.
                crossing = tuple((i.nbytes, min(self._crosses[i.storage], t) - s) for i in links[s].inputs)
                if s == t:
                    name = (-1, links[s].kind, 0, crossing)
                else:
                    name = (self._key_of[s + 1, t], links[s].kind, links[s].level - links[t].level, crossing)
                fresh = name not in self._keys
                key = self._key_of[s, t] = self._keys.setdefault(name, len(self._keys))
                if fresh:
                    self._tables[key] = _Steps(self._segment(s, t))

    def _segment(self, s: int, t: int) -> Table:
        """V[s,t] relative to the level of t: index m means `level(t) - low + m` on the absolute scale."""
        links = self.links
        best = np.full(self.size, np.inf)
        here = links[s]
        if s == t:
            for option in here.options:
                if not option.held:
                    need = self.grains(max(option.peak_bytes, here.gap_bytes))
                    if need < self.size:
                        np.minimum(best[need:], option.seconds, out=best[need:])
            return best
        for k in splits(s, t):
            replayed = self._pass_seconds(s, k)
            if not np.isfinite(replayed):
                break
            room = self._pass_room(s, k, t)
            rest = (self._steps(k, t), self._left_by_segment(s, k))
            inner = (self._steps(s, k - 1), self._level_shift(t, k - 1))
            self._relax(best, room, replayed, rest, inner)
        if np.isfinite(here.pass_seconds):
            room = self._pass_room(s, s + 1, t)
            tail = self._steps(s + 1, t)
            rise = here.level - links[t].level
            for number, option in enumerate(here.options):
                if option.held:
                    need = max(room, self.grains(max(option.peak_bytes, here.gap_bytes) + rise))
                    seconds = option.seconds + here.pass_seconds
                    self._relax(best, need, seconds, (tail, self._left(s, number)))
        return best

    def _pass_seconds(self, s: int, k: int) -> float:
        """Time of a replay from the inputs of s to those of k."""
        return self._until[k] - self._until[s] if self._dead[k] == self._dead[s] else float("inf")

    def _pass_room(self, s: int, k: int, t: int) -> int:
        """Grains that this replay needs before the backward of t, relative to its level, what is set aside for s..t included."""
        links = self.links
        highs = self._highs.setdefault(s, [links[s].pass_bytes])
        mine = {i.storage for i in links[s].inputs}
        for j in range(s + len(highs), k):
            new = sum(i.nbytes for i in links[j].inputs if i.storage not in mine)
            highs.append(max(highs[-1], links[j].pass_bytes + new))
        return self.grains(links[t].start_bytes + links[s].input_bytes + highs[k - s - 1] + self._set_aside(s, t))

    def _level_shift(self, t: int, k: int) -> int:
        """Grains by which the level of stage k lies above that of t."""
        rise = self.links[k].level - self.links[t].level
        return self.grains(rise) if rise >= 0 else -((-rise) // self.grain if self.up else -(rise // self.grain))

    def build_root(self, reserve: int = 0) -> list[Table]:
        """R[s] for all s and, at the end, where nothing is left to do.

        Args:
            reserve: grains that must be left when the first pass ends: it leaves at most the budget less these behind.
        """
        count = len(self.links)
        end = np.zeros(self.size)
        end[: max(reserve, 0)] = np.inf
        tables: list[Table] = [end] * (count + 1)
        steps: list[_Steps] = [_Steps(tables[count])] * (count + 1)
        for s in range(count - 1, -1, -1):
            best = np.full(self.size, np.inf)
            for number, option in enumerate(self.links[s].options):
                self._relax(best, self._need(s, number), option.seconds, (steps[s + 1], self._left(s, number)))
            for k in splits(s, min(s + MAX_LENGTH, count)):
                inner = self._steps(s, k - 1)
                if not np.isfinite(inner.last):
                    break
                room = self._front(s, k)
                self._relax(best, room, 0.0, (steps[k], self._left_by_segment(s, k)), (inner, self._absolute(k - 1)))
            tables[s] = best
            steps[s] = _Steps(best)
        return tables

    def _front(self, s: int, k: int) -> int:
        """Grains that the real forward of stages s..k-1 needs while it drops everything since the inputs of s."""
        highs = self._fronts.setdefault(s, [])
        for j in range(s + len(highs), k):
            link = self.links[j]
            inputs = sum(i.nbytes for i in self.links[s].inputs if i.held_until < link.forward_stop)
            high = link.forward_high + link.forward_level + inputs + self._aside[j] - self._aside[s]
            highs.append(max(highs[-1], high) if highs else high)
        return self.grains(highs[k - s - 1] - self.low)

    def _absolute(self, t: int) -> int:
        """Grains by which the level of stage t lies above zero: tables of segments that end in it are relative to that."""
        return self.grains(self.links[t].level - self.low)

    # From tables back to decisions.

    def plan(self, m: int, root: Sequence[Table] | None = None) -> Pass:
        """The pass that reaches `root[0][m]`, which must be finite; `root` is that of all budgets unless given."""
        root = root or self.root
        entries: list[StageEntry | SegmentEntry] = []
        s = 0
        count = len(self.links)
        while s < count:
            here = self.links[s]
            value = float(root[s][m])
            chosen: tuple[float, int, StageEntry | SegmentEntry, int] | None = None
            for number, option in enumerate(here.options):
                rest = m - self._left(s, number)
                if rest < 0 or self._need(s, number) > m:
                    continue
                total = option.seconds + float(root[s + 1][rest])
                if total <= value + _TINY * (1.0 + value) and (chosen is None or option.peak_bytes < chosen[0]):
                    chosen = (option.peak_bytes, s + 1, StageEntry(stage=s, option=option), rest)
            if chosen is None:
                for k in splits(s, min(s + MAX_LENGTH, count)):
                    inner = self._steps(s, k - 1)
                    if not np.isfinite(inner.last):
                        break
                    room = self._front(s, k)
                    rest = m - self._left_by_segment(s, k)
                    relative = m - self._absolute(k - 1)
                    if rest < 0 or room > m or relative < 0:
                        continue
                    if inner.at(relative) + float(root[k][rest]) <= value + _TINY * (1.0 + value):
                        relative = min(relative, self.size - 1)
                        segment = SegmentEntry(first=s, last=k - 1, inner=self._plan_segment(s, k - 1, relative))
                        chosen = (0.0, k, segment, rest)
                        break
            assert chosen is not None, "a finite table entry has a choice"
            _, s, entry, m = chosen
            entries.append(entry)
        return Pass(entries=tuple(entries))

    def _plan_segment(self, s: int, t: int, m: int) -> Pass:
        links = self.links
        entries: list[StageEntry | SegmentEntry] = []
        while True:
            here = links[s]
            value = self._steps(s, t).at(m)
            assert np.isfinite(value), "a segment on the path is feasible"
            if s == t:
                options = [
                    o
                    for o in here.options
                    if not o.held
                    and self.grains(max(o.peak_bytes, here.gap_bytes)) <= m
                    and o.seconds <= value + _TINY * (1.0 + value)
                ]
                entries.append(StageEntry(stage=s, option=min(options, key=lambda o: o.peak_bytes)))
                return Pass(entries=tuple(entries))
            step = self._option_step(s, t, m, value) or self._segment_step(s, t, m, value)
            assert step is not None, "a finite table entry has a choice"
            entry, s, m = step
            entries.append(entry)

    def _option_step(self, s: int, t: int, m: int, value: float) -> tuple[StageEntry, int, int] | None:
        here = self.links[s]
        room = self._pass_room(s, s + 1, t)
        tail = self._steps(s + 1, t)
        rise = here.level - self.links[t].level
        for number, option in enumerate(here.options):
            if option.held:
                rest = m - self._left(s, number)
                if rest < 0 or max(room, self.grains(max(option.peak_bytes, here.gap_bytes) + rise)) > m:
                    continue
                if tail.at(rest) + (option.seconds + here.pass_seconds) <= value + _TINY * (1.0 + value):
                    return StageEntry(stage=s, option=option), s + 1, rest
        return None

    def _segment_step(self, s: int, t: int, m: int, value: float) -> tuple[StageEntry | SegmentEntry, int, int] | None:
        for k in splits(s, t):
            replayed = self._pass_seconds(s, k)
            if not np.isfinite(replayed):
                break
            room = self._pass_room(s, k, t)
            rest = m - self._left_by_segment(s, k)
            inner_at = m - self._level_shift(t, k - 1)
            if rest < 0 or inner_at < 0 or room > m:
                continue
            total = self._steps(k, t).at(rest) + self._steps(s, k - 1).at(inner_at) + replayed
            if total <= value + _TINY * (1.0 + value):
                inner = self._plan_segment(s, k - 1, min(inner_at, self.size - 1))
                entry = (
                    inner.entries[0]
                    if k - 1 == s and isinstance(inner.entries[0], StageEntry)
                    else SegmentEntry(first=s, last=k - 1, inner=inner)
                )
                return entry, k, rest
        return None
