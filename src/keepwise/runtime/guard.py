"""The op guard: watches the ops of a step, captures what replays will need, and decides what each saved tensor becomes.

Notes:
1. The wiring is compared with the recording for every op that is replayed or that writes in place (see `wiring`). Other ops only have
   to have the right name: what a replay reads of their results is captured as it is, so it cannot be wrong.
2. A save is dropped if its window's run captured everything that makes it. Else it is kept: a step that takes another
   branch, has another shape or op, loses memory and never correctness.
3. Where an op is not the expected one, the last three functions are looked up in the recording to find the way back. Going back in
   the recording (a loop body, another micro-batch) begins a new frame: all windows get new runs, and no tensor of the frame
   before has an identity in it.
4. What `run.made` says is as it is now: whoever writes a storage without being captured by a run, be it an op that the recording
   does not know, one that got another tensor, or one that reached the storage through an unknown alias, makes that run forget
   all objects on it. That is decided by storages, not by what the recording calls the tensors.
5. A tensor can be saved before it is written (RReLU's noise). It is kept until the op that finishes it has been captured.
6. What forward returns may be written afterwards, where we do not watch, and plain autograd minds that only if it was saved. Where
   it was not and a replay reads it, the replay gets a copy.
7. Results may be written into the memory of results that died in this forward pass (see `reuse`), within what the plan leaves free.
   Not where another dispatch mode is around ours: it would see other ops than the user's.
8. Under the user's own hooks on saved tensors plain autograd compares no versions, and a pair of hooks may give back what it likes: see
   `foreign`.
9. Once backward runs, whoever reads a window that forward is through with holds its run. What nobody reads in this step (its branch was
   skipped, its saves died unread) goes, although we may be watching until the whole step ends.
"""

from __future__ import annotations

import weakref
from bisect import bisect_left
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from keepwise.ir import NO_WINDOW
from keepwise.runtime.beneath import beneath
from keepwise.runtime.calls import (
    device_of,
    has_subclass,
    mutates,
    storage_key,
    tensors_in,
    tensors_out,
    written_tensors,
)
from keepwise.runtime.capture import Call, Cell
from keepwise.runtime.clean import RandomState, generator_of
from keepwise.runtime.digest import digest
from keepwise.runtime.foreign import WitnessedSave, identity_of
from keepwise.runtime.holding import ForeignSave, KeptSave, Namer
from keepwise.runtime.hooks import Hooks
from keepwise.runtime.leaves import LeafCopies
from keepwise.runtime.passes import BY_MODE, install
from keepwise.runtime.program import OpEntry, Program
from keepwise.runtime.recycler import Loans, Recycler
from keepwise.runtime.replay import DroppedSave, LentSave, WindowRun, protect
from keepwise.runtime.reuse import result_geometry
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.stats import StepStats
from keepwise.runtime.unseen import unseen
from keepwise.runtime.watch import Watch, innermost_hooks, of_subclass, unpack
from keepwise.runtime.wiring import Seen, Wiring

Tensor = torch.Tensor
_DETACH = torch.ops.aten.detach.default
_graph_task = torch._C._current_graph_task_id
_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


