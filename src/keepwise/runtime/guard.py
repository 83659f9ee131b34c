"""The op guard: watches the ops of a step, captures what replays will need, and decides what each saved tensor becomes.

Notes:
1. A capture is taken from *this very step*: literals, leaves and generator states are those of the running op, never the
   recorded ones. What the recording supplies is which ops belong to a replay and how they are wired. The wiring is compared
   for every op that is replayed or that writes in place. Other ops only have to have the right name: what a replay reads of
   their results is captured as it is, so it cannot be wrong.
2. A save is dropped if its window's run captured everything that makes it. Else it is kept: a step that takes another
   branch, has another shape or op, loses memory and never correctness.
3. Where an op is not the expected one, the last three functions are looked up in the recording to find the way back. Going back in
   the recording (a loop body, another micro-batch) begins a new frame: all windows get new runs.
4. An op that writes in place and does not match closes every run of the frame: what it wrote may be a replay's result.
5. A tensor can be saved before it is written (RReLU's noise). It is kept until the op that finishes it has been captured.
6. Hooks on saved tensors do not stack: only the innermost pair sees a tensor. The user's own hooks inside the model win; around it,
   ours come first and pass on what they keep.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from keepwise.runtime.calls import has_subclass, skeleton, tensors_in, tensors_out
from keepwise.runtime.clean import RandomState, generator_of
from keepwise.runtime.digest import digest
from keepwise.runtime.holding import ForeignSave, KeptSave, Namer, alias, version_of
from keepwise.runtime.program import COPY, LEAF, LOCAL, OpEntry, Program, Use
from keepwise.runtime.replay import Call, Cell, DroppedSave, Geometry, WindowRun, copy_whole
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.stats import StepStats

Tensor = torch.Tensor
_graph_task = torch._C._current_graph_task_id
_ref = weakref.ref


class Watch(TorchDispatchMode):
    """What the guard of a plan and the recorder of `checkpoint` share: identities of tensors, and hooks on saved tensors."""

    supports_higher_order_operators: ClassVar[bool] = True

    def __init__(self, stats: StepStats, namer: Namer | None) -> None:
        super().__init__()
        self.stats = stats
        self.namer = namer
        self.ids: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """id of a tensor object -> (the object, its view id)."""
        self.foreign: tuple[Callable[[Tensor], object], Callable[[object], Tensor]] | None = None

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Compiled submodules stay compiled under it."""
        return True

    def __enter__(self) -> Any:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        self.foreign = (top[0], top[1]) if top is not None else None
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, unpack)
        try:
            return super().__enter__()
        except BaseException:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            raise

    def __exit__(self, *exc: Any) -> None:
        try:
            super().__exit__(*exc)
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self.ids.clear()

    @contextlib.contextmanager
    def on_top(self) -> Iterator[None]:
        """Our hooks innermost again, where the user's own were pushed inside `with plan:` around the model: note 6."""
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is None or top[1] is unpack:
            yield
            return
        outer, self.foreign = self.foreign, (top[0], top[1])
        torch._C._autograd._push_saved_tensors_default_hooks(self.pack, unpack)
        try:
            yield
        finally:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self.foreign = outer

    def view_of(self, t: Tensor) -> int:
        """View id of a tensor object that was made or bound in this frame; -1 if unknown."""
        entry = self.ids.get(id(t))
        if entry is not None and entry[0]() is t:
            return entry[1]
        return -1

    def bind(self, outs: tuple[int, ...], result: Any) -> None:
        """Remember the results of an op."""
        ids = self.ids
        if isinstance(result, Tensor):
            if outs:
                ids[id(result)] = (_ref(result), outs[0])
            return
        for view, t in zip(outs, tensors_out(result), strict=False):
            if t is not None and view >= 0:
                ids[id(t)] = (_ref(t), view)

    def pack(self, t: Tensor) -> Any:
        """Hook: what autograd holds instead of a saved tensor."""
        raise NotImplementedError

    def keep(self, t: Tensor) -> KeptSave | ForeignSave:
        """Hold a saved tensor as plain autograd would."""
        if self.foreign is not None:
            self.stats.foreign_bytes += t.nbytes if t.layout is torch.strided else 0
            with torch._C._DisableTorchDispatch():
                detached = t.detach() if t.requires_grad and not t.is_leaf else t
            return ForeignSave(self.foreign[0](detached), self.foreign[1])
        return KeptSave(t, self.namer)


