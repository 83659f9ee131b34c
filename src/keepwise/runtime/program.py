"""A `Schedule` compiled into tables that the guard can look things up in while a step runs.

Ops are numbered here by their place among the forward-phase ops of the step, because the guard does not see the others.

A leaf that autograd does not save may legally be written between forward and its replay (a buffer by the next forward pass, a
bias by user code). Small ones are captured by copy (`Storage.copied`, see `leaves`), large ones by reference: written while we watch
they are copied then.
"""

from __future__ import annotations

import bisect
import functools
from dataclasses import dataclass, field
from typing import Any

from keepwise.ir import NO_OP, NO_WINDOW, Phase, Schedule, Spare, Step, Window
from keepwise.runtime.calls import mutates, resolve, returns_view
from keepwise.runtime.clean import is_random
from keepwise.runtime.foreign import Trust
from keepwise.runtime.passes import BY_MODE
from keepwise.runtime.reuse import out_form
from keepwise.runtime.special import results_with_gaps

LOCAL = 0
"""The argument is made by the same replay."""
OUTER = 1
"""It is retained by an enclosing window."""
LEAF = 2
"""It is captured by reference."""
COPY = 3
"""It is captured by a copy of its own: it will be written, or the replay writes it."""
SHARED = 4
"""It is a small leaf, captured by a copy that all replays share."""
MAX_CHECKS = 8
"""Steps of a program that are audited because of views that are not proven: a step that differs may never drop some of them."""


@dataclass(slots=True, frozen=True)
class Use:
    """One forward op in one window's replay."""

    window: int
    kinds: tuple[int, ...]
    """LOCAL, OUTER, LEAF, COPY or SHARED for each tensor argument."""
    outer: tuple[int, ...]
    """Enclosing window that retains the argument (where OUTER), else -1."""
    copies: tuple[int, ...]
    """Arguments from an enclosing window that the op writes: copied at replay."""
    spare_bytes: int = 0
    """What the plan leaves free while the op is replayed."""


@dataclass(slots=True)
class OpEntry:
    """One forward op as the guard expects it."""

    index: int
    func: Any
    ins: tuple[int, ...]
    """View id of each tensor argument (after `special.replay_arguments`)."""
    outs: tuple[int, ...]
    """View id of each result, -1 where it is no tensor."""
    written: tuple[int, ...]
    """Arguments that it writes in place."""
    mutates: bool
    """Whether it may write its arguments."""
    random: bool
    where: str
    uses: tuple[Use, ...] = ()
    finishes: frozenset[int] = frozenset()
    """Views whose content is complete only after this op although they were saved before it."""

    unpacks: bool = False
    """Whether replays expand a packed form of its result instead of running it."""
    into: Any = None
    """The op's `out=` form, if its result may be written into given memory."""
    makes: bool = False
    """Whether its results have memory of their own."""
    spare_bytes: int = 0
    """What the plan leaves free while it runs."""
    is_checked: bool = False
    """Whether its arguments must be compared with the recording: it is replayed, or writes in place."""


