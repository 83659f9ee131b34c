"""The least time of *every* schedule of a tiny step within a budget, by a search through states.

A schedule is a sequence of replays, each inside of all that began before it: a span costs nothing, and what a window retains lives until
its last read only. So a schedule is a path through states (moment, what is alive by the schedule), along which four things happen:

    replay      any set of storages is made again from what is alive, by the ops that this takes, and stays alive
    let go      something is not alive any longer
    commit      a saved storage that was held so far is read: it is held until its last read in the plain step, as `Schedule` has it
    go on       what the moment reads is alive, all that is alive fits, and the clock moves

Seconds are the length of the path. Something is let go only where it is in the way (what this moment does or could do does not fit) or
before it commits: bytes that fit cost no time. The judge's own replayer says what a replay takes.

The result is a bound for all schedules, and nearly always the optimum. Left out are: a copy is charged once, from its last reader in
forward on, though it may serve several windows; a view that is read is made by each replay of its storage. The path is told, so that
each difference can be looked at.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Set
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from keepwise.ir import NO_OP, Phase, Schedule, Step, Window
from keepwise.plan.droppable import formally_droppable
from keepwise.simulate.index import index_of
from keepwise.simulate.machine import _Machine  # pyright: ignore[reportPrivateUsage]
from keepwise.simulate.replay import Replayer, _Run  # pyright: ignore[reportPrivateUsage]
from keepwise.simulate.timeline import inner_bytes

TINY = 1e-9


class TooManyStatesError(Exception):
    """The search was given up."""


@dataclass(frozen=True)
class Replayed:
    """A replay of a path."""

    moment: int
    ops: tuple[int, ...]
    retain: tuple[int, ...]
    held: tuple[int, ...] = ()
    """Storages that it reads from forward, or from what an earlier replay retains."""
    copies: tuple[int, ...] = ()
    """Values."""


@dataclass(frozen=True)
class Found:
    """The best path."""

    added_seconds: float
    path: tuple[Replayed, ...]
    held: frozenset[int]
    """Saved storages that were read while they were held."""


def least_seconds(
    step: Step, budget_bytes: int, *, below: float = float("inf"), copies: bool = True, max_states: int = 300_000
) -> Found | None:
    """The shortest path of less than `below` seconds whose peak is at most `budget_bytes`; None if there is none.

    Raises:
        TooManyStatesError: more than `max_states` were seen.
    """
    return _Search(step, budget_bytes, below, copies, max_states).run()


def schedule_of(step: Step, found: Found) -> Schedule:
    """What a path is as a schedule. The judge says what that costs, or whether it is none."""
    droppable, is_leaf = formally_droppable(step), index_of(step).is_leaf
    remade = {s for r in found.path for s in r.retain}
    others = {s for r in found.path for s in r.held if s not in droppable and not is_leaf[s]}
    last = len(step.ops) - 1
    windows = [
        Window(id=i, start=r.moment, stop=last, ops=r.ops, retain=r.retain, copies=r.copies, parent=i - 1)
        for i, r in enumerate(found.path)
    ]
    return Schedule(held=tuple(sorted((droppable - remade) | found.held | others)), windows=tuple(windows))


class _State(NamedTuple):
    """Sets of items, as bits."""

    moment: int
    alive: int
    held: int
    """Of those alive the ones that forward left; the others were made by replays."""
    bound: int
    """Saved storages that were read while they were held."""
    read: int
    """What replays at this moment read: it is there until the moment is over."""


class _Item(NamedTuple):
    """What can be alive by the schedule: a storage at the version that it shows, a copy of a version, the generator's state."""

    kind: str
    id: int
    """Storage, or op that draws."""
    version: int = 0


class _Closure(NamedTuple):
    """What it takes to make some storages again."""

    ops: tuple[int, ...]
    nbytes: int
    seconds: float
    reads: int
    """Items."""
    held: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()


