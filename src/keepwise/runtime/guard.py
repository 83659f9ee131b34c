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
"""

from __future__ import annotations

from typing import Any

import torch

from keepwise.runtime.calls import device_of, has_subclass, mutates, skeleton, tensors_in, written_tensors
from keepwise.runtime.capture import Call, Cell
from keepwise.runtime.clean import RandomState, generator_of
from keepwise.runtime.digest import digest
from keepwise.runtime.geometry import Geometry, copy_whole
from keepwise.runtime.holding import Namer, alias, version_of
from keepwise.runtime.program import COPY, LEAF, LOCAL, OpEntry, Program, Use
from keepwise.runtime.replay import DroppedSave, WindowRun, protect
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.stats import StepStats
from keepwise.runtime.watch import Watch, innermost_hooks, unpack

Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


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

    def restart(self) -> None:
        """A new forward pass begins: nothing of the last one is continued."""
        self.place = 0
        self._new_frame()

    def _new_frame(self) -> None:
        self.runs = [None] * len(self.runs)
        self.pending = {}
        self.counted = set()
        self.forget_all()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_subclass(types):
            return NotImplemented  # the plain ops that it consists of come next
        if _functorch_stack() is not None or (_graph_task() != -1 and not self._is_forward()):
            return self._unwatched(func, args, kwargs)
        self.stats.num_ops += 1
        place = self.place
        ops = self.program.ops
        if place < len(ops) and ops[place].func is func:
            entry = ops[place]
        else:
            entry = self._find(func)
            if entry is None:
                self.stats.num_unknown_ops += 1
                self.last = (self.last[1], func)
                return self._unwatched(func, args, kwargs)
        self.last = (self.last[1], func)
        self.place = entry.index + 1
        if entry.is_checked:
            return self._checked(entry, func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        self.bind(entry.outs, result, made=False)
        return result

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
        for k in places:
            if k >= self.place:
                return self.program.ops[k]
        self._new_frame()
        return self.program.ops[places[0]]

    def _unwatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that the recording does not explain."""
        if not mutates(func):
            return func(*args, **(kwargs or {}))
        written = written_tensors(func, args, kwargs)
        protect(written)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._written(written, None)

    def _written(self, tensors: list[Tensor], captured: list[tuple[WindowRun, Call]] | None) -> None:
        """Note 4: tensors were written, in an op that these runs captured."""
        for t in tensors:
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
            run = WindowRun(self.program.windows[window].path, self.stats, self.namer)
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
            protect(written)
        captured: list[tuple[WindowRun, Call]] = []
        if entry.uses and fits:
            random = None
            if entry.random:
                generator, own = generator_of(func, args, kwargs, device_of(args, kwargs, tensors))
                random = RandomState(generator, own=own) if generator is not None else None
            for use in entry.uses:
                run = self._run(use.window)
                call = self._capture(run, use, entry, func, seen_args, seen_kwargs, tensors, views, random)
                if call is not None:
                    captured.append((run, call))
        try:
            result = func(*args, **(kwargs or {}))
        except BaseException:
            self._written(written, None)
            raise
        if written:
            self._written(written, captured)
        for run, call in captured:
            run.add(call, result)
        if captured or not written or (fits and all(views[i] == entry.ins[i] for i in entry.written)):
            self.bind(entry.outs, result, made=bool(captured))
        if entry.finishes:
            for save in self.pending.pop(entry.index, ()):
                if any(run is save.run for run, _ in captured):
                    self._finish(save)
        return result

    def _cell(self, run: WindowRun | None, view: int, t: Tensor) -> Cell | None:
        """Where `run` will put the tensor object `t`; None if it does not make it."""
        if run is None:
            return None
        if view in run.made and self.is_itself(t):
            return run.cell(view)
        root = self.program.roots[view]
        geometry = self.geometry(t, root) if root in run.made else None
        return run.cell(view, geometry) if geometry is not None else None

    def _capture(
        self,
        run: WindowRun,
        use: Use,
        entry: OpEntry,
        func: Any,
        args: Any,
        kwargs: Any,
        tensors: list[Tensor],
        views: list[int],
        random: RandomState | None,
    ) -> Call | None:
        """The call as one window will replay it; None where its wiring is not the recorded one."""
        if run.calls is None:
            return None
        roots = self.program.roots
        outer: list[tuple[WindowRun, Cell]] = []
        fill: dict[int, tuple[int, Cell | None, Geometry | None]] = {}
        holds: list[tuple[Tensor, int]] = []
        put: list[Any] = []
        for i, (t, view, expected, kind) in enumerate(zip(tensors, views, entry.ins, use.kinds, strict=True)):
            if kind == LEAF:
                held = alias(t)
                put.append(held)
                holds.append((held, version_of(held)))
                continue
            if kind == COPY:
                put.append(copy_whole(t))
                continue
            if view != expected:
                return None
            put.append(None)
            if kind == LOCAL:
                geometry = None
                if view not in run.made or not self.is_itself(t):
                    geometry = self.geometry(t, roots[view]) if roots[view] in run.made else None
                    if geometry is None:
                        return None
                fill[i] = (view, None, geometry)
            else:
                parent = self.runs[use.outer[i]]
                cell = self._cell(parent, view, t)
                if parent is None or cell is None:
                    return None
                outer.append((parent, cell))
                fill[i] = (view, cell, None)
        new_args, new_kwargs, places = skeleton(args, kwargs, put)
        hold_places = [places[i] for i, kind in enumerate(use.kinds) if kind == LEAF]
        filled = [i for i in range(len(put)) if i in fill]
        run.outer.extend(outer)
        own = [places[i] for i in entry.written if use.kinds[i] == COPY]
        writes = [fill[i] for i in entry.written if i in fill]
        return Call(
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            places=[places[i] for i in filled],
            sources=[fill[i] for i in filled],
            copies=tuple(filled.index(i) for i in use.copies if i in fill),
            owns=own,
            writes=tuple(g.root if g is not None else v for v, cell, g in writes if cell is None),
            holds=holds,
            hold_places=hold_places,
            outs=entry.outs,
            random=random,
            where=entry.where,
        )

    def pack(self, t: Tensor) -> Any:
        """Hook: drop the tensor if the plan does and its replay is complete, else keep it."""
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
                cell = self._cell(run, view, t)
                if run is not None and cell is not None:
                    return self._drop(t, view, window, run, cell)
                stats.num_deviations += 1
                stats.deviation_bytes += program.nbytes[view]
        elif not t.is_leaf and t.layout is torch.strided:
            stats.saved_bytes += t.nbytes
        return self.keep(t)

    def _drop(self, t: Tensor, view: int, window: int, run: WindowRun, cell: Cell) -> DroppedSave:
        save = DroppedSave(run, cell, t)
        finisher = self.program.finished_by.get(view, -1)
        if finisher >= self.place:
            save.pending = self.keep(t)  # note 5
            self.pending.setdefault(finisher, []).append(save)
        elif self.stats.auditing:
            with torch._C._DisableTorchDispatch():
                cell.digest = digest(t)
        self.stats.num_dropped += 1
        root = self.program.roots[view]
        if (window, root) not in self.counted:
            self.counted.add((window, root))
            self.stats.dropped_bytes += self.program.nbytes[view]
        return save

    def _finish(self, save: DroppedSave) -> None:
        kept, save.pending = save.pending, None
        if self.stats.auditing:
            with torch._C._DisableTorchDispatch():
                save.cell.digest = digest(kept.unpack())


__all__ = ["Guard", "Watch", "unpack"]
