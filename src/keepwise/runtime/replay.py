"""Replays: the calls that were captured in forward, run again when backward first needs one of their results.

Notes:
1. A `WindowRun` is one window in one forward pass. It owns the captured calls; each dropped save holds the run and one `Cell`.
   A cell holds a replayed tensor. Who needs a cell keeps it alive (a save, an inner run that reads it), and a replay fills
   just the cells that are alive; so a result is freed when autograd releases its last reader, with no bookkeeping of ours.
2. In an ordinary pass the captured calls, and with them the tensors they hold, are given up right after the replay. Where
   the graph is retained they stay, and the cells are emptied once each of their readers has read them and when the pass ends.
3. Outside of backward (a user who reads `grad_fn._saved_result`) a replay caches nothing.
4. Replayed tensors live on private storages, so in-place ops run in place. What a call writes and did not make is copied first:
   what an enclosing run retains, and, where the calls will be needed again, also what was captured by copy.
5. A captured tensor that is about to be written while we watch (a buffer, a counter) is replaced by a copy before that; one that is
   written where we do not watch is noticed by its version and is an error, as in plain autograd.
6. A dropped tensor that is written in place before backward reads it is an error in plain autograd. The save keeps the version
   counter alive, without the storage, and compares.
7. A replay that fails fills nothing.
8. Some kernels make more where gradients are recorded (the workspace of a recurrent layer). A replay records none, but runs each
   op with that flag as it was.
9. Results are written into dead memory where there is some (see `reuse`): of this replay, of what an earlier window of this pass
   retained, or of what autograd kept until then, if the plan lends it. Where the graph is retained nothing is lent.
"""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import torch

from keepwise.runtime.ambient import Ambient
from keepwise.runtime.calls import mutates, returns_view, storage_key, tensors_out
from keepwise.runtime.capture import Call, Cell, set_frees
from keepwise.runtime.clean import call_view, call_with_state, clean
from keepwise.runtime.digest import digest
from keepwise.runtime.geometry import Geometry, copy_whole
from keepwise.runtime.holding import KeptSave, Namer, VersionStub, check_version, version_of
from keepwise.runtime.recycler import Loans, Recycler
from keepwise.runtime.reuse import Form, form_of
from keepwise.runtime.stats import StepStats

Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_keeps_graph = getattr(_autograd, "_get_current_graph_task_keep_graph", lambda: True)

_HOLDING: dict[int, weakref.ref[WindowRun]] = {}
"""Every run of the process that holds captured tensors, whichever forward pass it belongs to (note 5)."""


def protect(tensors: list[Tensor]) -> None:
    """Copy what replays captured of tensors that are about to be written (note 5)."""
    if not _HOLDING:
        return
    storages = [key for key in map(storage_key, tensors) if key is not None]
    # Not a tuple: that allocates after it began to iterate, and a collection there may end runs.
    for ref in list(_HOLDING.values()):
        run = ref()
        if run is not None and run.held:
            for storage in storages:
                if storage in run.held:
                    run.protect(storage)