def unpack(saved: KeptSave | DroppedSave | ForeignSave) -> Tensor:
    """Hook: the saved tensor again."""
    return saved.unpack()


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
        if len(self.ids) > 4 * len(self.program.ops) + 64:
            self.ids = {k: e for k, e in self.ids.items() if e[0]() is not None}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_subclass(types):
            return NotImplemented  # the plain ops that it consists of come next
        if _graph_task() != -1 and not self._is_forward():
            return func(*args, **(kwargs or {}))
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
                if func._schema.is_mutable:
                    self._close_all()
                    self.protect(tensors_in(args, kwargs))
                return func(*args, **(kwargs or {}))
        self.last = (self.last[1], func)
        if entry.uses or entry.written:
            result = self._checked(entry, func, args, kwargs)
        else:
            result = func(*args, **(kwargs or {}))
        self.place = entry.index + 1
        self.bind(entry.outs, result)
        return result

    @staticmethod
    def _is_forward() -> bool:
        """Whether an op inside of a backward pass belongs to a graph that is being built (`create_graph`) under our hooks."""
        if not torch.is_grad_enabled():
            return False
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return top is not None and top[1] is unpack

    def _find(self, func: Any) -> OpEntry | None:
        """Note 3: where the recording has the last three functions, nearest ahead first."""
        places = self.program.trails.get((*self.last, func))
        if not places:
            return None
        ahead = [k for k in places if k >= self.place]
        if ahead:
            return self.program.ops[ahead[0]]
        self._new_frame()
        return self.program.ops[places[0]]

    def _close_all(self) -> None:
        for run in self.runs:
            if run is not None:
                run.closed = True
        self.pending = {}

    def protect(self, tensors: list[Tensor]) -> None:
        """Copy what replays captured of tensors that are about to be written."""
        for run in self.runs:
            if run is not None and run.held:
                for t in tensors:
                    run.protect(t)

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
        if entry.written and (
            len(views) != len(entry.ins)
            or any(views[i] != entry.ins[i] and self._is_made(views[i]) for i in entry.written)
        ):
            self._close_all()  # note 4
        if entry.written:
            self.protect(tensors_in(args, kwargs))
        captured: list[tuple[WindowRun, Call]] = []
        if entry.uses and len(views) == len(entry.ins):
            random = None
            if entry.random:
                generator, own = generator_of(func, args, kwargs, tensors[0].device if tensors else torch.device("cpu"))
                random = RandomState(generator, own=own) if generator is not None else None
            for use in entry.uses:
                run = self._run(use.window)
                call = self._capture(run, use, entry, func, seen_args, seen_kwargs, tensors, views, random)
                if call is not None:
                    captured.append((run, call))
                elif entry.written:
                    run.closed = True
        result = func(*args, **(kwargs or {}))
        for run, call in captured:
            run.add(call, result)
        if entry.finishes:
            for save in self.pending.pop(entry.index, ()):
                if any(run is save.run for run, _ in captured):
                    self._finish(save)
        return result

    def _is_made(self, view: int) -> bool:
        root = self.program.roots.get(view, view)
        return any(run is not None and (view in run.made or root in run.made) for run in self.runs)

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
        if run.closed or run.calls is None:
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
                if view in run.made:
                    fill[i] = (view, None, None)
                elif roots[view] in run.made and not t.is_conj() and not t.is_neg():
                    fill[i] = (view, None, Geometry(t, roots[view]))
                else:
                    return None
            else:
                parent = self.runs[use.outer[i]]
                cell = parent.cell(view, t, roots[view]) if parent is not None else None
                if parent is None or cell is None:
                    return None
                outer.append((parent, cell))
                fill[i] = (view, cell, None)
        new_args, new_kwargs, places = skeleton(args, kwargs, put)
        hold_places = [places[i] for i, kind in enumerate(use.kinds) if kind == LEAF]
        filled = [i for i in range(len(put)) if i in fill]
        run.outer.extend(outer)
        return Call(
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            places=[places[i] for i in filled],
            sources=[fill[i] for i in filled],
            copies=tuple(filled.index(i) for i in use.copies if i in fill),
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
        view = self.view_of(t)
        if view >= 0:
            program = self.program
            stats.saved_bytes += t.nbytes
            window = program.drops.get((self.place, view))
            if window is None:
                window = program.drops_by_view.get(view)
            if window is not None:
                run = self.runs[window]
                root = program.roots[view]
                cell = run.cell(view, t, root) if run is not None else None
                if run is not None and cell is not None:
                    return self._drop(t, view, root, window, run, cell)
                stats.num_deviations += 1
                stats.deviation_bytes += program.nbytes[view]
        elif not t.is_leaf and t.layout is torch.strided:
            stats.saved_bytes += t.nbytes
        return self.keep(t)

    def _drop(self, t: Tensor, view: int, root: int, window: int, run: WindowRun, cell: Cell) -> DroppedSave:
        save = DroppedSave(run, cell)
        finisher = self.program.finished_by.get(view, -1)
        if finisher >= self.place:
            save.pending = self.keep(t)  # note 5
            self.pending.setdefault(finisher, []).append(save)
        elif self.stats.auditing:
            with torch._C._DisableTorchDispatch():
                cell.digest = digest(t)
        self.stats.num_dropped += 1
        if (window, root) not in self.counted:
            self.counted.add((window, root))
            self.stats.dropped_bytes += self.program.nbytes[view]
        return save

    def _finish(self, save: DroppedSave) -> None:
        kept, save.pending = save.pending, None
        if self.stats.auditing:
            save.cell.digest = digest(kept.unpack())


__all__ = ["Guard", "Watch", "unpack"]