class _Search:
    def __init__(self, step: Step, budget: int, below: float, copies: bool, max_states: int) -> None:
        self.step, self.budget, self.below, self.copies, self.max_states = step, budget, below, copies, max_states
        self.index = index_of(step)
        self.droppable = formally_droppable(step)
        self.end = len(step.ops)
        self.items: list[_Item] = []
        self.size: list[int] = []
        self.begins: list[int] = []
        """Moment at which forward leaves the item behind."""
        self.charged: list[int] = []
        """Moment from which that costs bytes."""
        self._list_items()
        self.bit = {item: 1 << i for i, item in enumerate(self.items)}
        self.reading: dict[tuple[int, int], list[int]] = {}
        """(storage, version) -> ops of forward that read it."""
        for op in step.ops:
            if op.phase is Phase.FORWARD and op.replayable:
                for value in op.inputs:
                    self.reading.setdefault((step.values[value].storage, step.values[value].version), []).append(
                        op.index
                    )
        self.storage_bit = {item.id: self.bit[item] for item in self.items if item.kind == "storage"}
        self.saved = self._mask(self.droppable & self.storage_bit.keys())
        """Droppable storages, as items."""
        self.reads = [
            (r.first, r.last, step.values[save.value].storage)
            for save in step.saves
            if step.values[save.value].storage in self.droppable
            for r in save.reads
        ]
        self.live, self.before = self._own_bytes()
        self.useful = self._useful()
        self.closures: dict[tuple[int, int, frozenset[int]], list[_Closure]] = {}

    # ------------------------------------------------------------------ tables

    def _own_end(self, s: int) -> int:
        """Last moment at which a storage is alive whatever is planned."""
        storage = self.step.storages[s]
        return storage.held_until if s in self.droppable else storage.death

    def _list_items(self) -> None:
        step, charge = self.step, self.index.charge
        readers: dict[tuple[int, int], int] = {}
        for op in step.ops:
            if op.phase is Phase.FORWARD:
                for value in op.inputs:
                    v = step.values[value]
                    readers[v.storage, v.version] = op.index
                if op.random:
                    self._add(_Item("draw", op.index), op.rng_bytes, op.index, op.index)
        for s in step.storages:
            if s.birth != NO_OP and step.ops[s.birth].phase is Phase.FORWARD:
                ends = self._own_end(s.id) + 1
                self._add(_Item("storage", s.id), charge[s.id], s.birth + 1 if s.id in self.droppable else ends, ends)
        for (s, version), last in readers.items():
            # A copy of what can be held is of use only where holding commits.
            if (
                (s in self.droppable and self.copies)
                or step.storages[s].copied
                or version < step.storages[s].versions - 1
            ):
                self._add(_Item("copy", s, version), charge[s], last, last)

    def _add(self, item: _Item, nbytes: int, begins: int, charged: int) -> None:
        self.items.append(item)
        self.size.append(nbytes)
        self.begins.append(begins)
        self.charged.append(charged)

    def _own_bytes(self) -> tuple[list[int], list[int]]:
        """Bytes that no schedule can change: while each op runs, and just before it."""
        live, before = [], []
        charge = self.index.charge
        for t in range(self.end):
            there = [s for s in self.step.storages if s.birth <= t <= self._own_end(s.id)]
            live.append(sum(charge[s.id] for s in there) + self.step.ops[t].workspace_bytes + self.step.outside_bytes)
            before.append(sum(charge[s.id] for s in there if s.birth < t) + self.step.outside_bytes)
        return live, before

    def _useful(self) -> list[int]:
        """By moment: the items that a read, or a replay that leads to one, can want at it or later."""
        masks = [0] * (self.end + 1)
        for t in range(self.end):
            todo = [s for _, last, s in self.reads if last >= t]
            done = set(todo)
            while todo:
                s = todo.pop()
                masks[t] |= sum(self.bit[i] for i in self.items if i.kind != "draw" and i.id == s)
                for version in range(self.step.storages[s].versions):
                    o = self.step.writers.get((s, version), NO_OP)
                    if o != NO_OP:
                        masks[t] |= self.bit.get(_Item("draw", o), 0)
                        inputs = {self.step.values[v].storage for v in self.step.ops[o].inputs}
                        todo += inputs - done
                        done |= inputs
        return masks

    # ------------------------------------------------------------------ search

    def run(self) -> Found | None:
        count = itertools.count()
        start = self._arrive(_State(-1, 0, 0, 0, 0))
        best = {start: 0.0}
        came: dict[_State, tuple[_State, Replayed | None]] = {}
        queue = [(self._to_come(start), next(count), 0.0, start)]
        while queue:
            _, _, cost, state = heapq.heappop(queue)
            if cost > best[state] + TINY:
                continue
            if state.moment == self.end:
                return self._found(cost, came, state)
            for seconds, following, how in self._moves(state, self.below - cost):
                total = cost + seconds
                estimate = total + self._to_come(following)
                if estimate < self.below - TINY and total < best.get(following, float("inf")) - TINY:
                    best[following] = total
                    came[following] = (state, how)
                    heapq.heappush(queue, (estimate, next(count), total, following))
            if len(best) > self.max_states:
                raise TooManyStatesError
        return None

    def _found(self, cost: float, came: dict[_State, tuple[_State, Replayed | None]], state: _State) -> Found:
        path: list[Replayed] = []
        bound = 0
        while state in came:
            bound |= state.bound
            state, how = came[state]
            if how is not None:
                path.append(how)
        held = frozenset(s for s in self.droppable if self.storage_bit[s] & bound)
        return Found(cost, tuple(reversed(path)), held)

    def _to_come(self, state: _State) -> float:
        """Seconds that are still to come at least: each storage that will be read and is gone takes the op that made it."""
        gone = {
            self.step.storages[s].birth
            for _, last, s in self.reads
            if last >= state.moment > self.step.storages[s].birth and not state.alive & self.storage_bit[s]
        }
        return sum(self.step.ops[o].seconds for o in gone)

    def _moves(self, state: _State, most: float) -> Iterator[tuple[float, _State, Replayed | None]]:
        t = state.moment
        bytes_held = self._bytes(state)
        blocked = self.live[t] + bytes_held > self.budget
        wanted = sum({self.storage_bit[s] for first, last, s in self.reads if first <= t <= last})
        committing = wanted & state.held & ~state.bound
        through = state._replace(bound=state.bound | committing)
        if not blocked and not wanted & ~state.alive:
            yield 0.0, self._arrive(through), None
        made: dict[tuple[tuple[int, ...], tuple[int, ...]], list[frozenset[int]]] = {}
        for chosen in self._sets(state):
            for closure in self._closures(t, state.alive, chosen):
                key = closure.ops, closure.copies
                if closure.seconds >= most - TINY or any(chosen < larger for larger in made.get(key, ())):
                    continue
                if self.before[t] + bytes_held + closure.nbytes > self.budget:
                    blocked = True
                    continue
                made.setdefault(key, []).append(chosen)
                read = closure.reads & state.held & self.saved
                committing |= closure.reads
                following = state._replace(
                    alive=state.alive | self._mask(chosen),
                    held=state.held & ~self._mask(chosen),
                    bound=state.bound | read,
                    read=state.read | closure.reads,
                )
                yield closure.seconds, following, self._replayed(t, closure, chosen)
        for item in self.items:
            bit = self.bit[item]
            fixed = bit & state.bound and self.step.storages[item.id].death >= t
            if bit & state.alive & ~state.read and not fixed and (blocked or bit & committing):
                rest = ~bit
                yield 0.0, _State(t, state.alive & rest, state.held & rest, state.bound & rest, state.read), None

    def _replayed(self, t: int, closure: _Closure, chosen: frozenset[int]) -> Replayed:
        """With the views of what it makes, which cost nothing."""
        ops = set(closure.ops)
        made = {self.step.values[v].storage for o in ops for v in self.step.ops[o].outputs}
        ops |= {
            o.index
            for o in self.step.ops[:t]
            if o.is_view and not o.seconds and self.step.values[o.inputs[0]].storage in made
        }
        return Replayed(t, tuple(sorted(ops)), tuple(sorted(chosen)), closure.held, closure.copies)

    def _mask(self, storages: Set[int]) -> int:
        return sum(self.storage_bit[s] for s in storages)

    def _bytes(self, state: _State) -> int:
        return sum(
            n
            for i, n in enumerate(self.size)
            if state.alive >> i & 1 and (self.charged[i] <= state.moment or not state.held >> i & 1)
        )

    def _arrive(self, state: _State) -> _State:
        """The next moment: what was alive, without what shows another version now, and what forward leaves behind."""
        t = state.moment + 1
        written = self.step.ops[state.moment].writes if state.moment >= 0 else ()
        lost = sum(self.storage_bit.get(s, 0) & ~state.held for s in written)
        fresh = sum(1 << i for i, begins in enumerate(self.begins) if begins == t)
        there = sum(self.storage_bit[s] for s in self.droppable if self.step.storages[s].death >= t)
        keep = (self.useful[t] | state.bound & there) & ~lost
        return _State(t, (state.alive | fresh) & keep, (state.held | fresh) & keep, state.bound & keep, 0)

    def _sets(self, state: _State) -> list[frozenset[int]]:
        """Sets of storages that a replay may make, large ones first."""
        able = [
            s
            for s, bit in self.storage_bit.items()
            if self.useful[state.moment] & bit
            and not state.alive & bit
            and self.begins[bit.bit_length() - 1] <= state.moment
        ]
        sizes = range(len(able), 0, -1)
        return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(able, size)]

    # ----------------------------------------------------------------- replays

    def _closures(self, t: int, alive: int, chosen: frozenset[int]) -> list[_Closure]:
        """The ways to make `chosen` before moment `t`; some of it may be copies that forward left and another op reads."""
        key = (t, alive, chosen)
        if key not in self.closures:
            copied = [s for s in chosen if self._is_copied(s, t, alive)]
            readers = [(NO_OP, *self.reading[s, self.index.version_before(s, t)]) for s in copied]
            found = [
                self._find(t, alive, chosen, {s: o for s, o in zip(copied, by, strict=True) if o != NO_OP})
                for by in itertools.product(*readers)
            ]
            self.closures[key] = [closure for closure in found if closure is not None]
        return self.closures[key]

    def _is_copied(self, s: int, t: int, alive: int) -> bool:
        key = (s, self.index.version_before(s, t))
        return key in self.reading and bool(alive & self.bit.get(_Item("copy", *key), 0))

    def _find(self, t: int, alive: int, chosen: frozenset[int], taken: dict[int, int]) -> _Closure | None:
        """Make `chosen` again; None if an op cannot be replayed, or lacks an input.

        Args:
            t: moment.
            alive: items.
            chosen: storages.
            taken: those of them that are copies, by the op of the window that reads the copy.
        """
        ops = set(taken.values())
        copies: dict[tuple[int, int], int] = {}
        held: set[int] = set()
        reads = 0
        for s in chosen - taken.keys():
            version = self.index.version_before(s, t)
            copied = [v for v in range(version) if alive & self.bit.get(_Item("copy", s, v), 0)]
            ops.update(self.step.writers[s, v] for v in range(max(copied, default=-1) + 1, version + 1))
        done: set[int] = set()
        while ops - done:
            o = min(ops - done)
            done.add(o)
            op = self.step.ops[o]
            draw = self.bit.get(_Item("draw", o), 0)
            if not op.replayable or o >= t or (op.random and not alive & draw):
                return None
            reads |= draw
            for value in op.inputs:
                v = self.step.values[value]
                s = v.storage
                settled = v.version == self.index.version_before(s, t)
                copy = self.bit.get(_Item("copy", s, v.version), 0)
                if settled and s not in op.writes and self._is_shown(s, t, alive):
                    held.add(s)
                    reads |= self.storage_bit.get(s, 0)
                elif alive & copy:
                    reads |= copy
                    copies.setdefault((s, v.version), value)
                elif made := self.step.dependencies(value):
                    ops.update(made)
                else:
                    return None
        return self._judge(t, tuple(sorted(ops)), chosen, held, tuple(copies.values()), reads)

    def _is_shown(self, s: int, t: int, alive: int) -> bool:
        storage = self.step.storages[s]
        if self.index.is_leaf[s]:
            return not storage.copied
        if s not in self.droppable and storage.birth < t <= storage.death:
            return True
        return bool(alive & self.storage_bit.get(s, 0))

    def _judge(
        self, t: int, ops: tuple[int, ...], chosen: frozenset[int], held: set[int], copies: tuple[int, ...], reads: int
    ) -> _Closure | None:
        retain = tuple(sorted(chosen))
        window = Window(id=0, start=t, stop=self.end - 1, ops=ops, retain=retain, copies=copies)
        schedule = Schedule(held=tuple(sorted(held)), windows=(window,))
        trial = _Run(Replayer(self.step, schedule, self.index), window)
        for position, i in enumerate(ops):
            trial.op(position, i)
        final = {s: self.index.version_before(s, t) for s in retain}
        if any(s not in trial.current or trial.current[s].version != final[s] for s in retain):
            return None
        # What the replay makes itself it does not read from a copy.
        window = replace(window, copies=tuple(trial.replay.copied))
        schedule = replace(schedule, windows=(window,))
        machine = _Machine(self.step, schedule)
        replay = Replayer(self.step, schedule, self.index).play(window)
        machine.until = {(0, s): t for s in retain}
        buffers = machine._buffers(replay)  # pyright: ignore[reportPrivateUsage]
        inner = inner_bytes(buffers, [self.step.ops[i].workspace_bytes for i in ops])
        return _Closure(
            ops, int(inner.max()), sum(self.step.ops[i].seconds for i in ops), reads, tuple(sorted(held)), window.copies
        )
