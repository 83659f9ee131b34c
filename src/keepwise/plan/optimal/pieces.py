"""The menu of a stage that is too wide to be enumerated: parts of its backward that share little, enumerated one by one and joined.

The experts of a mixture, towers, heads written as a list, the branches of an inception block: each one's saved tensors are read
together, and made again from a few tensors that they share.

*Pieces.* The reading nodes are cut, in order of time, where few large storages are at work on both sides (`_split`): one is *at work*
where it is read, and where another is read that is made from it. Those few are *shared*. For each set A of shared storages that
are at hand, every piece is a stage of its own, and is enumerated (`enumerate_menu`).

*Family.* A stage holds K and a set of its own for each piece from forward; one replay at the start of its backward retains A - K; each
piece then has the family of a stage, windows that end with the piece. While a piece's backward runs, what the pieces after it hold is
there too. So the pieces are joined from the last one on, by a table over limits on the peak and bytes held (`_Join`). What forward
sets aside for an op that several pieces may replay is counted by the last of them: it is there until then.

The *bound* takes all else that pieces want from each other as at hand and free, and so the small storages that they share; bytes are
rounded down. The *menu* is priced exactly, for points that are the best at some price of memory and others between them.

Complexity: sets A times the pieces' enumerations, and limits x bytes x options for each.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from keepwise.plan.optimal.arrays import small_storages
from keepwise.plan.optimal.dominance import dominant, undominated
from keepwise.plan.optimal.enumerate import Enumerated, enumerate_menu, lasting_small
from keepwise.plan.optimal.options import Choice, Option, StageProblem
from keepwise.plan.optimal.stages import Stage

MAX_LARGE = 9
"""Pieces have at most as many large storages."""

MAX_SIZE = 10
"""And with all that are shared at most as many: the sets of both are looked at one by one."""

JOINED_LARGE = 7
"""Pieces that have no more together are one."""

MAX_NODES = 24
MAX_SHARED = 3
"""Large storages that pieces may share."""

NUM_LIMITS = 128
NUM_SIZES = 3072
"""Steps of the table: limits on the peak, and bytes held."""

MAX_POINTS = 600
"""Options that are priced exactly."""

NUM_PRICES = 48

_TINY = 1e-12

_Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Consecutive nodes, and the storages that only they are about."""

    nodes: tuple[int, int]
    own: frozenset[int]
    """Storages by id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Menu:
    """What a piece can do, as arrays; bytes above the stage's level."""

    held_sets: list[frozenset[int]]
    """What each option holds, by position in the whole stage."""
    choices: list[Choice]
    """How to price each."""
    seconds: _Table
    held: _Table
    """Bytes held, outputs of the stage included."""
    peak: _Table

    def bare(self) -> _Menu:
        """Those that hold nothing."""
        few = [i for i, held in enumerate(self.held_sets) if not held]
        return _Menu(
            held_sets=[self.held_sets[i] for i in few],
            choices=[self.choices[i] for i in few],
            seconds=self.seconds[few],
            held=self.held[few],
            peak=self.peak[few],
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Point:
    """A way to run all pieces."""

    seconds: float
    nbytes: float
    limit: float
    low: float
    """The smallest peak that it stands for."""
    shared: frozenset[int]
    """A, by id."""
    held: frozenset[int]
    """K, by id."""
    cell: tuple[int, int]
    """Row (limit) and column (bytes of the pieces) of the table."""


def piece_menu(problem: StageProblem) -> Enumerated | None:
    """Options of a stage and a bound on them; None where it does not fall into pieces."""
    pieces = _Pieces(problem)
    return pieces.run() if len(pieces.pieces) > 1 else None


def split_stage(problem: StageProblem) -> tuple[tuple[int, ...], list[tuple[tuple[int, int], frozenset[int]]]]:
    """Shared storages, and (first and last node, own storages) of each piece in order of time; no pieces where it has none."""
    found = _Pieces(problem)
    return found.shared, [(p.nodes, p.own) for p in found.pieces]


class _Pieces:
    def __init__(self, problem: StageProblem) -> None:
        self.problem = problem
        small = small_storages(problem)
        self.small = frozenset(problem.storages[p] for p in small)
        self.large = [problem.storages[p] for p in problem.own if p not in small]
        own = {problem.storages[p] for p in problem.own}
        self.parents: dict[int, frozenset[int]] = {}
        self.readers: dict[int, list[int]] = {s: [] for s in own}
        for n, node in enumerate(problem.stage.nodes):
            for s in node.storages:
                if s in own:
                    self.readers[s].append(n)
        for s in own:
            hand = (problem.at_hand | own) - {s}
            ops = problem.graph.recipe((s,), hand)
            self.parents[s] = frozenset(problem.graph.read_by(ops, own)) if ops is not None else frozenset()
        self.shared, self.pieces = self._split()

    def _split(self) -> tuple[tuple[int, ...], list[_Piece]]:
        """Shared large storages, and the pieces in order of time; none where they would be too large."""
        span = {s: (min(r), max(r)) for s, r in self.readers.items() if r}
        for s, parents in self.parents.items():
            for p in parents:
                low, high = span[p]
                span[p] = (min(low, self.readers[s][0]), max(high, self.readers[s][-1]))
        far = sorted(self.large, key=lambda s: (span[s][0] - span[s][1], s))
        best: tuple[list[int], list[_Piece]] = ([], [])
        widest = MAX_LARGE + 1
        for count in range(min(MAX_SHARED, len(far)) + 1):
            shared = far[:count]
            rest = {s: span[s] for s in far[count:]}
            pieces = self._merged(self._between(rest), rest)
            most = max(sum(s in rest for s in p.own) for p in pieces)
            if most < widest and most + count <= MAX_SIZE and all(p.nodes[1] - p.nodes[0] < MAX_NODES for p in pieces):
                best, widest = (shared, pieces), most
            if most <= JOINED_LARGE:
                break
        return self._with_sources(*best, widest)

    def _with_sources(
        self, shared: list[int], pieces: list[_Piece], widest: int
    ) -> tuple[tuple[int, ...], list[_Piece]]:
        """What shared storages are made from is shared too, as long as that is not too much."""
        found = list(shared)
        for s in found:
            more = sorted(p for p in self.parents[s] if p in self.large and p not in found)
            if len(found) + len(more) <= min(MAX_SHARED, MAX_SIZE - widest):
                found.extend(more)
        pieces = [replace(p, own=p.own - frozenset(found)) for p in pieces]
        return tuple(sorted(found)), pieces

    def _between(self, spans: dict[int, tuple[int, int]]) -> list[tuple[int, int]]:
        """Runs of nodes that no span leaves."""
        count = len(self.problem.stage.nodes)
        shut = {n for low, high in spans.values() for n in range(low + 1, high + 1)}
        starts = [n for n in range(count) if n not in shut]
        return [(a, b - 1) for a, b in itertools.pairwise([*starts, count])]

    def _merged(self, runs: list[tuple[int, int]], spans: dict[int, tuple[int, int]]) -> list[_Piece]:
        merged: list[tuple[int, int]] = []
        for a, b in runs:
            if merged:
                first = merged[-1][0]
                large = sum(first <= low and high <= b for low, high in spans.values())
                if large <= JOINED_LARGE and b - first < MAX_NODES:
                    merged[-1] = (first, b)
                    continue
            merged.append((a, b))
        return [self._piece(a, b, spans) for a, b in merged]

    def _piece(self, a: int, b: int, spans: dict[int, tuple[int, int]]) -> _Piece:
        inside = {s for s in spans if a <= spans[s][0] and spans[s][1] <= b}
        for s in self.small:
            users = [n for t, parents in self.parents.items() if s in parents for n in self.readers[t]]
            if all(a <= n <= b for n in (*self.readers[s], *users)):
                inside.add(s)
        return _Piece(nodes=(a, b), own=frozenset(inside))

    # One piece as a stage of its own.

    def _own(self, number: int, hand: frozenset[int]) -> frozenset[int]:
        """What a piece decides about where `hand` is at hand."""
        return self.pieces[number].own | (self._reads_of(number).intersection(self.shared) - hand)

    def _reads_of(self, number: int) -> set[int]:
        a, b = self.pieces[number].nodes
        return {s for node in self.problem.stage.nodes[a : b + 1] for s in node.storages}

    def _stage(self, number: int, hand: frozenset[int], free: frozenset[int], counted: frozenset[int]) -> StageProblem:
        """A piece where `hand` is at hand and charged as long as it is read, and `free` is at hand for nothing."""
        stage = self.problem.stage
        a, b = self.pieces[number].nodes
        nodes = stage.nodes
        last = nodes[b + 1].first - 1 if b + 1 < len(nodes) else stage.last
        inputs = (*stage.inputs, *sorted(hand))
        staying = frozenset(s for s in inputs if self._needed(s) > b or s in stage.shared)
        part: Stage = replace(
            stage,
            inputs=tuple(s for s in inputs if s in staying or self._needed(s) >= a or s in stage.inputs),
            shared=staying,
            own=tuple(sorted(self._own(number, hand))),
            nodes=nodes[a : b + 1],
            first=stage.first if a == 0 else nodes[a].first,
            last=last,
            gap_stop=last + 1,
        )
        return StageProblem(self.problem.graph, part, free | hand, counted)

    def _needed(self, storage: int) -> int:
        """Last node that reads it."""
        return max((n for n, node in enumerate(self.problem.stage.nodes) if storage in node.storages), default=-1)

    def _menu(self, number: int, hand: frozenset[int], counted: frozenset[int]) -> _Menu | None:
        """What a piece can do at least; None where it is too large. Pieces after it may replay the ops in `counted`."""
        piece = self.pieces[number]
        small = self.small - piece.own
        others = frozenset(self.large) - piece.own - frozenset(self.shared)
        targets = piece.own | {s for n in range(piece.nodes[0], piece.nodes[1] + 1) for s in self._reads(n)}
        graph, problem = self.problem.graph, self.problem
        around = problem.at_hand | small | hand
        ops = self._ops(targets - hand - small - set(problem.inputs), around | others)
        part = self._stage(number, hand, small | graph.read_by(ops, others), counted)
        plain = part.evaluate(frozenset(part.own), frozenset(), ((0, len(part.stage.nodes) - 1),))
        found = enumerate_menu(part, [plain], exact=False) if plain is not None else None
        return self._arrays(number, part, found.bounds) if found is not None else None

    def _ops(self, targets: Iterable[int], at_hand: Collection[int]) -> set[int]:
        """Ops of the recipes of all targets that have one."""
        return {o for s in targets for o in self.problem.graph.recipe((s,), at_hand) or ()}

    def _reads(self, node: int) -> set[int]:
        return {s for s in self.problem.stage.nodes[node].storages if s in self.readers}

    def _arrays(self, number: int, part: StageProblem, options: list[Option]) -> _Menu:
        outputs = set(part.stage.outputs)
        rise = part.level - self.problem.level

        def held(option: Option) -> int:
            return option.held_bytes + sum(part.bytes_of(p) for p in option.held if part.storages[p] in outputs)

        return _Menu(
            held_sets=[self._whole(part, o.held) for o in options],
            choices=[self._choice(number, part, o.choice) for o in options if o.choice is not None],
            seconds=np.array([o.seconds for o in options]),
            held=np.array([held(o) for o in options], dtype=np.float64),
            peak=np.array([o.peak_bytes + rise for o in options], dtype=np.float64),
        )

    def _whole(self, part: StageProblem, positions: frozenset[int]) -> frozenset[int]:
        return frozenset(self.problem.position[part.storages[p]] for p in positions)

    def _choice(self, number: int, part: StageProblem, choice: Choice) -> Choice:
        """The same with positions and nodes of the whole stage; windows are still numbered within the piece."""
        first = self.pieces[number].nodes[0]
        again = {0: self._whole(part, choice.outer)} if choice.outer else {}
        return Choice(
            held=self._whole(part, choice.held),
            outer=frozenset(),
            partition=tuple((a + first, b + first) for a, b in choice.partition),
            lasting={window: self._whole(part, kept) for window, kept in choice.lasting.items()},
            again=again,
        )

    # All pieces.

    def run(self) -> Enumerated | None:
        """Join the pieces for every set of shared storages, and once more where nothing is held: segments need such options."""
        points: list[tuple[_Point, _Join]] = []
        bare: list[tuple[_Point, _Join]] = []
        for hand in _subsets(self.shared):
            menus = [self._menu(number, hand, self._later(number, hand)) for number in range(len(self.pieces))]
            found = [m for m in menus if m is not None]
            if len(found) < len(menus):
                return None
            join = _Join(found)
            points.extend((p, join) for p in self._points(hand, join, _subsets(sorted(hand))))
            empty = [m.bare() for m in found]
            if all(len(m.seconds) for m in empty):
                join = _Join(empty)
                bare.extend((p, join) for p in self._points(hand, join, [frozenset[int]()]))
        points, bare = _undominated(points), _undominated(bare)
        everything = frozenset(self.problem.own)
        plain = self.problem.evaluate(everything, frozenset(), ((0, len(self.problem.stage.nodes) - 1),))
        assert plain is not None, "holding everything needs no recipe"
        options = [plain]
        for some in (points, bare):
            for i in _worthwhile([p for p, _ in some]):
                options.extend(self._options(*some[i], bare=some is bare))
        bounds = [self._bound(point, join) for point, join in (*points, *bare)]
        return Enumerated(options=dominant(options, limit=2 * MAX_POINTS), bounds=bounds)

    def _later(self, number: int, hand: frozenset[int]) -> frozenset[int]:
        """Ops that the pieces after one may replay."""
        around = self.problem.at_hand | hand
        later = range(number + 1, len(self.pieces))
        return frozenset(o for n in later for o in self._ops(self._own(n, hand), around))

    def _points(self, hand: frozenset[int], join: _Join, choices: Iterable[frozenset[int]]) -> Iterator[_Point]:
        """The best of a join for each set of shared storages that may be held."""
        problem = self.problem
        # What pieces may hold besides is taken as at hand.
        free = problem.at_hand.union(self.small, *(p.own for p in self.pieces))
        for held in choices:
            ops = problem.recipe(hand - held, free | held)
            if ops is None:
                continue
            more = problem.graph.seconds(ops)
            size = sum(problem.cost(s) for s in held)
            for row, column, seconds in join.best():
                yield _Point(
                    seconds=seconds + more,
                    nbytes=size + column * join.grain,
                    limit=float(join.limits[row]),
                    low=float(join.lows[row]),
                    shared=hand,
                    held=held,
                    cell=(row, column),
                )

    def _options(self, point: _Point, join: _Join, *, bare: bool) -> list[Option]:
        """The exact prices of a point, shared small storages held, or where nothing is held made by the first replay."""
        problem, at = self.problem, self.problem.position
        held = {at[s] for s in point.held}
        outer = frozenset(at[s] for s in point.shared - point.held)
        partition: list[tuple[int, int]] = []
        lasting: dict[int, frozenset[int]] = {}
        again: dict[int, frozenset[int]] = {}
        for choice in join.choices(*point.cell):
            first = len(partition)
            held |= choice.held
            partition.extend(choice.partition)
            lasting |= {first + window: kept for window, kept in choice.lasting.items()}
            again |= {first + window: kept for window, kept in choice.again.items()}
        small = frozenset(at[s] for s in self.small)
        shared = small - {at[s] for p in self.pieces for s in p.own}
        cuts = tuple(partition)
        if bare:
            option = problem.evaluate(frozenset(), outer | shared, cuts, lasting, again)
            return [] if option is None else [option]
        found: list[Option] = []
        for mine in {frozenset(held) | small, frozenset(held) | shared}:
            option = problem.evaluate(mine, outer, cuts, lasting, again)
            if option is None:
                continue
            found.append(option)
            more = lasting_small(problem, option, cuts, small)
            if more:
                lighter = problem.evaluate(mine - frozenset().union(*more.values()), outer, cuts, more, again)
                found.extend([] if lighter is None else [lighter])
        return found

    def _bound(self, point: _Point, join: _Join) -> Option:
        problem = self.problem
        held = frozenset(problem.position[s] for s in point.held).union(*join.held_sets(*point.cell))
        outputs = sum(problem.bytes_of(p) for p in held if problem.storages[p] in problem.stage.outputs)
        return Option(
            held=held,
            windows=(),
            seconds=point.seconds,
            held_bytes=max(0, int(point.nbytes) - outputs),
            peak_bytes=int(point.low),
            forward_bytes=int(problem.front.max()),
        )


class _Join:
    """All pieces together: the least time by limit on the peak (rows) and bytes held (columns, rounded down).

    Args:
        menus: the pieces' menus in order of time.
    """

    def __init__(self, menus: Sequence[_Menu]) -> None:
        self.menus = menus
        most = sum(float(m.held.max()) for m in menus)
        self.grain = max(1.0, most / (NUM_SIZES - 1))
        low = max(float(m.peak.min()) for m in menus)
        high = max(float(m.peak.max()) for m in menus) + most
        self.limits = np.linspace(low, high, NUM_LIMITS)
        self.lows = np.concatenate([[low], self.limits[:-1]])
        # What the pieces hold from the last one on, at most: columns beyond are not in use yet.
        width = 1
        table = np.zeros((NUM_LIMITS, width))
        self.tables = [table]
        for menu in reversed(menus):
            shifts = (menu.held // self.grain).astype(np.int64)
            following = np.full((NUM_LIMITS, width + int(shifts.max())), np.inf)
            for seconds, shift, peak in zip(menu.seconds, shifts.tolist(), menu.peak, strict=True):
                row = int(np.searchsorted(self.limits, peak))
                stop = min(width, int((self.limits[-1] - peak) // self.grain) + 1)
                part = table[row:, :stop] + seconds
                part[np.arange(stop) * self.grain > self.limits[row:, None] - peak] = np.inf
                here = following[row:, shift : shift + stop]
                np.minimum(here, part, out=here)
            table, width = following, following.shape[1]
            self.tables.append(table)

    def best(self) -> Iterator[tuple[int, int, float]]:
        """(row, column, seconds) where less time is taken than with fewer bytes or a lower limit."""
        table = np.minimum.accumulate(np.minimum.accumulate(self.tables[-1], axis=1), axis=0)
        left = np.concatenate([np.full((len(table), 1), np.inf), table[:, :-1]], axis=1)
        above = np.concatenate([np.full((1, table.shape[1]), np.inf), table[:-1]], axis=0)
        fresh = (table < left - _TINY) & (table < above - _TINY)
        for row, column in np.argwhere(fresh).tolist():
            yield row, column, float(table[row, column])

    def _path(self, row: int, column: int) -> list[int]:
        """The option of each piece, in order of time."""
        path: list[int] = []
        for number, menu in enumerate(self.menus):
            here, rest = self.tables[len(self.menus) - number], self.tables[len(self.menus) - number - 1]
            value = here[row, column]
            shifts = (menu.held // self.grain).astype(np.int64)
            before = column - shifts
            fits = (before >= 0) & (before < rest.shape[1]) & (before * self.grain <= self.limits[row] - menu.peak)
            total = np.where(fits, rest[row, np.clip(before, 0, rest.shape[1] - 1)] + menu.seconds, np.inf)
            chosen = int(np.abs(total - value).argmin())
            path.append(chosen)
            column = int(before[chosen])
        return path

    def choices(self, row: int, column: int) -> list[Choice]:
        """What the pieces choose at a point."""
        return [m.choices[i] for m, i in zip(self.menus, self._path(row, column), strict=True)]

    def held_sets(self, row: int, column: int) -> list[frozenset[int]]:
        """What they hold."""
        return [m.held_sets[i] for m, i in zip(self.menus, self._path(row, column), strict=True)]


def _subsets(storages: Sequence[int]) -> Iterator[frozenset[int]]:
    for count in range(len(storages) + 1):
        yield from map(frozenset, itertools.combinations(storages, count))


def _undominated(points: list[tuple[_Point, _Join]]) -> list[tuple[_Point, _Join]]:
    """Points that no other beats in (seconds, bytes, limit)."""
    numbers = undominated([(p.seconds, p.nbytes, p.limit, p.low, i, 0) for i, (p, _) in enumerate(points)])
    return [points[p[4]] for p in numbers]


def _worthwhile(points: list[_Point]) -> list[int]:
    """At most `MAX_POINTS` of the points: the best at many prices of held bytes and of the peak, then every so many."""
    if len(points) <= MAX_POINTS:
        return list(range(len(points)))
    seconds, size, peak = (
        np.array([getattr(p, name) for p in points], dtype=np.float64) for name in ("seconds", "nbytes", "limit")
    )
    found: set[int] = set()
    scale = float(seconds.max())
    for held_price in scale / max(float(size.max()), 1.0) * np.geomspace(1e-4, 10.0, NUM_PRICES):
        for peak_price in held_price * np.geomspace(1e-3, 10.0, NUM_PRICES // 4):
            found.add(int((seconds + held_price * size + peak_price * peak).argmin()))
    left = MAX_POINTS - len(found)
    if left > 0:
        found.update(np.linspace(0, len(points) - 1, left).astype(int).tolist())
    return sorted(found)
