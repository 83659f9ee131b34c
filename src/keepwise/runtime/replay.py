"""Replays: the calls that were captured in forward, run again when backward first needs one of their results.

Notes:
1. A `WindowRun` is one window in one forward pass. It owns the captured calls; each dropped save holds the run and one `Cell`.
   A cell holds a replayed tensor. Who needs a cell keeps it alive (a save, an inner run that reads it), and a replay fills
   just the cells that are alive; so a result is freed when autograd releases its last reader, with no bookkeeping of ours.
2. In an ordinary pass the captured calls, and with them the tensors they hold, are given up right after the replay. Where
   the graph is retained they stay, and the cells are emptied once each of their readers has read them and when the pass ends.
3. Outside of backward (a user who reads `grad_fn._saved_result`) a replay caches nothing.
4. Replayed tensors live on private storages, so in-place ops run in place. What a call writes and did not make is copied first.
5. A captured tensor that is about to be written while we watch (a buffer, a counter) is replaced by a copy before that; one that is
   written where we do not watch is noticed by its version and is an error, as in plain autograd.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from keepwise.runtime.calls import tensors_out
from keepwise.runtime.clean import RandomState, call_with_state, clean
from keepwise.runtime.digest import digest
from keepwise.runtime.holding import Namer, check_version, version_of
from keepwise.runtime.reuse import Form, form_of
from keepwise.runtime.stats import StepStats

Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
_keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)


class Geometry:
    """A view described by its numbers, for an object whose view op is not replayed."""

    __slots__ = ("offset", "root", "shape", "stride")

    def __init__(self, t: Tensor, root: int) -> None:
        self.shape, self.stride, self.offset, self.root = t.shape, t.stride(), t.storage_offset(), root

    def of(self, base: Tensor) -> Tensor:
        """The view of `base`'s storage."""
        return base.as_strided(self.shape, self.stride, self.offset)


class Cell:
    """Place of one replayed tensor (note 1)."""

    __slots__ = ("__weakref__", "digest", "geometry", "num_readers", "num_reads", "task", "tensor", "view")

    def __init__(self, view: int, geometry: Geometry | None) -> None:
        self.view = view
        self.geometry = geometry
        self.tensor: Tensor | None = None
        self.digest: int | None = None
        self.num_readers = 0
        self.num_reads = 0
        self.task = -1