@dataclass
class Program:
    """Everything that the guard needs, made once per plan."""

    ops: list[OpEntry]
    windows: tuple[Window, ...]
    drops: dict[tuple[int, int], int]
    """(number of forward ops begun, view id) -> window that serves the save."""
    drops_by_view: dict[int, int]
    """The same by view alone, for steps whose ops lie elsewhere."""
    finished_by: dict[int, int]
    """View saved before its last write -> forward index of the op that finishes it."""
    roots: dict[int, int]
    """View id -> view id of the object that its storage was born with."""
    nbytes: dict[int, int]
    """View id -> bytes of its storage."""
    loans: dict[int, dict[int, int]] = field(default_factory=dict)
    """Window -> view on what it retains -> later window that may write over it; `NO_WINDOW` -> views on what autograd keeps."""
    sizes: set[int] = field(default_factory=set)
    """Bytes of results that can be written into dead memory; grows where a step is larger than the recorded one."""
    proven: set[int] = field(default_factory=set)
    """Views whose replay was seen to equal the original, in whichever program of the same step; shared by all of those."""
    with_gaps: frozenset[int] = frozenset()
    """Views on results that equal their replay but for bytes that nobody wrote: they cannot be compared."""
    trust: Trust = field(default_factory=Trust)
    """What the user's own hooks give back as it was."""
    num_checks: int = 0
    """Steps that were audited because some view that it drops is not proven."""
    looks_away: bool = False
    """Whether there is an op whose gradient is computed in another way where a mode is on (`passes`)."""
    pauses: frozenset[int] = frozenset()
    """Numbers of forward ops begun at which backward ran in the recorded step."""
    trails: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    """Last three functions -> places in `ops` where they end, ascending, for finding the way back after a deviation."""

    @functools.cached_property
    def ends(self) -> list[tuple[int, int]]:
        """(number of forward ops begun, window), ascending: from then on forward adds nothing to the window, nor to one inside of it."""
        last = [0] * len(self.windows)
        for entry in self.ops:
            for use in entry.uses:
                last[use.window] = max(last[use.window], entry.index + 1)
        for (begun, _), window in self.drops.items():
            last[window] = max(last[window], begun)
        for window in reversed(self.windows):  # a parent comes before its children
            if window.parent != NO_WINDOW:
                last[window.parent] = max(last[window.parent], last[window.id])
        return sorted((begun, window) for window, begun in enumerate(last))

    def needs_proof(self) -> bool:
        """Whether it drops a view whose replay was never compared; says so in a few steps at most."""
        dropped = (self.drops_by_view.keys() | {v for _, v in self.drops}) - self.with_gaps
        if self.num_checks == MAX_CHECKS or self.proven.issuperset(dropped):
            self.num_checks = MAX_CHECKS
            return False
        self.num_checks += 1
        return True

    @property
    def drops_nothing(self) -> bool:
        """Whether the program leaves the step as it is."""
        return not self.drops