class Guard(Wiring):
    """The guard of a planned step; note 1."""

    def __init__(self, program: Program, stats: StepStats, namer: Namer | None) -> None:
        super().__init__(program, stats, namer)
        self.place = 0
        """Index of the op that is expected next."""
        self.last: tuple[Any, Any] = (None, None)
        """The two functions before the current one."""
        self.pending: dict[int, list[DroppedSave]] = {}
        """Op that finishes them -> saves that wait for it (note 5)."""
        self.counted: set[tuple[int, int]] = set()
        self.saved: set[int | None] = set()
        """Storages of saved tensors that are kept."""
        self.as_they_are: set[int] = set()
        """Ids of tensors that the user's hooks hold themselves: that they are alive does not mean that anybody writes them."""
        self.witnessed: tuple[str, int] | None = None
        """(pair, view) of the user's hooks and a tensor whose way through them is to be watched."""
        self.pair: tuple[Hooks, str] | None = None
        """The pair of hooks that was looked at last, and what it is known by."""
        self.strange: set[int] = set()
        """Storages of results of ops that the recording does not know; only for the statistics."""
        self.recycler: Recycler | None = None
        """Memory of dead results (note 7)."""
        self.passed: list[weakref.ref[WindowRun]] = []
        """Runs that are left to those who read them (note 9)."""
        self.num_passed = 0
        """How many of `Program.ends` are."""

    def __enter__(self) -> Any:
        if self.program.looks_away:
            self._look_away_in_backward()
        if not _get_current_dispatch_mode_stack():
            self.recycler = Recycler(self.program.sizes)
            self.loans = Loans(self.recycler)
        return super().__enter__()

    def close(self, *exc: Any) -> None:
        """Leave; dead memory is given back."""
        if self.recycler is not None:
            self.recycler.clear()
            self.recycler = None
        try:
            self._stop_watching()
        finally:
            super().close(*exc)

    def restart(self) -> None:
        """A new forward pass begins: nothing of the last one is continued."""
        self.place = 0
        self._new_frame()

    def _new_frame(self) -> None:
        if self.recycler is not None:
            self.recycler.clear()
        self.loans = Loans(self.recycler)
        self.leaves = LeafCopies()
        self.runs = [None] * len(self.runs)
        self.passed, self.num_passed = [], 0
        self.pending = {}
        self.counted = set()
        self.kept = set()
        self.saved = set()
        self.withheld.prune()
        self.strange = set()
        self.forget_all()

    @beneath
    def __torch_dispatch__(self, func: Any, types: Any, run: Any, args: Any, kwargs: Any) -> Any:
        if types and has_subclass(types):
            return of_subclass(run, types, args, kwargs)
        if _functorch_stack() is not None or (_graph_task() != -1 and not self._is_forward()):
            if self.recycler is not None:
                self.recycler.clear()
            if _graph_task() != -1:
                self._pass_on()
            return self._unwatched(func, run, args, kwargs)
        self.stats.num_ops += 1
        place = self.place
        ops = self.program.ops
        if place < len(ops) and ops[place].func is func:
            entry = ops[place]
        else:
            entry = self._find(func)
            if entry is None:
                if func is _DETACH and _graph_task() != -1:  # autograd's own, of what our unpack gave it
                    return run(*args, **(kwargs or {}))
                if self.recycler is not None:
                    self.recycler.trim(0)
                self.stats.num_unknown_ops += 1
                if func in BY_MODE:
                    self._look_away_in_backward()
                self.stats.differs(f"{func}, which the recorded step does not have here")
                self.last = (self.last[1], func)
                given = set(map(storage_key, tensors_in(args, kwargs)))
                result = self._unwatched(func, run, args, kwargs)
                made = {storage_key(t) for t in tensors_out(result) if t is not None}
                self.strange.update(key for key in made - given if key is not None)
                return result
        self.last = (self.last[1], func)
        self.place = entry.index + 1
        if entry.is_checked:
            return self._checked(entry, func, run, args, kwargs)
        result = self._call(entry, func, run, args, kwargs)
        self.bind(entry.outs, result, made=False)
        return result

    def _call(self, entry: OpEntry, func: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, into the memory of dead results where there is some (note 7)."""
        recycler = self.recycler
        if recycler is None or _graph_task() != -1:
            return run(*args, **(kwargs or {}))
        room, into = None, entry.into
        if into is not None:
            geometry = result_geometry(func, args, kwargs)
            room = recycler.take(geometry[0], None, geometry[1]) if geometry is not None else None
        recycler.trim(entry.spare_bytes)
        if room is None or into is None:
            result = run(*args, **(kwargs or {}))
        else:
            self._forget_storage(room)
            self.stats.recycled_bytes += room.nbytes
            result = into(*args, **(kwargs or {}), out=room)
        if entry.makes:
            recycler.lend(result)
        return result

    def _look_away_in_backward(self) -> None:
        self.looks_away = True
        install()

    def look_away(self) -> None:
        """See `Watch`; and what is alive of earlier results may be written now, or was."""
        if self.recycler is not None:
            self.recycler.clear()
        self._stop_watching()
        self._pass_on()
        for run in self.runs:
            if run is not None:
                run.made.clear()
        super().look_away()

    def _pass_on(self) -> None:
        """Note 9."""
        ends, place = self.program.ends, self.place
        if self.num_passed == len(ends):
            return
        # Else forward goes on after this backward, and more may be saved before its next op.
        is_over = place == len(self.program.ops) or place not in self.program.pauses
        while self.num_passed < len(ends) and (is_over or ends[self.num_passed][0] < place):
            window = ends[self.num_passed][1]
            run, self.runs[window] = self.runs[window], None
            self.num_passed += 1
            if run is not None:
                self.passed.append(weakref.ref(run))

    def _forget_storage(self, t: Tensor) -> None:
        """The storage of `t` begins a new life."""
        key = storage_key(t)
        if key is not None:
            self.lying.pop(key, None)
            self.kept.discard(key)
            self.saved.discard(key)
            self.strange.discard(key)
            self.withheld.forget(key)

    @staticmethod
    def _is_forward() -> bool:
        """Whether an op inside of a backward pass belongs to a graph that is being built (`create_graph`) under our hooks."""
        if not torch.is_grad_enabled():
            return False
        top = innermost_hooks()
        return top is not None and top[1] is unpack

    def _find(self, func: Any) -> OpEntry | None:
        """Note 3: where the recording has the last three functions, nearest ahead first."""
        places = self.program.trails.get((*self.last, func))
        if not places:
            return None
        ahead = bisect_left(places, self.place)
        if ahead == len(places):
            self._new_frame()
            ahead = 0
        return self.program.ops[places[ahead]]

    def _unwatched(self, func: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that the recording does not explain."""
        if not mutates(func):
            return run(*args, **(kwargs or {}))
        written = written_tensors(func, args, kwargs)
        self._before_write(written)
        try:
            return run(*args, **(kwargs or {}))
        finally:
            self._written(written, None)

    def _stop_watching(self) -> None:
        """Prepare for writes that we shall not see, where the user's hooks let plain autograd go on after them (note 8)."""
        if self.withheld.is_used:
            with torch._C.DisableTorchFunction():
                self.withheld.hand_over_all()
                alive = [ref() for ref, _, _ in list(self.ids.values())]
                protect([t for t in alive if t is not None and id(t) not in self.as_they_are])

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Tensors are about to be written."""
        protect(tensors)
        if self.withheld.entries:
            for t in self.withheld.hand_over(tensors):
                self.deviates(t)

    def _written(self, tensors: list[Tensor], captured: list[tuple[WindowRun, Call]] | None) -> None:
        """Note 4: tensors were written, in an op that these runs captured."""
        for t in tensors:
            self.leaves.forget(storage_key(t))
            views = self.views_on(t)
            if not views:
                continue
            for run in self.runs:
                if run is not None and not run.made.isdisjoint(views):
                    made_here = captured and any(run is r and call.writes_own(views) for r, call in captured)
                    if not made_here:
                        run.made.difference_update(views)

    def _checked(self, entry: OpEntry, func: Any, run: Any, args: Any, kwargs: Any) -> Any:
        """Run an op whose wiring matters, capturing it for each window that replays it."""
        seen_args, seen_kwargs = replay_arguments(func, args, kwargs) if entry.uses else (args, kwargs)
        tensors = tensors_in(seen_args, seen_kwargs)
        views = [self.view_of(t) for t in tensors]
        fits = len(views) == len(entry.ins)
        written: list[Tensor] = []
        if entry.mutates:
            written = written_tensors(func, args, kwargs)
            if fits:
                written += [tensors[i] for i in entry.written]
            self._before_write(written)
        captured: list[tuple[WindowRun, Call]] = []
        if entry.uses and not entry.unpacks:
            if fits or not entry.mutates:
                random = None
                if entry.random:
                    generator, own = generator_of(func, args, kwargs, device_of(args, kwargs, tensors))
                    random = RandomState(generator, own=own) if generator is not None else None
                captured = self.capture(entry, Seen(func, seen_args, seen_kwargs, tensors, views, random))
            else:
                self.stats.differs(f"{entry.where} got {len(views)} tensors instead of {len(entry.ins)}")
        try:
            result = self._call(entry, func, run, args, kwargs)
        except BaseException:
            self._written(written, None)
            raise
        if written:
            self._written(written, captured)
        if entry.unpacks:
            captured = self.capture_packed(entry, result)
        for replay, call in captured:
            replay.add(call, result)
        if entry.unpacks or captured or not written or (fits and all(views[i] == entry.ins[i] for i in entry.written)):
            self.bind(entry.outs, result, made=bool(captured))
        if entry.finishes:
            for save in self.pending.pop(entry.index, ()):
                if any(replay is save.run for replay, _ in captured):
                    self._finish(save)
        return result

    def dropped(self, t: Tensor) -> DroppedSave | None:
        """A handle on the tensor's replay if the plan drops it and its replay is complete."""
        stats = self.stats
        stats.num_saved += 1
        view = self.view_of(t) if not self.passes_on else -1
        if view >= 0:
            program = self.program
            stats.saved_bytes += t.nbytes if t.layout is torch.strided else 0
            window = program.drops.get((self.place, view))
            if window is None:
                window = program.drops_by_view.get(view)
            if window is not None:
                run = self.runs[window]
                cell = self.cell(run, view, t) if self.foreign is None or self._may_be_left_out(view, t) else None
                if run is not None and cell is not None:
                    return self._drop(t, view, window, run, cell)
                stats.num_deviations += 1
                self.deviates(t)
        elif not t.is_leaf and t.layout is torch.strided:
            stats.saved_bytes += t.nbytes
            if storage_key(t) in self.strange:
                self.deviates(t)
        if t.layout is torch.strided:
            self.saved.add(storage_key(t))
        return None

    def hold(self, t: Tensor) -> KeptSave:
        """As it is, or with memory that is lent when it is dead."""
        lent = self.program.loans.get(NO_WINDOW)
        borrower = lent.get(self.view_of(t)) if lent else None
        return LentSave(t, self.namer, self.loans, borrower) if borrower is not None else KeptSave(t, self.namer)

    @unseen
    def returned(self, result: Any, given: Any = ()) -> None:
        """Forward is over; notes 6 and 8.

        Args:
            result: what it returned.
            given: its arguments.
        """
        all_runs = (*self.runs, *(ref() for ref in self.passed))
        runs = [run for run in all_runs if run is not None and run.held]
        if not runs:
            return
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for t in _pytree.tree_leaves(result):
                key = storage_key(t) if isinstance(t, Tensor) else None
                if key is None or key in self.saved or all(key not in run.held for run in runs):
                    continue
                self.deviates(t)
                protect([t])
            if self.withheld.is_used:
                protect([t for t in _pytree.tree_leaves((result, given)) if isinstance(t, Tensor)])

    def _drop(self, t: Tensor, view: int, window: int, run: WindowRun, cell: Cell) -> DroppedSave:
        save = DroppedSave(run, cell, t)
        finisher = self.program.finished_by.get(view, -1)
        if finisher >= self.place:
            save.pending = self.keep(t)  # note 5
            self.pending.setdefault(finisher, []).append(save)
        elif self._is_compared(view):
            with torch._C._DisableTorchDispatch():
                cell.digest = digest(t)
        self.withhold(save, t)
        self.stats.num_dropped += 1
        root = self.program.roots[view]
        if (window, root) not in self.counted:
            self.counted.add((window, root))
            self.stats.dropped_bytes += self.program.nbytes[view]
        return save

    def _may_be_left_out(self, view: int, t: Tensor) -> bool:
        """Whether the user's hooks may be spared a tensor (note 8)."""
        hooks = self.users_hooks()
        if hooks is None:
            return True
        if self.program.finished_by.get(view, -1) >= self.place or t.is_conj() or t.is_neg():
            return False
        if self.pair is None or self.pair[0] is not hooks:
            self.pair = hooks, identity_of(hooks)
        pair = self.pair[1]
        if (pair, view) in self.program.trust:
            return True
        self.stats.differs("hooks of your own on saved tensors, which never gave back yet what they are given here")
        self.witnessed = pair, view
        return False

    def keep(self, t: Tensor) -> Any:
        """Hold a saved tensor as plain autograd would."""
        witnessed, self.witnessed = self.witnessed, None
        saved = super().keep(t)
        if isinstance(saved, ForeignSave) and saved.packed is t:
            self.as_they_are.add(id(t))
        if witnessed is None or type(saved) is not ForeignSave:
            return saved
        return WitnessedSave(saved, t, self.program.trust, *witnessed)

    def _is_compared(self, view: int) -> bool:
        return self.stats.auditing and view not in self.program.with_gaps

    def _finish(self, save: DroppedSave) -> None:
        kept, save.pending = save.pending, None
        # what is overwritten backward may not read, and need not
        if self._is_compared(save.cell.view) and save.version.is_current():
            with torch._C._DisableTorchDispatch():
                save.cell.digest = digest(kept.unpack())


__all__ = ["Guard", "Watch", "unpack"]
