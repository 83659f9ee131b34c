"""`checkpoint` and `checkpoint_sequential`: drop-ins for `torch.utils.checkpoint` that never run user code twice.

The ops of the region are captured as they run; backward replays those of them that its saved tensors need, from the region's
inputs. Hooks, counters, buffers and random draws happen once; Batch normalisation statistics move once; a region may
use any generator.

Notes:
1. Whatever is not made by the region's own ops is captured by reference: inputs, parameters, tensors in closures.
2. In a region inside a region, what the outer one makes is not captured but replayed by the outer one first, as nested
   checkpoints should.
3. A selective policy (`create_selective_checkpoint_contexts`) is asked once an op; what it wants saved is not bound as a result of
   the region, so that readers capture it and autograd keeps it.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from keepwise._errors import UsageError
from keepwise.runtime.calls import has_subclass, skeleton, tensors_in, tensors_out
from keepwise.runtime.clean import RandomState, generator_of, is_random
from keepwise.runtime.guard import Watch, unpack
from keepwise.runtime.holding import alias, version_of
from keepwise.runtime.replay import Call, Cell, DroppedSave, Geometry, WindowRun, copy_whole
from keepwise.runtime.special import replay_arguments
from keepwise.runtime.stats import StepStats

Tensor = torch.Tensor
_local = threading.local()
_graph_task = torch._C._current_graph_task_id


@functools.cache
def _written(func: Any) -> frozenset[int]:
    """Positions of schema arguments that an op writes."""
    return frozenset(
        i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write
    )


class Region(Watch):
    """Captures every op of one call of the checkpointed function."""

    def __init__(self, name: str, policy: Callable[..., bool] | None) -> None:
        super().__init__(StepStats(), None)
        self.run = WindowRun(name, self.stats, None, slicing=True)
        self.policy = policy
        self.num_views = 0
        self.outer: Region | None = getattr(_local, "region", None)

    def __enter__(self) -> Any:
        result = super().__enter__()
        _local.region = self
        return result

    def __exit__(self, *exc: Any) -> None:
        _local.region = self.outer
        super().__exit__(*exc)
        self.outer = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and has_subclass(types):
            return NotImplemented
        if _graph_task() != -1 and not torch.is_grad_enabled():
            return func(*args, **(kwargs or {}))
        seen_args, seen_kwargs = replay_arguments(func, args, kwargs)
        tensors = tensors_in(seen_args, seen_kwargs)
        call = self._capture(func, args, kwargs, seen_args, seen_kwargs, tensors)
        result = func(*args, **(kwargs or {}))
        if self.policy is not None and not func._schema.is_mutable and self.policy(func, *args, **(kwargs or {})):
            return result  # note 3
        self._number(call, tensors, result)
        self.bind(call.outs, result)
        self.run.add(call, result)
        return result

    def _capture(
        self, func: Any, args: Any, kwargs: Any, seen_args: Any, seen_kwargs: Any, tensors: list[Tensor]
    ) -> Call:
        random = None
        if is_random(func):
            generator, own = generator_of(func, args, kwargs, tensors[0].device if tensors else torch.device("cpu"))
            random = RandomState(generator, own=own) if generator is not None else None
        written: set[int] = set()
        if func._schema.is_mutable:
            names = _written(func)
            marked = [a for i, a in enumerate(args) if i in names] + [
                v for k, v in (kwargs or {}).items() if any(func._schema.arguments[i].name == k for i in names)
            ]
            targets = {id(t) for t in tensors_in(tuple(marked), None)}
            written = {i for i, t in enumerate(tensors) if id(t) in targets}
            for i in written:
                self.run.protect(tensors[i])
        put: list[Any] = []
        holds: list[tuple[Tensor, int]] = []
        held_at: list[int] = []
        sources: list[tuple[int, Cell | None, Geometry | None]] = []
        sources_at: list[int] = []
        copies: list[int] = []
        for i, t in enumerate(tensors):
            view = self.view_of(t)
            if view >= 0:
                sources.append((view, None, None))
                sources_at.append(i)
                put.append(None)
                continue
            cell = self._outer_cell(t)
            if cell is not None:
                if i in written:
                    copies.append(len(sources))
                sources.append((-1, cell, None))
                sources_at.append(i)
                put.append(None)
            elif i in written:
                put.append(copy_whole(t))
            else:
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
            copies=tuple(copies),
            holds=holds,
            hold_places=[places[i] for i in held_at],
            outs=(),
            random=random,
            where=f"{func} in {self.run.path}",
        )
        call.writes = tuple(sources[k][0] for k, i in enumerate(sources_at) if i in written)
        return call

    def _outer_cell(self, t: Tensor) -> Cell | None:
        """Note 2."""
        outer = self.outer
        if outer is None or outer.run.calls is None:
            return None
        view = outer.view_of(t)
        cell = outer.run.cell(view, t, view) if view >= 0 else None
        if cell is not None:
            self.run.outer.append((outer.run, cell))
        return cell

    def _number(self, call: Call, tensors: list[Tensor], result: Any) -> None:
        """Give the results view ids, and say which storages they share with arguments."""
        groups = self.run.groups
        by_storage = {
            t.untyped_storage()._cdata: self.view_of(t)
            for t in tensors
            if t.layout is torch.strided and self.view_of(t) >= 0
        }
        outs = []
        for t in tensors_out(result):
            if t is None:
                outs.append(-1)
                continue
            view = self.view_of(t)
            if view < 0:
                view = self.num_views
                self.num_views += 1
                shared = by_storage.get(t.untyped_storage()._cdata, -1) if t.layout is torch.strided else -1
                groups[view] = groups[shared] if shared >= 0 else view
            outs.append(view)
        if call.func._schema.is_mutable and not outs:
            outs = [-1]
        call.outs = tuple(outs)

    def pack(self, t: Tensor) -> Any:
        """Hook: drop what the region made, keep what it was given."""
        view = self.view_of(t)
        if view >= 0 and type(t) in (Tensor, nn.Parameter):
            cell = self.run.cell(view, t, view)
            if cell is not None:
                return DroppedSave(self.run, cell)
        cell = self._outer_cell(t)
        if cell is not None:
            assert self.outer is not None
            return DroppedSave(self.outer.run, cell)
        return self.keep(t)


def checkpoint(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` without keeping what it saves for backward; backward replays the recorded ops.

    The arguments are those of `torch.utils.checkpoint.checkpoint`. Without a function it returns a decorator:
    `@keepwise.checkpoint()`.

    Args:
        function: what to run; any arguments and results.
        *args: passed on.
        use_reentrant: accepted for both values; there is one mechanism here, and it needs no input that requires grad.
        context_fn: contexts of `create_selective_checkpoint_contexts`: their policy decides what is kept. Other contexts: the first
            is entered around the call, the second is never needed because no user code runs again.
        determinism_check: `"default"` or `"none"`; replays repeat recorded ops, so shapes and order cannot differ.
        debug: accepted; errors name the op and its arguments in any case.
        early_stop: accepted; a replay always ends with the last op that is needed.
        preserve_rng_state: random draws are always those of forward. False changes nothing.
        **kwargs: passed on.

    Returns:
        What `function` returns, unchanged in type and structure.

    Raises:
        UsageError: an argument is not of its form.
    """
    if determinism_check not in ("default", "none"):
        raise UsageError(f"determinism_check must be 'default' or 'none', got {determinism_check!r}")
    if use_reentrant:
        warnings.warn("keepwise.checkpoint has one mechanism; use_reentrant=True changes nothing", stacklevel=2)
    options: dict[str, Any] = {"context_fn": context_fn}
    if function is None:
        if args:
            raise UsageError(
                "keepwise.checkpoint() without a function is a decorator and takes no positional arguments"
            )

        def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(f)
            def call(*a: Any, **k: Any) -> Any:
                return _run(f, a, k, **options)

            return call

        return decorate
    if not callable(function):
        raise UsageError(f"keepwise.checkpoint needs a callable, got {type(function).__name__}")
    return _run(function, args, kwargs, **options)


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], tuple[Any, Any]] | None,
) -> Any:
    if (
        not torch.is_grad_enabled()
        or torch.is_inference_mode_enabled()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.compiler.is_compiling()
    ):
        return function(*args, **kwargs)
    policy, context = None, None
    if context_fn is not None:
        context = context_fn()[0]
        asked = getattr(context, "policy_fn", None)
        if asked is not None:
            policy, context = _policy(asked), None
    name = getattr(function, "__qualname__", type(function).__name__)
    with Region(name, policy):
        if context is None:
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)


