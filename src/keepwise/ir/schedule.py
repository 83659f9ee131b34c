"""`Schedule`: what to do differently from the plain step.

Semantics, in four rules. They are what `simulate` checks and what `runtime` does.

1. A *droppable* storage is one that autograd saves, that is an activation or temporary, that has no `keep_reason` and whose
   `saved_until` is later than its `held_until`. A droppable storage is **held** (listed in `held`: references from its birth until
   the last read), or else **dropped**: nothing of ours holds it after forward, and each of its reads is
   served by a window.
2. A **window** replays `ops` (in index order, on private storages) immediately before moment `start`. An input of a replayed op
   is, in this order of preference: made earlier in the same replay; retained by an enclosing window; held from forward. Held
   from forward means one of: a parameter, buffer or input, or any storage in `held`, at the version that it has just before
   `start`; a value in this window's `copies`. What is held only because a window reads it (it is in `held` but autograd does not
   save it, or reads it earlier) is charged from birth until the last moment at which a save or a window reads it.
   Of a `Storage.copied` leaf forward takes one copy a version, just before the first op that reads it there and that some window
   replays. It serves all windows that read that version, and is charged until the last of them starts; an op that reads the leaf
   after that has it copied anew.
3. A replayed storage listed in `retain` lives until its last read inside the window: a save read at a moment in
   `[start, stop]`, or an inner window that starts there. Every other replayed storage dies within the replay, at its last use.
   An op with `Op.overwrites` gives the memory of an argument of the same geometry that dies there to its result.
   `retain` names storages by their id in the plain step; the replay must leave them at the version that they have just before `start`.
   A replayed op that draws random numbers is charged `Op.rng_bytes` from its moment in forward until `start`.
4. Windows nest: `parent` encloses the child's whole span `[start, stop]`. An op may be replayed by several windows.

A read of a dropped save at moment `m` is served by the innermost window around `m` that retains its storage.
"""

from __future__ import annotations

import msgspec

SCHEDULE_VERSION = 1

NO_WINDOW = -1


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """A span of backward that is served by one replay."""

    id: int
    """Index in `Schedule.windows`; a parent comes before its children."""
    start: int
    """Moment before which the replay runs: the first op of the first autograd node that it serves."""
    stop: int
    """Last moment that it serves."""
    ops: tuple[int, ...]
    """Ops to replay, ascending. May be empty for a window that only groups others."""
    retain: tuple[int, ...] = ()
    """Storages (by id in the step) whose replayed copy lives on until its last read in the window."""
    copies: tuple[int, ...] = ()
    """Values that are copied in forward, just before the first op of `ops` that reads them, because their storage is written
    later: charged (their whole storage's bytes) from that moment until `start`."""
    parent: int = NO_WINDOW
    """Enclosing window."""
    path: str = ""
    """Module path that it covers, for people."""


class Schedule(msgspec.Struct, frozen=True, kw_only=True):
    """A plan for one `Step`."""

    version: int = SCHEDULE_VERSION
    held: tuple[int, ...] = ()
    """Storages that are held from forward: droppable ones that are kept, and others that a replay reads."""
    windows: tuple[Window, ...] = ()
    planner: str = ""
    """Name of the planner that made it."""
    why: str = ""
    """Why this planner, and what it proved."""

    def to_json(self) -> bytes:
        """Versioned JSON."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Schedule:
        """Read what `to_json` wrote.

        Raises:
            ValueError: malformed JSON or another version.
        """
        schedule = msgspec.json.decode(data, type=Schedule)
        if schedule.version != SCHEDULE_VERSION:
            raise ValueError(f"schedule has version {schedule.version}, this release reads {SCHEDULE_VERSION}")
        return schedule
