"""How a running call is captured: where its replay will find each of its arguments.

Notes:
1. A capture is taken from *this very step*: literals, leaves and generator states are those of the running op, never the
   recorded ones. What the recording supplies is which ops belong to a replay and how they are wired.
2. Where an op that only reads is wired otherwise than recorded (a mask in some batches only, a skipped layer), it is captured with
   what it really got: an argument that its run makes is made again, any other is held, like a leaf. Held is only what plain
   autograd could not let be overwritten either, or what records no gradient: else a write after forward would raise here and not there.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch

from keepwise.runtime.calls import returns_view, skeleton, storage_key, tensors_out
from keepwise.runtime.capture import Call, Cell
from keepwise.runtime.clean import RandomState
from keepwise.runtime.geometry import SMALL_BYTES, Geometry, copy_whole
from keepwise.runtime.holding import Namer, alias, version_of
from keepwise.runtime.leaves import LeafCopies
from keepwise.runtime.packing import pack
from keepwise.runtime.packing import unpack as expand
from keepwise.runtime.program import COPY, LEAF, LOCAL, SHARED, OpEntry, Program, Use
from keepwise.runtime.recycler import Loans
from keepwise.runtime.replay import WindowRun
from keepwise.runtime.reuse import is_dense_call
from keepwise.runtime.stats import StepStats
from keepwise.runtime.watch import Watch

Tensor = torch.Tensor

Source = tuple[int, Cell | None, Geometry | None, WindowRun | None]
"""View id, the cell of an enclosing run, where the view lies over another one, that run."""


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


class Wiring(Watch):
    """Captures calls for the runs of windows; what it knows of tensors is `Watch`'s."""

    def __init__(self, program: Program, stats: StepStats, namer: Namer | None) -> None:
        super().__init__(stats, namer)
        self.program = program
        self.runs: list[WindowRun | None] = [None] * len(program.windows)
        self.kept: set[int] = set()
        """Storages that are held because the step differs: a saved tensor on them was kept, or a capture holds them (note 2)."""
        self.loans = Loans()
        self.leaves = LeafCopies()

    def deviates(self, t: Tensor) -> None:
        """Count a tensor that is held because the step differs."""
        key = storage_key(t)
        if key is not None and key not in self.kept:
            self.kept.add(key)
            self.stats.deviation_bytes += t.nbytes

    def run(self, window: int) -> WindowRun:
        """The run of a window in this frame, new if there is none yet."""
        run = self.runs[window]
        if run is None:
            path, lends = self.program.windows[window].path, self.program.loans.get(window)
            run = WindowRun(path, self.stats, self.namer, loans=self.loans, window=window, lends=lends)
            self.runs[window] = run
        return run

    def capture(self, entry: OpEntry, seen: Seen) -> list[tuple[WindowRun, Call]]:
        """The call as each window that replays it will, where that is possible."""
        captured: list[tuple[WindowRun, Call]] = []
        for use in entry.uses:
            run = self.run(use.window)
            call = self._captured(run, use, entry, seen)
            if call is not None:
                captured.append((run, call))
            else:
                self.stats.differs(f"{entry.where} got other tensors")
        return captured

    def capture_packed(self, entry: OpEntry, result: Any) -> list[tuple[WindowRun, Call]]:
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
            run = self.run(use.window)
            if run.is_open:
                arguments = [*bits, numel, t.shape, t.stride(), t.dtype]
                call = Call(expand, arguments, entry.outs, entry.where, spare_bytes=use.spare_bytes)
                found.append((run, call))
        return found

    def _captured(self, run: WindowRun, use: Use, entry: OpEntry, seen: Seen) -> Call | None:
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
        call = Call(
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
        call.is_dense = is_dense_call(seen.func, seen.args, seen.kwargs)
        return call

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
        """The same for an op that is wired otherwise (note 2); None where an argument may not be held."""
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
        cell = self.cell(parent, view, t)
        return (view, cell, None, parent) if cell is not None else None

    def cell(self, run: WindowRun | None, view: int, t: Tensor) -> Cell | None:
        """Where `run` will put the tensor object `t`; None if it does not make it."""
        if run is None:
            return None
        if view in run.made and self.is_itself(t):
            return run.cell(view)
        root = self.program.roots[view]
        geometry = self.geometry(t, root) if root in run.made else None
        return run.cell(view, geometry) if geometry is not None else None

    def _held(self, t: Tensor) -> int | None:
        """How an argument is captured that nothing makes again: LEAF or COPY; None if it may not be held (note 2)."""
        if t.layout is not torch.strided:
            return None
        if t.nbytes <= SMALL_BYTES:
            return COPY
        if t.requires_grad and not t.is_leaf and storage_key(t) not in self.kept:
            return None
        self.deviates(t)
        return LEAF