class WindowRun:
    """One window in one forward pass."""

    __slots__ = (
        "__weakref__",
        "ambient",
        "calls",
        "cells",
        "groups",
        "held",
        "lends",
        "loans",
        "lock",
        "made",
        "namer",
        "outer",
        "path",
        "slicing",
        "stats",
        "task",
        "window",
    )

    def __init__(
        self,
        path: str,
        stats: StepStats,
        namer: Namer | None,
        *,
        slicing: bool = False,
        loans: Loans | None = None,
        window: int = -1,
        lends: dict[int, int] | None = None,
    ) -> None:
        self.calls: list[Call] | None = []
        """None once they were given up."""
        self.cells: weakref.WeakValueDictionary[int, Cell] = weakref.WeakValueDictionary()
        self.made: set[int] = set()
        """Views that the captured calls produce, as they are now."""
        self.outer: list[tuple[WindowRun, Cell]] = []
        """Cells of enclosing runs that the calls read."""
        self.held: dict[int, list[tuple[Call, int]]] = {}
        """Storage -> captured tensors on it: (call, index into its holds). A captured tensor keeps the storage's identity valid."""
        self.lock = threading.RLock()
        self.task = -1
        self.path, self.stats, self.namer = path, stats, namer
        self.groups: dict[int, int] = {}
        """View -> the view that its storage was born with; only filled where calls are sliced."""
        self.slicing = slicing
        """Whether only the calls that living cells need are replayed (recordings made without a plan)."""
        self.ambient = Ambient.now()
        self.loans, self.window = loans, window
        self.lends = lends or {}
        """View of a cell -> later window to which its memory is lent when its last reader is through (note 9)."""

    @property
    def is_open(self) -> bool:
        """Whether calls may still be captured."""
        return self.calls is not None

    def add(self, call: Call, result: Any) -> None:
        """Append a captured call whose op has run."""
        calls = self.calls
        if calls is None:  # a backward pass inside of the op gave them up
            return
        call.ambient = self.ambient.changed()
        call.form = form_of(call.func, result, is_dense=call.is_dense)
        shares, writes = returns_view(call.func), mutates(call.func)
        call.is_view = shares and not writes
        call.makes = not shares and not writes
        calls.append(call)
        self.made.update(call.outs)
        self.made.discard(-1)
        for i, (held, _) in enumerate(call.holds):
            key = storage_key(held)
            if key is not None:
                if not self.held:
                    self._register()
                self.held.setdefault(key, []).append((call, i))

    def _register(self) -> None:
        key, holding = id(self), _HOLDING

        def died(ref: weakref.ref[WindowRun]) -> None:
            if holding.get(key) is ref:
                del holding[key]

        holding[key] = weakref.ref(self, died)

    def protect(self, storage: int) -> None:
        """Copy what was captured of a storage that is about to be written (note 5)."""
        with self.lock:
            for call, i in self.held.pop(storage, ()):
                container, key = call.hold_places[i]
                held, version = call.holds[i]
                if version_of(held) != version:  # written where we did not watch: an error when it is replayed
                    continue
                copy = copy_whole(held)
                container[key] = copy
                call.holds[i] = (copy, version_of(copy))

    def cell(self, view: int, geometry: Geometry | None = None) -> Cell | None:
        """The cell of a view that this run can replay; None if it cannot.

        Args:
            view: id of the tensor object.
            geometry: where it lies over an object in `made`; None: it is in `made` itself.
        """
        if self.calls is None:
            return None
        cell = self.cells.get(view)
        if cell is None:
            cell = self.cells[view] = Cell(view, geometry)
        elif (cell.geometry is None) != (geometry is None):
            return None
        cell.num_readers += 1
        return cell

    def freeze(self, view: int, t: Tensor | None) -> None:
        """A view is about to be written: whoever reads it in an inner region keeps what it is now."""
        cell = self.cells.get(view)
        if cell is None or not cell.is_lent or t is None:
            return
        del self.cells[view]
        cell.tensor = copy_whole(t)

    def fetch(self, cell: Cell) -> Tensor:
        """The tensor of a cell, replayed if need be.

        Raises:
            RuntimeError: something that the replay reads was written in place since forward.
            MismatchError: an audit is on and the replay differs from the original.
        """
        task = _graph_task()
        with self.lock:
            t = self._fill(cell, task)
            if task != -1 and _keeps_graph():
                if cell.task != task:
                    cell.task, cell.num_reads = task, 0
                cell.num_reads += 1
                if cell.num_reads >= cell.num_readers and self.calls is not None:  # else the result is all there is
                    cell.tensor = None
        return t

    def _fill(self, cell: Cell, task: int) -> Tensor:
        """The tensor of a cell, and what becomes of the run afterwards: notes 2 and 3."""
        if self.task not in (-1, task):  # that pass failed, or its callback comes only when ours is over
            self._clear()
            self.task = -1
        again = task == -1 or _keeps_graph()
        if cell.tensor is None:
            self._replay(task, again)
        t = cell.tensor
        assert t is not None, "a living cell of a finished replay is empty"
        if not again:
            self._release()
        elif task == -1:
            self._clear()
        elif self.task != task:
            self.task = task
            self._clear_after_pass()
        return t

    def _clear_after_pass(self) -> None:
        weak = weakref.ref(self)

        def end_of_pass() -> None:
            run = weak()
            if run is not None:
                with run.lock:
                    run._clear()

        torch.autograd.Variable._execution_engine.queue_callback(end_of_pass)

    def _clear(self) -> None:
        if self.calls is None:  # the inputs are gone: the results are all there is
            return
        for cell in list(self.cells.values()):
            cell.tensor = None

    def _release(self) -> None:
        """Give up the captured calls; the filled cells live on with their readers."""
        if self.calls is None:
            return
        self.calls = None
        self.outer = []
        self.held = {}
        _HOLDING.pop(id(self), None)

    def _needed(self, calls: list[Call]) -> list[Call]:
        if not self.slicing:
            return calls
        group = self.groups
        wanted = {group[c.view] for c in list(self.cells.values())}
        picked: list[Call] = []
        for call in reversed(calls):
            if wanted.isdisjoint(group[view] for view in (*call.outs, *call.writes) if view >= 0):
                continue
            picked.append(call)
            wanted.update(group[view] for view, cell, _ in call.sources if cell is None)
        picked.reverse()
        return picked

    def _replay(self, task: int, again: bool) -> None:
        calls = self.calls
        assert calls is not None, "replay after its inputs were given up"
        calls = self._needed(calls)
        fetched: dict[int, WindowRun] = {}
        outer: list[tuple[Cell, Tensor]] = []  # what is read of enclosing runs stays until this replay is over
        used = {id(cell) for call in calls for _, cell, _ in call.sources if cell is not None}
        for run, cell in self.outer:
            if id(cell) not in used:
                continue
            with run.lock:
                outer.append((cell, run._fill(cell, task)))
            if task == -1:
                fetched[id(run)] = run
        if task == -1:  # only now: a run that caches nothing empties all its cells with each that is asked for
            for cell, t in outer:
                cell.tensor = t
        cells = list(self.cells.values())
        empty = [c for c in cells if c.tensor is None]
        try:
            began = time.perf_counter()  # what enclosing runs replay for this one counts there
            self._run_all(calls, again, task)
            seconds = time.perf_counter() - began
            for c in cells:
                if c.tensor is None:
                    self.stats.missing(c.view, self.path)
                if c.digest is not None and c.tensor is not None:
                    with torch._C._DisableTorchDispatch():  # the user's modes
                        found = digest(c.tensor)
                    self.stats.compare(c.digest, found, c.view, self.path)
        except BaseException:
            for c in empty:  # note 7
                c.tensor = None
            raise
        finally:
            for run in fetched.values():
                run._clear()
        self.stats.add_replay(self.window, len(empty), len(calls), seconds)

    def _run_all(self, calls: list[Call], again: bool, task: int) -> None:
        env: dict[int, Tensor] = {}
        lends = self.loans is not None and not again
        sizes = {call.form.nbytes for call in calls if call.form is not None}
        recycler = Recycler(sizes, self.loans.take(self.window, task) if self.loans is not None else ())
        cells = self.cells
        with clean(), self.ambient.active(), torch.set_grad_enabled(True):
            set_frees(calls, {c.geometry.root for c in list(cells.values()) if c.geometry is not None})
            for call in calls:
                for held, version in call.holds:
                    if version_of(held) != version:
                        if self.stats.collecting:
                            self._give_up(calls[calls.index(call) :])
                        name = self.namer(held) if self.namer else ""
                        check_version(held, version, name, f" by {call.where}, which is to be replayed")
                if call.ambient is None:
                    self._run(call, env, recycler, again)
                else:
                    with call.ambient.active():
                        self._run(call, env, recycler, again)
            recycler.clear()
            for cell in list(cells.values()):
                if cell.tensor is None and cell.geometry is not None:
                    root = cells.get(cell.geometry.root)
                    base = env.get(cell.geometry.root) if root is None else root.tensor
                    assert base is not None
                    cell.tensor = cell.geometry.of(base)
                if lends and cell.view in self.lends and cell.tensor is not None and self.loans is not None:
                    self.loans.give(self.lends[cell.view], cell.tensor, task)

    def _give_up(self, calls: list[Call]) -> None:
        """Note that what hangs on the first of these calls has no replay: no operator wrote what it reads, and yet its version moved.

        Raises:
            MismatchError: always.
        """
        lost = set(calls[0].outs)
        for call in calls:
            if not lost.isdisjoint(view if geometry is None else geometry.root for view, _, geometry in call.sources):
                lost.update(call.outs)
        cells = list(self.cells.values())
        self.stats.moved(
            [c.view for c in cells if not lost.isdisjoint((c.view, c.geometry.root if c.geometry else c.view))]
        )

    def _run(self, call: Call, env: dict[int, Tensor], recycler: Recycler, again: bool) -> None:
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
        kept = []
        if again and call.owns:
            kept = [container[key] for container, key in call.owns]
            for container, key in call.owns:
                container[key] = copy_whole(container[key])
        if call.grad != torch.is_grad_enabled():
            torch._C._set_grad_enabled(call.grad)
        room, is_known = None, False
        if call.form is not None:
            room = self._over_argument(call, call.form, env, recycler)
            is_known = room is not None  # there is a handle on it already
            if room is None:
                room = recycler.take(call.form.shape, call.form.stride, call.form.dtype)
        recycler.trim(call.spare_bytes)
        try:
            kwargs = call.kwargs or {}
            if room is not None:
                assert call.form is not None
                self.stats.recycled_bytes_in_replays += room.nbytes
                result = call.form.func(*call.args, **kwargs, out=room)
            elif call.is_view:
                result = call_view(call.func, call.args, kwargs)
            elif call.random is None:
                result = call.func(*call.args, **kwargs)
            else:
                result = call_with_state(call.func, tuple(call.args), kwargs, call.random)
        finally:
            for container, key in call.places:
                container[key] = None
            for (container, key), t in zip(call.owns, kept, strict=False):
                container[key] = t
        if call.makes and not is_known:
            recycler.lend(result)
        outs = call.outs
        if type(result) is Tensor:
            if outs:
                self._made(outs[0], result, env)
        else:
            for view, t in zip(outs, tensors_out(result), strict=False):
                if view >= 0 and t is not None:
                    self._made(view, t, env)
        for view in call.frees:
            env.pop(view, None)

    def _made(self, view: int, t: Tensor, env: dict[int, Tensor]) -> None:
        env[view] = t
        cell = self.cells.get(view)
        if cell is not None and cell.geometry is None:
            cell.tensor = t

    def _over_argument(self, call: Call, form: Form, env: dict[int, Tensor], recycler: Recycler) -> Tensor | None:
        """An argument that a pointwise call reads for the last time, if its memory can be the result's."""
        if not form.pointwise:
            return None
        for view, cell, geometry in call.sources:
            if (
                cell is None
                and geometry is None
                and view in call.frees
                and view not in self.cells
                and form.fits(env[view], recycler.num_handles(env[view]))
            ):
                return env[view]
        return None


