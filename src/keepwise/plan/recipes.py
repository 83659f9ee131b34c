"""`find_recipe`: the ops that lead from what is available to what is wanted.

A backward closure over `Step.dependencies`. It is minimal: an op is in it only if every way to the targets runs through it, since
each value has one producer. The one choice is a value that is available at a wrong version (its storage is overwritten later):
it may be copied in forward or made again. Values of leaves are copied; others are made again, unless they were written before
`copy_before` (the planner's segment begins there) or cannot be made again.

Linear in the ops of the recipe and their inputs.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from keepwise.ir import NO_OP, Step
from keepwise.plan.tables import Tables, tables_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Ops to replay and what they read from outside."""

    ops: tuple[int, ...]
    """Ascending."""
    copies: tuple[int, ...] = ()
    """Values that must be copied in forward."""
    reads: frozenset[int] = frozenset()
    """Available storages that the ops read by reference, leaves included."""
    borrowed: frozenset[int] = frozenset()
    """Storages that the ops read from what an enclosing window retains."""
    seconds: float = 0.0
    """Duration of the ops."""

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """One reason why a recipe is impossible, and what to hold so that it becomes possible."""

    storage: int
    """Storage to hold."""
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoRecipe:
    """Nothing leads to the targets. Falsy."""

    obstacles: tuple[Obstacle, ...]
    """All that was met; holding every one of these storages makes the recipe possible."""

    def __bool__(self) -> bool:
        return False

    def __str__(self) -> str:
        return "; ".join(dict.fromkeys(o.why for o in self.obstacles))


def find_recipe(
    step: Step,
    *,
    values: Iterable[int] = (),
    storages: Iterable[int] = (),
    available: Container[int] = frozenset(),
    retained: Mapping[int, frozenset[int]] | None = None,
    start: int,
    copy_before: int = 0,
) -> Recipe | NoRecipe:
    """The smallest ascending list of ops that rebuilds the targets just before moment `start`.

    Args:
        step: the step.
        values: targets as tensor objects; must be at the version that their storage has just before `start`.
        storages: targets as storages, whichever tensor object shows them.
        available: storages held from forward; leaves always are. A target is rebuilt even if it is listed.
        retained: storages that an enclosing window retains -> the ops which that window replays.
        start: the moment before which the replay runs.
        copy_before: available storages at an earlier version written before this op are copied, not made again.

    Returns:
        A `Recipe`, or a `NoRecipe` with every obstacle.
    """
    return _Search(tables_of(step), available, retained or {}, start, copy_before).run(values, storages)


