"""A dynamic program over the chain of stages: which option each takes, and which segments are replayed whole.

Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova (2020), "Optimal checkpointing for heterogeneous chains: how to train
deep neural networks with limited memory" (persistent schedules), with a menu of options a stage in place of their two,
and with a first pass, the real forward, that costs nothing:

    R[s](m)    least added seconds of the backward of stages s..., the real forward being about to enter stage s
    V[s,t](m)  least seconds of the backward of stages s..t when only the inputs of s are there, replays included

m counts bytes on the whole device above a common level, inputs of s included. Either the pass drops everything up to the
inputs of a later stage k (a segment s..k-1, to be replayed), or stage s takes an option and the pass goes on to s + 1.
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


class ChainProgram:
    """Tables for one chain and one grain.

    Args:
        links: the stages.
        low: bytes that count as zero (at most the smallest level).
        high: largest budget of interest, in bytes.
        grains: number of grains between, up to a factor of two.
        rounding: `up` for plans that fit, `down` for a bound.
    """

    def __init__(
        self,
        links: Sequence[Link],
        *,
        low: int,
        high: int,
        grains: int,
        rounding: Literal["up", "down"],
        segments: bool = True,
    ) -> None:
        self.links = tuple(links)
        self.low = low
        # A power of two: sizes are multiples of it, hence little is rounded.
        self.grain = 1 << max(0, (max(high - low, 1) // grains).bit_length() - 1)
        self.size = -(-(high - low) // self.grain) + 1
        self.up = rounding == "up"
        # Storage -> last stage that it is an input of.
        self._crosses = {i.storage: s for s, link in enumerate(self.links) for i in link.inputs}
        self.segments = segments
        self._menus: dict[int, list[tuple[float, int, Option]]] = {}
        self._keys: dict[tuple[int, int, int, tuple[tuple[int, int], ...]], int] = {}
        self._tables: dict[int, Table] = {}
        self._key_of: dict[tuple[int, int], int] = {}
        if segments:
            self._build_segments()
        self.root = self._build_root()

    def grains(self, num_bytes: int) -> int:
        """Bytes in grains."""
        return -(-num_bytes // self.grain) if self.up else num_bytes // self.grain

    # The tables.

    def _shift(self, table: Table, grains: int) -> Table:
        """Table at `m - grains`."""
        if grains <= 0:
            if grains == 0:
                return table
            moved = np.full(self.size, table[-1])
            moved[: self.size + grains] = table[-grains:]
            return moved
        moved = np.full(self.size, np.inf)
        if grains < self.size:
            moved[grains:] = table[: self.size - grains]
        return moved

    def _need(self, s: int, option: Option, forward: bool) -> int:
        """Grains that an option needs in its stage, on the absolute scale."""
        link = self.links[s]
        need = max(option.peak_bytes, link.gap_bytes) + link.level
        if forward:
            need = max(need, option.forward_bytes + link.forward_level)
        return self.grains(need - self.low)

    def _left(self, s: int, k: int) -> int:
        """Grains of the inputs of s that are not inputs of k too: what a pass leaves behind."""
        return self.grains(sum(i.nbytes for i in self.links[s].inputs if self._crosses[i.storage] < k))

    def _extra(self, s: int, k: int) -> int:
        """Bytes of the inputs of k that are not inputs of s."""
        if k == s:
            return 0
        mine = {i.storage for i in self.links[s].inputs}
        return sum(i.nbytes for i in self.links[k].inputs if i.storage not in mine)

    def _key(self, s: int, t: int) -> int:
        return self._key_of[s, t]

    def _build_segments(self) -> None:
        count = len(self.links)
        links = self.links
        for t in range(count):
            for s in range(t, -1, -1):
                crossing = tuple(
                    (i.nbytes, min(self._crosses[i.storage], t) - s)
                    for i in links[s].inputs
                    if self._crosses[i.storage] > s
                )
                if s == t:
                    name = (-1, links[s].kind, 0, crossing)
                else:
                    name = (self._key_of[s + 1, t], links[s].kind, links[s].level - links[t].level, crossing)
                fresh = name not in self._keys
                key = self._key_of[s, t] = self._keys.setdefault(name, len(self._keys))
                if fresh:
                    self._tables[key] = self._segment(s, t)

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
        replayed = 0.0
        room = 0
        for k in range(s + 1, t + 1):
            replayed += links[k - 1].pass_seconds
            if not np.isfinite(replayed):
                break
            private = links[k - 1].pass_bytes + self._extra(s, k - 1)
            room = max(room, self.grains(links[t].start_bytes + here.input_bytes + private))
            rest = self._shift(self._tables[self._key(k, t)], self._left(s, k))
            inner = self._shift(self._tables[self._key(s, k - 1)], self._level_shift(t, k - 1))
            self._lower(best, rest + inner + replayed, room)
        if np.isfinite(here.pass_seconds):
            room = self.grains(links[t].start_bytes + here.input_bytes + here.pass_bytes)
            tail = self._tables[self._key(s + 1, t)]
            rise = here.level - links[t].level
            held = self._left(s, s + 1)
            for option in here.options:
                if option.held:
                    need = max(room, self.grains(max(option.peak_bytes, here.gap_bytes) + rise))
                    moved = self._shift(tail, held + self.grains(option.held_bytes))
                    self._lower(best, moved + (option.seconds + here.pass_seconds), need)
        return best

    def _level_shift(self, t: int, k: int) -> int:
        """Grains by which the level of stage k lies above that of t."""
        rise = self.links[k].level - self.links[t].level
        return self.grains(rise) if rise >= 0 else -((-rise) // self.grain if self.up else -(rise // self.grain))

    def _lower(self, best: Table, candidate: Table, need: int) -> None:
        need = max(need, 0)
        if need < self.size:
            np.minimum(best[need:], candidate[need:], out=best[need:])

    def _build_root(self) -> list[Table]:
        count = len(self.links)
        tables: list[Table] = [np.zeros(self.size)] * (count + 1)
        for s in range(count - 1, -1, -1):
            best = np.full(self.size, np.inf)
            here = self.links[s]
            held = self._left(s, s + 1)
            for option in here.options:
                moved = self._shift(tables[s + 1], held + self.grains(option.held_bytes))
                self._lower(best, moved + option.seconds, self._need(s, option, True))
            if self.segments:
                room = 0
                for k in range(s + 1, count + 1):
                    room = max(room, self._front(s, k - 1))
                    inner = self._absolute(s, k - 1)
                    if inner is None:
                        break
                    self._lower(best, self._shift(tables[k], self._left(s, k)) + inner, room)
            tables[s] = best
        return tables

    def _front(self, s: int, j: int) -> int:
        """Grains that the forward of stage j needs while it drops everything since the inputs of s."""
        link = self.links[j]
        inputs = sum(i.nbytes for i in self.links[s].inputs if i.held_until < link.forward_stop)
        return self.grains(link.forward_high + link.forward_level + inputs - self.low)

    def _absolute(self, s: int, t: int) -> Table | None:
        """V[s,t] on the absolute scale; None where it is infinite everywhere."""
        table = self._tables[self._key(s, t)]
        if not np.isfinite(table[-1]):
            return None
        return self._shift(table, self.grains(self.links[t].level - self.low))

    # From tables back to decisions.

    def plan(self, m: int) -> Pass:
        """The pass that reaches `root[0][m]`, which must be finite."""
        entries: list[StageEntry | SegmentEntry] = []
        s = 0
        count = len(self.links)
        while s < count:
            here = self.links[s]
            value = float(self.root[s][m])
            held = self._left(s, s + 1)
            chosen: tuple[float, int, StageEntry | SegmentEntry, int] | None = None
            for option in here.options:
                rest = m - held - self.grains(option.held_bytes)
                if rest < 0 or self._need(s, option, True) > m:
                    continue
                total = option.seconds + float(self.root[s + 1][rest])
                if total <= value + _TINY and (chosen is None or option.peak_bytes < chosen[0]):
                    chosen = (option.peak_bytes, s + 1, StageEntry(stage=s, option=option), rest)
            if chosen is None:
                room = 0
                for k in range(s + 1, count + 1):
                    room = max(room, self._front(s, k - 1))
                    inner = self._absolute(s, k - 1)
                    if inner is None:
                        break
                    rest = m - self._left(s, k)
                    if rest < 0 or room > m:
                        continue
                    if float(inner[m]) + float(self.root[k][rest]) <= value + _TINY:
                        relative = m - self.grains(self.links[k - 1].level - self.low)
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
            value = float(self._tables[self._key(s, t)][m])
            assert np.isfinite(value), "a segment on the path is feasible"
            if s == t:
                options = [
                    o
                    for o in here.options
                    if not o.held and self.grains(max(o.peak_bytes, here.gap_bytes)) <= m and o.seconds <= value + _TINY
                ]
                entries.append(StageEntry(stage=s, option=min(options, key=lambda o: o.peak_bytes)))
                return Pass(entries=tuple(entries))
            step = self._option_step(s, t, m, value) or self._segment_step(s, t, m, value)
            assert step is not None, "a finite table entry has a choice"
            entry, s, m = step
            entries.append(entry)

    def _option_step(self, s: int, t: int, m: int, value: float) -> tuple[StageEntry, int, int] | None:
        here = self.links[s]
        room = self.grains(self.links[t].start_bytes + here.input_bytes + here.pass_bytes)
        tail = self._tables[self._key(s + 1, t)]
        rise = here.level - self.links[t].level
        for option in here.options:
            if option.held:
                rest = m - self._left(s, s + 1) - self.grains(option.held_bytes)
                if rest < 0 or max(room, self.grains(max(option.peak_bytes, here.gap_bytes) + rise)) > m:
                    continue
                if float(tail[rest]) + (option.seconds + here.pass_seconds) <= value + _TINY:
                    return StageEntry(stage=s, option=option), s + 1, rest
        return None

    def _segment_step(self, s: int, t: int, m: int, value: float) -> tuple[StageEntry | SegmentEntry, int, int] | None:
        links = self.links
        replayed = 0.0
        room = 0
        for k in range(s + 1, t + 1):
            replayed += links[k - 1].pass_seconds
            private = links[k - 1].pass_bytes + self._extra(s, k - 1)
            room = max(room, self.grains(links[t].start_bytes + links[s].input_bytes + private))
            rest = m - self._left(s, k)
            inner_at = m - self._level_shift(t, k - 1)
            if rest < 0 or inner_at < 0 or room > m:
                continue
            inner_at = min(inner_at, self.size - 1)
            total = (
                float(self._tables[self._key(k, t)][rest])
                + float(self._tables[self._key(s, k - 1)][inner_at])
                + replayed
            )
            if total <= value + _TINY:
                inner = self._plan_segment(s, k - 1, inner_at)
                entry = (
                    inner.entries[0]
                    if k - 1 == s and isinstance(inner.entries[0], StageEntry)
                    else SegmentEntry(first=s, last=k - 1, inner=inner)
                )
                return entry, k, rest
        return None