class LentSave(KeptSave):
    """A kept tensor whose memory a later window may write over (note 9)."""

    __slots__ = ("borrower", "loans")

    def __init__(self, tensor: Tensor, namer: Namer | None, loans: Loans, borrower: int) -> None:
        super().__init__(tensor, namer)
        self.loans, self.borrower = loans, borrower

    def unpack(self) -> Tensor:
        """The tensor; from now on its memory is held for that window, which uses it if nobody else does then.

        Raises:
            RuntimeError: it was written in place.
        """
        t = super().unpack()
        task = _graph_task()
        if task != -1 and not _keeps_graph():
            self.loans.give(self.borrower, t, task)
        return t


class DroppedSave:
    """What autograd holds for a saved tensor that the plan dropped."""

    __slots__ = ("__weakref__", "cell", "pending", "run", "version")

    def __init__(self, run: WindowRun, cell: Cell, t: Tensor) -> None:
        self.run = run
        self.cell = cell
        self.version = VersionStub(t)
        """Note 6."""
        self.pending: Any = None
        """A `KeptSave` until the op that finishes the tensor has been captured (it was saved before it was written); a `ForeignSave` from
        the moment at which the user's hooks got it after all."""

    def unpack(self) -> Tensor:
        """The tensor, replayed.

        Raises:
            RuntimeError: it was written in place since it was saved, or something that the replay reads was.
        """
        if self.pending is not None:
            return self.pending.unpack()
        # The user's hooks around let plain autograd read it.
        if self.run.stats.collecting and not self.version.is_current():
            self.run.stats.moved([self.cell.view])
        self.version.check()
        return self.run.fetch(self.cell)