class _Search:
    def __init__(
        self,
        tables: Tables,
        available: Container[int],
        retained: Mapping[int, frozenset[int]],
        start: int,
        copy_before: int,
    ) -> None:
        self.tables = tables
        self.step = tables.step
        self.available = available
        self.retained = retained
        self.start = start
        self.copy_before = copy_before
        self.ops: set[int] = set()
        self.copies: dict[tuple[int, int], int] = {}
        self.reads: dict[int, int] = {}  # value -> its storage
        self.borrowed: set[int] = set()
        self.obstacles: dict[int, Obstacle] = {}
        self.seen: set[int] = set()
        self.stack: list[int] = []

    def run(self, values: Iterable[int], storages: Iterable[int]) -> Recipe | NoRecipe:
        for value in values:
            self._target(value)
        for s in storages:
            written = self.tables.version_before(s, self.start)
            op = self.step.writers.get((s, written), NO_OP)
            if op == NO_OP:
                self._block(s, f"storage {s} existed before the step")
            else:
                self._require(op, s)
        while self.stack:
            op = self.step.ops[self.stack.pop()]
            for value in op.inputs:
                if value not in self.seen:
                    self.seen.add(value)
                    self._input(value)
        if self.obstacles:
            return NoRecipe(obstacles=tuple(self.obstacles.values()))
        ops = tuple(sorted(self.ops))
        return Recipe(
            ops=ops,
            copies=tuple(sorted(self.copies.values())),
            reads=frozenset(s for value, s in self.reads.items() if not self._made_here(value)),
            borrowed=frozenset(self.borrowed),
            seconds=sum(self.step.ops[i].seconds for i in ops),
        )

    def _target(self, value: int) -> None:
        v = self.step.values[value]
        s = v.storage
        if v.version != self.tables.version_before(s, self.start):
            self._block(s, f"value {value} is at version {v.version} of storage {s}, which is overwritten later")
            return
        needed = self.step.dependencies(value)
        if not needed or self.step.storages[s].birth == NO_OP:
            self._block(s, f"storage {s} existed before the step")
            return
        for op in needed:
            self._require(op, s)

    def _input(self, value: int) -> None:
        """Find a source for an input of a replayed op."""
        v = self.step.values[value]
        s = v.storage
        settled = v.version == self.tables.version_before(s, self.start)
        maker = self.step.values[v.view].producer
        if settled and s in self.retained:
            self.borrowed.add(s)
            if maker == NO_OP or maker in self.retained[s]:
                return
            # The retaining window did not make this tensor object: make the view again, over the same storage.
            if self.step.ops[maker].is_view and not self.tables.write_moments.get(s):
                self._require(maker, s)
            return
        leaf = self.tables.is_leaf[s]
        if settled and (leaf or s in self.available):
            self.reads[value] = s
            return
        if (s, v.version) in self.copies:
            return
        if not settled and (leaf or (s in self.available and self._written_at(value) < self.copy_before)):
            self.copies[s, v.version] = value
            return
        if self.step.storages[s].birth == NO_OP:
            if settled:
                self._block(s, f"storage {s} existed before the step and is not held")
            else:
                self.copies[s, v.version] = value
            return
        needed = self._makers(value)
        refusal = next((why for i in needed if (why := self._refusal(i, s))), "")
        if not refusal:
            for op in needed:
                self._require(op, s)
        elif settled:
            self._block(s, refusal)
        else:
            self.copies[s, v.version] = value

    def _makers(self, value: int) -> tuple[int, ...]:
        """Ops that rebuild a value; not the one that returned its object, if an earlier version of it will be copied."""
        v = self.step.values[value]
        needed = self.step.dependencies(value)
        if v.storage in self.available and self._written_at(value) >= self.copy_before:
            return tuple(i for i in needed if i >= self.copy_before)
        return needed

    def _written_at(self, value: int) -> int:
        v = self.step.values[value]
        return self.step.writers.get((v.storage, v.version), NO_OP)

    def _made_here(self, value: int) -> bool:
        """Whether the recipe makes an available value all the same, for something else: a replay prefers its own."""
        v = self.step.values[value]
        written = (self.step.writers.get((v.storage, version), NO_OP) for version in range(v.version + 1))
        return self.ops.issuperset({*written, *self.step.dependencies(value)})

    def _require(self, op: int, storage: int) -> None:
        if op >= self.start:
            self._block(storage, f"op {op} runs only after the replay at {self.start}")
        elif refusal := self._refusal(op, storage):  # also where the op is replayed already, for another storage
            self._block(storage, refusal)
        elif op not in self.ops:
            self.ops.add(op)
            self.stack.append(op)

    def _refusal(self, op: int, storage: int) -> str:
        """Why replaying `op` does not rebuild `storage`; empty if it does."""
        o = self.step.ops[op]
        if not o.replayable:
            return f"op {op} ({o.target}) is not replayable: {o.why_not}"
        if storage in o.writes and all(self.step.values[v].storage != storage for v in o.inputs):
            return f"op {op} ({o.target}) writes storage {storage} without reading it, which its replay does not do"
        return ""

    def _block(self, storage: int, why: str) -> None:
        self.obstacles.setdefault(storage, Obstacle(storage=storage, why=why))