class Call:
    """One captured op: the function, its arguments with everything but replayed tensors in place, and how to fill those in."""

    __slots__ = (
        "args",
        "copies",
        "form",
        "frees",
        "func",
        "hold_places",
        "holds",
        "kwargs",
        "outs",
        "places",
        "random",
        "sources",
        "where",
        "writes",
    )

    def __init__(
        self,
        func: Any,
        args: list[Any],
        kwargs: dict[str, Any] | None,
        places: list[tuple[Any, Any]],
        sources: list[tuple[int, Cell | None, Geometry | None]],
        copies: tuple[int, ...],
        holds: list[tuple[Tensor, int]],
        hold_places: list[tuple[Any, Any]],
        outs: tuple[int, ...],
        random: RandomState | None,
        where: str,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.places = places
        """(container, key) of each argument to fill in, aligned with `sources`."""
        self.sources = sources
        """(view id, cell of an outer run or None, geometry or None)."""
        self.copies = copies
        """Indices into `sources` that must be copied before the call because it writes them and an outer run owns them."""
        self.holds = holds
        """Captured tensors with their versions, for the version check."""
        self.hold_places = hold_places
        """Where each of `holds` stands among the arguments."""
        self.outs = outs
        self.random = random
        self.where = where
        self.form: Form | None = None
        """How to write the result into given memory, if that is possible."""
        self.frees: tuple[int, ...] = ()
        self.writes: tuple[int, ...] = ()
        """Views among the sources that it writes; only filled where calls are sliced."""


class WindowRun:
    """One window in one forward pass."""

    __slots__ = (
        "__weakref__",
        "calls",
        "cells",
        "closed",
        "groups",
        "held",
        "lock",
        "made",
        "namer",
        "outer",
        "path",
        "slicing",
        "stats",
        "task",
    )

    def __init__(self, path: str, stats: StepStats, namer: Namer | None, *, slicing: bool = False) -> None:
        self.calls: list[Call] | None = []
        self.cells: weakref.WeakValueDictionary[int, Cell] = weakref.WeakValueDictionary()
        self.made: set[int] = set()
        """Views that the captured calls produce."""
        self.outer: list[tuple[WindowRun, Cell]] = []
        """Cells of enclosing runs that the calls read."""
        self.held: dict[int, list[tuple[Call, int]]] = {}
        """Storage -> captured tensors on it: (call, index into its holds). A captured tensor keeps the storage's identity valid."""
        self.closed = False
        """No further call may be captured: something was written that the recording does not know."""
        self.lock = threading.RLock()
        self.task = -1
        self.path, self.stats, self.namer = path, stats, namer
        self.groups: dict[int, int] = {}
        """View -> the view that its storage was born with; only filled where calls are sliced."""
        self.slicing = slicing
        """Whether only the calls that living cells need are replayed (recordings made without a plan)."""

    def add(self, call: Call, result: Any) -> None:
        """Append a captured call whose op has run."""
        assert self.calls is not None
        call.form = form_of(call.func, result)
        self.calls.append(call)
        self.made.update(call.outs)
        for i, (held, _) in enumerate(call.holds):
            if held.layout is torch.strided:
                self.held.setdefault(held.untyped_storage()._cdata, []).append((call, i))

    def protect(self, t: Tensor) -> None:
        """Copy what was captured of a storage that is about to be written (note 5)."""
        if not self.held or t.layout is not torch.strided:
            return
        for call, i in self.held.pop(t.untyped_storage()._cdata, ()):
            container, key = call.hold_places[i]
            copy = copy_whole(call.holds[i][0])
            container[key] = copy
            call.holds[i] = (copy, version_of(copy))

    def cell(self, view: int, t: Tensor, root: int) -> Cell | None:
        """The cell of a view that this run can replay; None if it cannot.

        Args:
            view: id of the tensor object.
            t: the object itself, for its geometry.
            root: id of the object that its storage was born with.
        """
        if self.closed or self.calls is None:
            return None
        cell = self.cells.get(view)
        if cell is None:
            if view in self.made:
                cell = Cell(view, None)
            elif root in self.made and not t.is_conj() and not t.is_neg():
                cell = Cell(view, Geometry(t, root))
            else:
                return None
            self.cells[view] = cell
        cell.num_readers += 1
        return cell

    def fetch(self, cell: Cell) -> Tensor:
        """The tensor of a cell, replayed if need be.

        Raises:
            RuntimeError: something that the replay reads was written in place since forward.
            MismatchError: an audit is on and the replay differs from the original.
        """
        task = _graph_task()
        with self.lock:
            t = cell.tensor
            if t is None:
                self._replay()
                t = cell.tensor
                assert t is not None, "a living cell of a finished replay is empty"
            if task == -1:
                self._clear()
            elif _keeps_graph():
                self._retain(cell, task)
            elif self.calls:
                self._release()
        return t

    def _retain(self, cell: Cell, task: int) -> None:
        """Bookkeeping of a pass that keeps the graph (note 2)."""
        if self.task != task:
            self.task = task
            weak = weakref.ref(self)

            def end_of_pass() -> None:
                run = weak()
                if run is not None:
                    with run.lock:
                        run._clear()

            torch.autograd.Variable._execution_engine.queue_callback(end_of_pass)
        if cell.task != task:
            cell.task, cell.num_reads = task, 0
        cell.num_reads += 1
        if cell.num_reads >= cell.num_readers:
            cell.tensor = None

    def _clear(self) -> None:
        if self.calls is None:  # the inputs are gone: the results are all there is
            return
        for cell in list(self.cells.values()):
            cell.tensor = None

    def _release(self) -> None:
        """Give up the captured calls; the filled cells live on with their readers."""
        self.calls = None
        self.outer = []
        self.held = {}
        self.closed = True

    def _needed(self, calls: list[Call]) -> list[Call]:
        if not self.slicing:
            return calls
        group = self.groups
        wanted = {group[c.view] for c in self.cells.values()}
        picked: list[Call] = []
        for call in reversed(calls):
            if wanted.isdisjoint(group[view] for view in (*call.outs, *call.writes) if view >= 0):
                continue
            picked.append(call)
            wanted.update(group[view] for view, cell, _ in call.sources if cell is None)
        picked.reverse()
        return picked

    def _replay(self) -> None:
        calls = self.calls
        assert calls is not None, "replay after its inputs were given up"
        began = time.perf_counter()
        calls = self._needed(calls)
        for run, cell in self.outer:
            if cell.tensor is None:
                run.fetch_for_inner(cell)
        env: dict[int, Tensor] = {}
        spare: list[Tensor] = []
        cells = self.cells
        with clean():
            _set_frees(calls, {c.geometry.root for c in cells.values() if c.geometry is not None})
            for call in calls:
                for held, version in call.holds:
                    if version_of(held) != version:
                        name = self.namer(held) if self.namer else ""
                        check_version(held, version, name, f" by {call.where}, which is to be replayed")
                self._run(call, env, cells, spare)
            spare.clear()
            for cell in cells.values():
                if cell.tensor is None and cell.geometry is not None:
                    base = cells.get(cell.geometry.root)
                    base_tensor = env.get(cell.geometry.root) if base is None else base.tensor
                    assert base_tensor is not None
                    cell.tensor = cell.geometry.of(base_tensor)
            for cell in cells.values():
                if cell.digest is not None and cell.tensor is not None:
                    self.stats.compare(cell.digest, digest(cell.tensor), cell.view, self.path)
        self.stats.add_replay(len(calls), time.perf_counter() - began)

    def fetch_for_inner(self, cell: Cell) -> Tensor:
        """Fill a cell that an inner run reads."""
        with self.lock:
            if cell.tensor is None:
                self._replay()
            if _graph_task() != -1 and not _keeps_graph() and self.calls:
                self._release()
            assert cell.tensor is not None
            return cell.tensor

    def _run(
        self,
        call: Call,
        env: dict[int, Tensor],
        cells: weakref.WeakValueDictionary[int, Cell],
        spare: list[Tensor],
    ) -> None:
        for (container, key), (view, cell, geometry) in zip(call.places, call.sources, strict=True):
            if cell is not None:
                t = cell.tensor
                assert t is not None
            elif geometry is None:
                t = env[view]
            else:
                t = geometry.of(env[geometry.root])
            container[key] = t
        for i in call.copies:
            container, key = call.places[i]
            container[key] = copy_whole(container[key])
        room = None if call.form is None else _room(call, call.form, env, cells, spare)
        spare.clear()
        try:
            kwargs = call.kwargs or {}
            if room is not None:
                assert call.form is not None
                result = call.form.func(*call.args, **kwargs, out=room)
            elif call.random is None:
                result = call.func(*call.args, **kwargs)
            else:
                result = call_with_state(call.func, tuple(call.args), kwargs, call.random)
        finally:
            for container, key in call.places:
                container[key] = None
        outs = call.outs
        if type(result) is Tensor:
            view = outs[0]
            env[view] = result
            if view in cells:
                cells[view].tensor = result
        else:
            for view, t in zip(outs, tensors_out(result), strict=False):
                if view >= 0 and t is not None:
                    env[view] = t
                    if view in cells:
                        cells[view].tensor = t
        for view in call.frees:
            t = env.pop(view, None)
            if t is not None and t is not result:
                spare.append(t)


def _room(
    call: Call, form: Form, env: dict[int, Tensor], cells: weakref.WeakValueDictionary[int, Cell], spare: list[Tensor]
) -> Tensor | None:
    """Memory that is free for the result of a call (see `reuse`)."""
    if form.pointwise:
        for view, cell, geometry in call.sources:
            if cell is None and geometry is None and view in call.frees and view not in cells and form.fits(env[view]):
                return env[view]
    while spare:
        t = spare.pop()
        if form.fits(t):
            return t
    return None


def copy_whole(t: Tensor) -> Tensor:
    """A copy on a storage of its own with the same strides, also where they overlap or leave gaps."""
    if t.is_contiguous():
        return t.clone()
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) if t.numel() else 0
    room = torch.empty(span, dtype=t.dtype, device=t.device)
    room.copy_(t.as_strided((span,), (1,), t.storage_offset()))
    return room.as_strided(t.shape, t.stride(), 0)


def _set_frees(calls: list[Call], seen: set[int]) -> None:
    """Set on each call which views nobody reads after it; those in `seen` are read after all."""
    for call in reversed(calls):
        frees = []
        for view, cell, geometry in call.sources:
            if cell is not None:
                continue
            key = view if geometry is None else geometry.root
            if key not in seen:
                seen.add(key)
                frees.append(key)
        for view in call.outs:
            if view not in seen:
                seen.add(view)
                frees.append(view)
        call.frees = tuple(frees)


class DroppedSave:
    """What autograd holds for a saved tensor that the plan dropped."""

    __slots__ = ("cell", "pending", "run")

    def __init__(self, run: WindowRun, cell: Cell) -> None:
        self.run = run
        self.cell = cell
        self.pending: Any = None
        """A `KeptSave` until the op that finishes the tensor has been captured (it was saved before it was written)."""

    def unpack(self) -> Tensor:
        """The tensor, replayed."""
        if self.pending is not None:
            return self.pending.unpack()
        return self.run.fetch(self.cell)