def _policy(asked: Any) -> Callable[..., bool]:
    """A selective policy as a yes or no: whether the op's results are kept."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    try:
        context = SelectiveCheckpointContext(is_recompute=False)
    except TypeError:  # the signature grew an argument in later releases
        context = SelectiveCheckpointContext(is_recompute=False, op_output=None)  # type: ignore[call-arg]

    def keeps(func: Any, *args: Any, **kwargs: Any) -> bool:
        answer = asked(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return answer
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    return keeps


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a list of functions one after the other in `segments` checkpointed segments, the last one left alone.

    Args:
        functions: an `nn.Sequential` or a sequence of callables of one argument.
        segments: number of segments, at least 1.
        input: argument of the first function.
        use_reentrant: as in `checkpoint`.
        **kwargs: `preserve_rng_state` and the other options of `checkpoint`.

    Raises:
        UsageError: fewer than one segment, or an unknown option.
    """
    unknown = set(kwargs) - {"preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
    if unknown:
        raise UsageError(f"checkpoint_sequential has no option {', '.join(sorted(unknown))}")
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if segments < 1:
        raise UsageError(f"segments must be at least 1, got {segments}")
    segments = min(segments, max(len(steps), 1))
    size = len(steps) // segments

    def chain(first: int, last: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for step in steps[first:last]:
                x = step(x)
            return x

        return forward

    x = input
    at = 0
    for _ in range(segments - 1):
        x = checkpoint(chain(at, at + size), x, use_reentrant=use_reentrant, **kwargs)
        at += size
    return chain(at, len(steps))(x)


__all__ = ["Region", "checkpoint", "checkpoint_sequential", "unpack"]
