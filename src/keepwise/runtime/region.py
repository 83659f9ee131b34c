"""`Region`: captures every op of one call of a checkpointed function, so that backward can replay them.

Notes:
1. Whatever is not made by the region's own ops is captured by reference: inputs, parameters, tensors in closures.
2. In a region inside a region, what the outer one makes is not captured but replayed by the outer one first, as nested
   checkpoints should.
3. A selective policy (`create_selective_checkpoint_contexts`) is asked once an op; what it wants saved is not captured, so that
   readers capture its results and autograd keeps them. The same holds for ops that must not run twice.
4. A write in place is replayed on private memory. What lies on a written storage without sharing that private memory (another
   view of a parameter, an alias made by `.data`) is forgotten: who reads it later captures it as it is then.
5. An inner region that read something of this one must not see what is written to it afterwards: its cell is frozen.
6. Small tensors that need no gradient (buffers, indices) are captured by copy: they may be written legally before backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from keepwise.runtime.beneath import beneath
from keepwise.runtime.calls import (
    device_of,
    has_subclass,
    mutates,
    skeleton,
    storage_key,
    tensors_in,
    tensors_out,
    written_tensors,
)
from keepwise.runtime.capture import Call, Cell
from keepwise.runtime.clean import RandomState, generator_of, is_random
from keepwise.runtime.geometry import SMALL_BYTES, Geometry, copy_whole
from keepwise.runtime.holding import alias, version_of
from keepwise.runtime.replay import DroppedSave, WindowRun, protect
from keepwise.runtime.special import is_opaque, replay_arguments
from keepwise.runtime.stats import StepStats
from keepwise.runtime.watch import Watch, of_subclass

Tensor = torch.Tensor
_local = threading.local()
_graph_task = torch._C._current_graph_task_id
_functorch_stack: Any = torch._C._functorch.peek_interpreter_stack  # type: ignore[attr-defined]


class Region(Watch):
    """Captures every op of one call of the checkpointed function."""

    def __init__(self, name: str, policy: Callable[..., bool] | None) -> None:
        super().__init__(StepStats(), None)
        self.run = WindowRun(name, self.stats, None, slicing=True)
        self.policy = policy
        self.num_views = 0
        self.outer: Region | None = getattr(_local, "region", None)
        self.borders: dict[int, _Border] = {}
        """View over something that this replay does not own -> how it came to be."""

    def __enter__(self) -> Any:
        result = super().__enter__()
        _local.region = self
        return result

    def __exit__(self, *exc: Any) -> None:
        _local.region = self.outer
        super().__exit__(*exc)
        self.outer = None

    @beneath
    def __torch_dispatch__(self, func: Any, types: Any, run: Any, args: Any, kwargs: Any) -> Any:
        if types and has_subclass(types):
            return of_subclass(run, types, args, kwargs)
        kwargs = kwargs or {}
        seen_args, seen_kwargs = replay_arguments(func, args, kwargs)
        tensors = tensors_in(seen_args, seen_kwargs)
        written = written_tensors(func, args, kwargs) if mutates(func) else []
        if written:
            self._before_write(written)
        call, borders = None, {}
        if self._captures(func, args, kwargs):
            call, borders = self._capture(func, args, kwargs, seen_args, seen_kwargs, tensors, written)
        try:
            result = run(*args, **kwargs)
        except BaseException:
            self._after_write(written, None)
            raise
        self._after_write(written, call)
        if call is not None:
            self._number(call, tensors, borders, result)
            self.bind(call.outs, result, made=True)
            self.run.add(call, result)
        return result

    def _captures(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not self.run.is_open or is_opaque(func) or _functorch_stack() is not None:
            return False
        if _graph_task() != -1 and not torch.is_grad_enabled():
            return False
        # note 3
        return self.policy is None or mutates(func) or not self.policy(func, *args, **kwargs)

    def _before_write(self, tensors: list[Tensor]) -> None:
        """Notes 4 and 5."""
        protect(tensors)
        for t in tensors:
            key = storage_key(t)
            for ref, view in self.lying.get(key, ()) if key is not None else ():
                self.run.freeze(view, ref())

    def _after_write(self, tensors: list[Tensor], call: Call | None) -> None:
        """Forget what lies on written storages, except what the call wrote in the replay as well (note 4)."""
        groups = self.run.groups
        kept = {groups[view] for view in call.writes} if call is not None else set()
        for t in tensors:
            for view in self.views_on(t):
                if groups[view] not in kept:
                    self.run.made.discard(view)

    def made_view(self, t: Tensor) -> int:
        """View id of an object that the region's replay has; -1 if it has not."""
        view = self.view_of(t)
        return view if view in self.run.made and self.is_itself(t) else -1

    def _capture(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        seen_args: Any,
        seen_kwargs: Any,
        tensors: list[Tensor],
        written: list[Tensor],
    ) -> tuple[Call | None, dict[int | None, _Border]]:
        """The call as backward will replay it, and by storage which of its arguments the replay does not own.

        No call where what it writes cannot be written in a replay.
        """
        random = None
        if is_random(func):
            generator, own = generator_of(func, args, kwargs, device_of(args, kwargs, tensors))
            random = RandomState(generator, own=own) if generator is not None else None
        targets = {id(t) for t in written}
        put: list[Any] = []
        holds: list[tuple[Tensor, int]] = []
        held_at: list[int] = []
        sources: list[tuple[int, Cell | None, Geometry | None]] = []
        sources_at: list[int] = []
        owns: list[int] = []
        writes: list[int] = []
        borders: dict[int | None, _Border] = {}
        for i, t in enumerate(tensors):
            is_written = id(t) in targets
            view, geometry = self.made_view(t), None
            if view < 0 and is_written:
                view, geometry = self._root(t)
                if view < 0 and self._is_shared(t):
                    return None, {}
            if view >= 0:
                if is_written:
                    writes.append(view)
                    self._make_private(view)
                sources.append((view, None, geometry))
                sources_at.append(i)
                put.append(None)
                continue
            cell = None if is_written else self._outer_cell(t)
            if cell is not None:
                borders[storage_key(t)] = _Border(source=len(sources))
                sources.append((-1, cell, None))
                sources_at.append(i)
                put.append(None)
            elif is_written:
                put.append(copy_whole(t))
                owns.append(i)
            elif _may_move(t):
                put.append(copy_whole(t))
            else:
                borders[storage_key(t)] = _Border(hold=len(holds))
                held = alias(t)
                put.append(held)
                holds.append((held, version_of(held)))
                held_at.append(i)
        new_args, new_kwargs, places = skeleton(seen_args, seen_kwargs, put)
        call = Call(
            func=func,
            args=new_args,
            kwargs=new_kwargs,
            places=[places[i] for i in sources_at],
            sources=sources,
            copies=(),
            owns=[places[i] for i in owns],
            holds=holds,
            hold_places=[places[i] for i in held_at],
            outs=(),
            random=random,
            where=f"{func} in {self.run.path}",
            writes=tuple(writes),
        )
        for border in borders.values():
            border.call = call
        return call, borders

    def _root(self, t: Tensor) -> tuple[int, Geometry | None]:
        """A living object of the replay over which an unknown alias lies (one made by `.data`)."""
        key = storage_key(t)
        for _, view in self.lying.get(key, ()) if key is not None else ():
            if view in self.run.made:
                geometry = self.geometry(t, view)
                if geometry is not None:
                    return view, geometry
        return -1, None

    def _is_shared(self, t: Tensor) -> bool:
        return any(view in self.run.made for view in self.views_on(t))

    def _make_private(self, view: int) -> None:
        """A view over something that the replay does not own is written: let the replay copy that first."""
        border = self.borders.pop(self.run.groups[view], None)
        if border is None or border.call is None:
            return
        if border.source >= 0:
            border.call.copies = (*border.call.copies, border.source)
        else:
            border.call.owns = [*border.call.owns, border.call.hold_places[border.hold]]

    def _outer_cell(self, t: Tensor) -> Cell | None:
        """Note 2."""
        outer = self.outer
        if outer is None:
            return None
        view = outer.made_view(t)
        cell = outer.run.cell(view) if view >= 0 else None
        if cell is not None:
            cell.is_lent = True
            self.run.outer.append((outer.run, cell))
        return cell

    def _number(self, call: Call, tensors: list[Tensor], borders: dict[int | None, _Border], result: Any) -> None:
        """Give the results view ids, and say which storages they share with arguments."""
        groups = self.run.groups
        shared = {storage_key(t): view for t in tensors if (view := self.made_view(t)) >= 0}
        outs = []
        for t in tensors_out(result):
            if t is None:
                outs.append(-1)
                continue
            view = self.made_view(t)
            if view < 0:
                view = self.num_views
                self.num_views += 1
                key = storage_key(t)
                groups[view] = groups[shared[key]] if key is not None and key in shared else view
                if groups[view] == view and key is not None and key in borders:
                    self.borders[view] = borders[key]
            outs.append(view)
        call.outs = tuple(outs)

    def dropped(self, t: Tensor) -> DroppedSave | None:
        """A handle on the replay of what the region made; None for what it was given."""
        if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not self.passes_on:
            view = self.made_view(t)
            cell = self.run.cell(view) if view >= 0 else None
            if cell is not None:
                return DroppedSave(self.run, cell, t)
            outer = self.outer
            view = outer.made_view(t) if outer is not None else -1
            cell = outer.run.cell(view) if outer is not None and view >= 0 else None
            if outer is not None and cell is not None:
                return DroppedSave(outer.run, cell, t)
        return None


@dataclass(slots=True)
class _Border:
    """An argument of a captured call that the replay shares with others."""

    call: Call | None = None
    source: int = -1
    """Index into its sources, where it belongs to the enclosing region."""
    hold: int = -1
    """Index into its holds, where it was captured by reference."""


def _may_move(t: Tensor) -> bool:
    """Whether a captured tensor may legally be written before the replay, and is small enough to be copied (note 6)."""
    return (
        not t.requires_grad and t.layout is torch.strided and t.nbytes <= SMALL_BYTES // 16
    )  # a copy for every op that reads it