def compile_program(
    step: Step, schedule: Schedule, spare: Spare | None = None, proven: set[int] | None = None
) -> Program:
    """Compile a schedule that `simulate` accepted.

    Args:
        step: the recorded step.
        schedule: what to drop of it.
        spare: how much dead memory may be held for the next results, and when; None: none.
        proven: views whose replays were compared with their originals; None: nobody asked for a proof.

    Raises:
        AttributeError: an op of the step is not registered in this process.
    """
    forward = [op for op in step.ops if op.phase == Phase.FORWARD]
    place = {op.index: k for k, op in enumerate(forward)}
    values, storages = step.values, step.storages
    held = set(schedule.held)
    roots: dict[int, int] = {}
    born: dict[int, int] = {}
    views_on: dict[int, set[int]] = {}
    for v in values:
        born.setdefault(v.storage, v.view)
        views_on.setdefault(v.storage, set()).add(v.view)
        roots[v.view] = born[v.storage]
    members = [frozenset(w.ops) for w in schedule.windows]
    retained = [frozenset(w.retain) for w in schedule.windows]
    copies = [frozenset(w.copies) for w in schedule.windows]

    def ancestors(w: int) -> list[int]:
        chain = []
        w = schedule.windows[w].parent
        while w >= 0:
            chain.append(w)
            w = schedule.windows[w].parent
        return chain

    places = [{o: k for k, o in enumerate(w.ops)} for w in schedule.windows]
    chains = [ancestors(w.id) for w in schedule.windows]
    windows_of: dict[int, list[int]] = {}
    for w in schedule.windows:
        for o in w.ops:
            windows_of.setdefault(o, []).append(w.id)

    def use_of(op_index: int, window: int) -> Use:
        op = step.ops[op_index]
        written = {i for i, v in enumerate(op.inputs) if values[v].storage in op.writes}
        kinds, outer, fix = [], [], []
        for i, vid in enumerate(op.inputs):
            v = values[vid]
            kind, source = LEAF, -1
            if step.writers.get((v.storage, v.version), NO_OP) in members[window]:
                kind = LOCAL
            elif vid in copies[window]:
                kind = COPY
            else:
                for a in chains[window]:
                    if v.storage in retained[a]:
                        kind, source = OUTER, a
                        break
            if kind == LEAF and i in written:
                kind = COPY
            elif kind == LEAF and storages[v.storage].copied:
                kind = SHARED
            if i in written and kind == OUTER:
                fix.append(i)
            kinds.append(kind)
            outer.append(source)
        free = spare.replays[window][places[window][op_index]] if spare is not None else 0
        return Use(window=window, kinds=tuple(kinds), outer=tuple(outer), copies=tuple(fix), spare_bytes=free)

    saved_at: dict[int, int] = {}
    for save in step.saves:
        saved_at.setdefault(values[save.value].storage, save.at)
    finished_by: dict[int, int] = {}
    finishes: dict[int, set[int]] = {}
    retainers: dict[int, list[int]] = {}
    for w in schedule.windows:
        for s in w.retain:
            retainers.setdefault(s, []).append(w.id)
    droppable = {s for s in step.saved_storages if s not in held and s in retainers}
    for s in droppable:
        last = step.writers.get((s, storages[s].versions - 1), NO_OP)
        if last >= saved_at[s] and last in place:
            for save in step.saved_storages[s]:
                view = values[save.value].view
                finished_by[view] = place[last]
                finishes.setdefault(place[last], set()).add(view)

    ops = []
    for k, op in enumerate(forward):
        func = resolve(op.target)
        written = tuple(i for i, v in enumerate(op.inputs) if values[v].storage in op.writes)
        writes = bool(written) or mutates(func)
        uses = tuple(use_of(op.index, w) for w in windows_of.get(op.index, ()))
        ops.append(
            OpEntry(
                index=k,
                func=func,
                ins=tuple(values[v].view for v in op.inputs),
                outs=tuple(values[v].view if v >= 0 else -1 for v in op.outputs),
                written=written,
                mutates=writes,
                random=is_random(func) or bool(op.random),
                where=f"{op.target} at {op.path or 'model'}" + (f" ({op.source})" if op.source else ""),
                uses=uses,
                finishes=frozenset(finishes.get(k, ())),
                unpacks=op.unpacks,
                into=out_form(func),
                makes=not mutates(func) and not returns_view(func),
                spare_bytes=spare.moments[op.index] if spare is not None else 0,
                is_checked=bool(uses) or writes,
            )
        )

    starts = [op.index for op in forward]
    drops: dict[tuple[int, int], int] = {}
    by_view: dict[int, set[int]] = {}
    for save in step.saves:
        v = values[save.value]
        if v.storage not in droppable or not save.reads:
            continue
        window = _serving(schedule.windows, retainers[v.storage], save.reads[0].first)
        if window < 0:
            continue
        drops[bisect.bisect_left(starts, save.at), v.view] = window
        by_view.setdefault(v.view, set()).add(window)
    program = Program(
        ops=ops,
        windows=schedule.windows,
        drops=drops,
        drops_by_view={view: next(iter(ws)) for view, ws in by_view.items() if len(ws) == 1},
        finished_by=finished_by,
        roots=roots,
        nbytes={v.view: storages[v.storage].nbytes for v in values},
        sizes={
            storages[values[op.outputs[0]].storage].nbytes
            for op, entry in zip(forward, ops, strict=True)
            if entry.into is not None and op.outputs and op.outputs[0] >= 0
        },
        trust=Trust(step.hooks),
        looks_away=any(op.func in BY_MODE for op in ops),
        pauses=frozenset(bisect.bisect_left(starts, op.index) for op in step.ops if op.phase == Phase.BACKWARD),
        with_gaps=frozenset(entry.outs[i] for entry in ops for i in results_with_gaps(entry.func)),
    )
    for (window, storage), borrower in (spare.loans if spare is not None else {}).items():
        lends = program.loans.setdefault(window, {})
        lends.update(dict.fromkeys(views_on.get(storage, ()), borrower))
    if proven is None:
        program.num_checks = MAX_CHECKS
    else:
        program.proven = proven
    funcs = [op.func for op in ops]
    for k in range(2, len(funcs)):
        program.trails.setdefault((funcs[k - 2], funcs[k - 1], funcs[k]), []).append(k)
    return program


def _serving(windows: tuple[Window, ...], retainers: list[int], moment: int) -> int:
    """The innermost of some windows that lie around a moment; -1 if none does."""
    # They nest and parents come first: of those around one moment the innermost has the highest id.
    return max((w for w in retainers if windows[w].start <= moment <= windows[w].stop), default=-1)
