"""The op guard: watches the ops of a step, captures what replays will need, and decides what each saved tensor becomes.

Notes:
1. A capture is taken from *this very step*: literals, leaves and generator states are those of the running op, never the
   recorded ones. What the recording supplies is which ops belong to a replay and how they are wired. The wiring is compared
   for every op that is replayed or that writes in place. Other ops only have to have the right name: what a replay reads of
   their results is captured as it is, so it cannot be wrong.
2. A save is dropped if its window's run captured everything that makes it. Else it is kept: a step that takes another
   branch, has another shape or op, loses memory and never correctness.
3. Where an op is not the expected one, the last three functions are looked up in the recording to find the way back. Going back in
   the recording (a loop body, another micro-batch) begins a new frame: all windows get new runs, and no tensor of the frame
   before has an identity in it.
4. What `run.made` says is as it is now: whoever writes a storage without being captured by a run, be it an op that the recording
   does not know, one that got another tensor, or one that reached the storage through an unknown alias, makes that run forget
   all objects on it. That is decided by storages, not by what the recording calls the tensors.
5. A tensor can be saved before it is written (RReLU's noise). It is kept until the op that finishes it has been captured.
6. Where an op that only reads is wired otherwise than recorded (a mask in some batches only, a skipped layer), it is captured with
   what it really got: an argument that its run makes is made again, any other is held, like a leaf. Held is only what plain
   autograd could not let be overwritten either, or what records no gradient: else a write after forward would raise here and not there.
7. What forward returns may be written afterwards, where we do not watch, and plain autograd minds that only if it was saved. Where
   it was not and a replay reads it, the replay gets a copy.
8. Results may be written into the memory of results that died in this forward pass (see `reuse`), within what the plan leaves free.
   Not where another dispatch mode is around ours: it would see other ops than the user's.
9. Under the user's own hooks on saved tensors plain autograd compares no versions, and a pair of hooks may give back what it likes: see
   `foreign`.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from keepwise.ir import NO_WINDOW
from keepwise.runtime.calls import (
    device_of,
    has_subclass,
    mutates,
    returns_view,
    skeleton,
    storage_key,
    tensors_in,
    tensors_out,
    written_tensors,
)
from keepwise.runtime.capture import Call, Cell
from keepwise.runtime.clean import RandomState, generator_of
from keepwise.runtime.digest import digest
from keepwise.runtime.foreign import WitnessedSave, identity_of
from keepwise.runtime.geometry import SMALL_BYTES, Geometry, copy_whole
from keepwise.runtime.holding import ForeignSave, KeptSave, Namer, alias, version_of
from keepwise.runtime.hooks import Hooks
from keepwise.runtime.leaves import LeafCopies
from keepwise.runtime.packing import pack
from keepwise.runtime.packing import unpack as expand
from keepwise.runtime.program import COPY, LEAF, LOCAL, SHARED, OpEntry, Program, Use
from keepwise.runtime.recycler import Loans, Recycler
from keepwise.runtime.replay import DroppedSave, LentSave, WindowRun, protect
from keepwise.runtime.reuse import result_geometry
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.stats import StepStats
from keepwise.runtime.unseen import unseen
from keepwise.runtime.watch import Watch, function_mode_is_on, innermost_hooks, of_subclass, unpack

Tensor = torch.Tensor
Source = tuple[int, Cell | None, Geometry | None, WindowRun | None]
"""View id, the cell of an enclosing run, where the view lies over another one, that run."""
_DETACH = torch.ops.aten.detach.default
_graph_task = torch._C._current_graph_task_id
_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


class Seen(NamedTuple):
    """A running call, as replays are to repeat it."""

    func: Any
    args: Any
    kwargs: Any
    tensors: list[Tensor]
    """Its tensor arguments in flattened order."""
    views: list[int]
    """Their view ids."""
    random: RandomState | None
    """What it draws from."""


class Guard(Watch):
    """The guard of a planned step; note 1."""

    def __init__(self, program: Program, stats: StepStats, namer: Namer | None) -> None:
        super().__init__(stats, namer)
        self.program = program
        self.runs: list[WindowRun | None] = [None] * len(program.windows)
        self.place = 0
        """Index of the op that is expected next."""
        self.last: tuple[Any, Any] = (None, None)
        """The two functions before the current one."""
        self.pending: dict[int, list[DroppedSave]] = {}
        """Op that finishes them -> saves that wait for it (note 5)."""
        self.counted: set[tuple[int, int]] = set()
        self.kept: set[int] = set()
        """Storages that are held because the step differs: a saved tensor on them was kept, or a capture holds them (note 6)."""
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
        """Memory of dead results (note 8)."""
        self.loans = Loans()
        self.leaves = LeafCopies()

    def __enter__(self) -> Any:
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
        self.pending = {}
        self.counted = set()
        self.kept = set()
        self.saved = set()
        self.withheld.prune()
        self.strange = set()
        self.forget_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function_mode_is_on():  # an op of autograd's own, which the user's mode does not see
            with torch._C.DisableTorchFunction():
                return self.__torch_dispatch__(func, types, args, kwargs)
        if types and has_subclass(types):
            return of_subclass(func, types, args, kwargs)
        if _functorch_stack() is not None or (_graph_task() != -1 and not self._is_forward()):
            if self.recycler is not None:
                self.recycler.clear()
            return self._unwatched(func, args, kwargs)
        self.stats.num_ops += 1
        place = self.place
        ops = self.program.ops
        if place < len(ops) and ops[place].func is func:
            entry = ops[place]
        else:
            entry = self._find(func)
            if entry is None:
                if func is _DETACH and _graph_task() != -1:  # autograd's own, of what our unpack gave it
                    return func(*args, **(kwargs or {}))
                if self.recycler is not None:
                    self.recycler.trim(0)
                self.stats.num_unknown_ops += 1
                self.stats.differs(f"{func}, which the recorded step does not have here")
                self.last = (self.last[1], func)
                given = set(map(storage_key, tensors_in(args, kwargs)))
                result = self._unwatched(func, args, kwargs)
                made = {storage_key(t) for t in tensors_out(result) if t is not None}
                self.strange.update(key for key in made - given if key is not None)
                return result
        self.last = (self.last[1], func)
        self.place = entry.index + 1
        if entry.is_checked:
            return self._checked(entry, func, args, kwargs)
        result = self._call(entry, func, args, kwargs)
        self.bind(entry.outs, result, made=False)
        return result

    def _call(self, entry: OpEntry, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op, into the memory of dead results where there is some (note 8)."""
        recycler = self.recycler
        if recycler is None or _graph_task() != -1:
            return func(*args, **(kwargs or {}))
        room, into = None, entry.into
        if into is not None:
            geometry = result_geometry(func, args, kwargs)
            room = recycler.take(geometry[0], None, geometry[1]) if geometry is not None else None
        recycler.trim(entry.spare_bytes)
        if room is None or into is None:
            result = func(*args, **(kwargs or {}))
        else:
            self._forget_storage(room)
            self.stats.recycled_bytes += room.nbytes
            result = into(*args, **(kwargs or {}), out=room)
        if entry.makes:
            recycler.lend(result)
        return result

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

    def _unwatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that the recording does not explain."""
        if not mutates(func):
            return func(*args, **(kwargs or {}))
        written = written_tensors(func, args, kwargs)
        self._before_write(written)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._written(written, None)

    def _stop_watching(self) -> None:
        """Prepare for writes that we shall not see, where the user's hooks let plain autograd go on after them (note 9)."""
        if self.withheld.is_used:
            self.withheld.hand_over_all()
            alive = [ref() for ref, _, _ in list(self.ids.values())]
            protect([t for t in alive if t is not None and id(t) not in self.as_they_are])

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Tensors are about to be written."""
        protect(tensors)
        if self.withheld.entries:
            for t in self.withheld.hand_over(tensors):
                self._deviates(t)

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

    def _run(self, window: int) -> WindowRun:
        run = self.runs[window]
        if run is None:
            path, lends = self.program.windows[window].path, self.program.loans.get(window)
            run = WindowRun(path, self.stats, self.namer, loans=self.loans, window=window, lends=lends)
            self.runs[window] = run
        return run

    def _checked(self, entry: OpEntry, func: Any, args: Any, kwargs: Any) -> Any:
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
                captured = self._capture_for_all(entry, Seen(func, seen_args, seen_kwargs, tensors, views, random))
            else:
                self.stats.differs(f"{entry.where} got {len(views)} tensors instead of {len(entry.ins)}")
        try:
            result = self._call(entry, func, args, kwargs)
        except BaseException:
            self._written(written, None)
            raise
        if written:
            self._written(written, captured)
        if entry.unpacks:
            captured = self._packed(entry, result)
        for run, call in captured:
            run.add(call, result)
        if entry.unpacks or captured or not written or (fits and all(views[i] == entry.ins[i] for i in entry.written)):
            self.bind(entry.outs, result, made=bool(captured))
        if entry.finishes:
            for save in self.pending.pop(entry.index, ()):
                if any(run is save.run for run, _ in captured):
                    self._finish(save)
        return result

    def _capture_for_all(self, entry: OpEntry, seen: Seen) -> list[tuple[WindowRun, Call]]:
        """The call as each window that replays it will, where that is possible."""
        captured: list[tuple[WindowRun, Call]] = []
        for use in entry.uses:
            run = self._run(use.window)
            call = self._capture(run, use, entry, seen)
            if call is not None:
                captured.append((run, call))
            else:
                self.stats.differs(f"{entry.where} got other tensors")
        return captured

    def _packed(self, entry: OpEntry, result: Any) -> list[tuple[WindowRun, Call]]:
        """Replays that expand the packed form of a result; none where it has no such form in this step."""
        t = tensors_out(result)[0]
        began = time.perf_counter()
        bits = pack(t) if entry.uses and t is not None else None
        self.stats.packing_seconds += time.perf_counter() - began
        if t is None or bits is None:
            if entry.uses:
                self.stats.differs(f"{entry.where} returned no two values that could be packed")
            return []
        numel = t.untyped_storage().nbytes() // t.element_size()
        found: list[tuple[WindowRun, Call]] = []
        for use in entry.uses:
            run = self._run(use.window)
            if run.is_open:
                arguments = [*bits, numel, t.shape, t.stride(), t.dtype]
                call = Call(expand, arguments, entry.outs, entry.where, spare_bytes=use.spare_bytes)
                found.append((run, call))
        return found

    def _cell(self, run: WindowRun | None, view: int, t: Tensor) -> Cell | None:
        """Where `run` will put the tensor object `t`; None if it does not make it."""
        if run is None:
            return None
        if view in run.made and self.is_itself(t):
            return run.cell(view)
        root = self.program.roots[view]
        geometry = self.geometry(t, root) if root in run.made else None
        return run.cell(view, geometry) if geometry is not None else None

    def _capture(self, run: WindowRun, use: Use, entry: OpEntry, seen: Seen) -> Call | None:
        """The call as one window will replay it; None where that is not possible."""
        if run.calls is None:
            return None
        sources = self._as_recorded(run, use, entry, seen.tensors, seen.views)
        if sources is None and not entry.mutates:
            sources = self._as_given(run, use, seen.func, seen.tensors, seen.views)
        if sources is None:
            return None
        put: list[Any] = []
        held: list[int] = []
        filled: dict[int, tuple[int, Cell | None, Geometry | None]] = {}
        for i, (t, source) in enumerate(zip(seen.tensors, sources, strict=True)):
            if source is LEAF:
                put.append(alias(t))
                held.append(i)
            elif source is SHARED:
                put.append(self.leaves.of(t))
            elif source is COPY:
                put.append(copy_whole(t))
            else:
                put.append(None)
                filled[i] = source[:3]
                if source[3] is not None and source[1] is not None:
                    run.outer.append((source[3], source[1]))
        new_args, new_kwargs, places = skeleton(seen.args, seen.kwargs, put)
        order = list(filled)
        writes = [filled[i] for i in entry.written if i in filled]
        return Call(
            func=seen.func,
            args=new_args,
            kwargs=new_kwargs,
            places=[places[i] for i in order],
            sources=list(filled.values()),
            copies=tuple(order.index(i) for i in use.copies if i in filled),
            owns=[places[i] for i in entry.written if sources[i] is COPY],
            writes=tuple(g.root if g is not None else v for v, cell, g in writes if cell is None),
            holds=[(put[i], version_of(put[i])) for i in held],
            hold_places=[places[i] for i in held],
            outs=entry.outs,
            random=seen.random,
            where=entry.where,
            spare_bytes=use.spare_bytes,
        )

    def _as_recorded(
        self, run: WindowRun, use: Use, entry: OpEntry, tensors: list[Tensor], views: list[int]
    ) -> list[Any] | None:
        """Where a replay will find each argument: LEAF, COPY, SHARED or a `Source`. None where the wiring is not the recorded one."""
        if len(tensors) != len(entry.ins):
            return None
        found: list[Any] = []
        for i, (t, view, expected, kind) in enumerate(zip(tensors, views, entry.ins, use.kinds, strict=True)):
            if kind in (LEAF, COPY, SHARED):
                found.append(kind)
                continue
            if view != expected:
                return None
            source = self._local(run, view, t) if kind == LOCAL else self._outer(use.outer[i], view, t)
            if source is None:
                return None
            found.append(source)
        return found

    def _as_given(
        self, run: WindowRun, use: Use, func: Any, tensors: list[Tensor], views: list[int]
    ) -> list[Any] | None:
        """The same for an op that is wired otherwise (note 6); None where an argument may not be held."""
        found: list[Any] = []
        may_hold = not returns_view(func)  # else a replay that writes to the view would write to what is held
        for t, view in zip(tensors, views, strict=True):
            source = None
            if view >= 0:
                source = self._local(run, view, t)
                window = self.program.windows[use.window].parent
                while source is None and window >= 0:
                    source = self._outer(window, view, t)
                    window = self.program.windows[window].parent
            if source is None:
                source = self._held(t) if may_hold else None
                if source is None:
                    return None
            found.append(source)
        return found

    def _local(self, run: WindowRun, view: int, t: Tensor) -> Source | None:
        """`t` as the run itself makes it; None if it does not."""
        if view in run.made and self.is_itself(t):
            return view, None, None, None
        root = self.program.roots[view]
        geometry = self.geometry(t, root) if root in run.made else None
        return (view, None, geometry, None) if geometry is not None else None

    def _outer(self, window: int, view: int, t: Tensor) -> Source | None:
        """`t` as an enclosing window's run retains it; None if it does not."""
        parent = self.runs[window]
        cell = self._cell(parent, view, t)
        return (view, cell, None, parent) if cell is not None else None

    def _held(self, t: Tensor) -> int | None:
        """How an argument is captured that nothing makes again: LEAF or COPY; None if it may not be held (note 6)."""
        if t.layout is not torch.strided:
            return None
        if t.nbytes <= SMALL_BYTES:
            return COPY
        if t.requires_grad and not t.is_leaf and storage_key(t) not in self.kept:
            return None
        self._deviates(t)
        return LEAF

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
                cell = self._cell(run, view, t) if self.foreign is None or self._may_be_left_out(view, t) else None
                if run is not None and cell is not None:
                    return self._drop(t, view, window, run, cell)
                stats.num_deviations += 1
                self._deviates(t)
        elif not t.is_leaf and t.layout is torch.strided:
            stats.saved_bytes += t.nbytes
            if storage_key(t) in self.strange:
                self._deviates(t)
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
        """Forward is over; notes 7 and 9.

        Args:
            result: what it returned.
            given: its arguments.
        """
        if all(run is None or not run.held for run in self.runs):
            return
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for t in _pytree.tree_leaves(result):
                key = storage_key(t) if isinstance(t, Tensor) else None
                if key is None or key in self.saved or all(run is None or key not in run.held for run in self.runs):
                    continue
                self._deviates(t)
                protect([t])
            if self.withheld.is_used:
                protect([t for t in _pytree.tree_leaves((result, given)) if isinstance(t, Tensor)])

    def _deviates(self, t: Tensor) -> None:
        """Count a tensor that is held because the step differs."""
        key = storage_key(t)
        if key is not None and key not in self.kept:
            self.kept.add(key)
            self.stats.deviation_bytes += t.nbytes

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
        """Whether the user's hooks may be spared a tensor (note 9)."""
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
