"""What an op really does: which inputs it writes, whether it draws random numbers, and whether a replay gives the same bits.

Notes:
1. Effects are measured on the real call: inputs are copied first, compared afterwards bit for bit, and the op is run again on
   the copies in the same surroundings as a replay will have. Schemas and version counters count too, but alone they are not
   believed: batch normalisation writes its statistics and shows it in neither.
2. Everything is remembered by signature, so that each distinct op pays once.
3. Results without defined content (`empty`), or with gaps in it, are not compared; the proof compares the gradients that are made
   of them.
4. Ops that talk to other processes or are written in Python are never run twice.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from keepwise.ir import Phase
from keepwise.runtime.calls import device_of, tensors_in, tensors_out, with_tensors
from keepwise.runtime.clean import RandomState, call_with_state, clean, generator_of, is_random
from keepwise.runtime.digest import bytes_of
from keepwise.runtime.geometry import storage_bytes
from keepwise.runtime.special import is_opaque, is_python, replay_arguments, results_with_gaps
from keepwise.trace.flops import flops_of
from keepwise.trace.spill import Geometry, can_spill
from keepwise.trace.timing import Timings
from keepwise.trace.workspace import run_with_workspace

Tensor = torch.Tensor
Price = Callable[[float, Callable[[], float]], float]
"""Seconds of an op from those of a first run and a way to run it again."""

_UNDEFINED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "empty_quantized",
        "resize_",
    )
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Effects:
    """What is known about all ops of one signature."""

    writes: tuple[int, ...] = ()
    """Positions, among the tensor arguments in flattened order, of those written."""
    random: str = ""
    """As `ir.Op.random`."""
    rng_bytes: int = 0
    replayable: bool = True
    why_not: str = ""
    seconds: float | None = None
    """Warm duration; None where only the executions in the step tell."""
    flops: int = 0
    workspace_bytes: int = 0


class Admission:
    """Measures ops when they are first seen and remembers them."""

    def __init__(self, timings: Timings | None = None) -> None:
        """Prepare.

        Args:
            timings: prices that are known, and where new ones go; None: none are known.
        """
        self.timings = timings if timings is not None else Timings(torch.device("cpu"))
        self._known: dict[tuple[str, bool], Effects] = {}
        self._provisional: set[tuple[str, bool]] = set()

    def known(self, signature: str, phase: Phase) -> Effects | None:
        """What an earlier call with this signature showed."""
        return self._known.get((signature, phase is Phase.FORWARD))

    def run(
        self, func: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, signature: str, phase: Phase
    ) -> tuple[Any, float, Effects]:
        """Run an op for real and find out what it does: its result, its duration in seconds and its effects.

        Args:
            func: the op.
            run: what runs it for real.
            args: its arguments.
            kwargs: those by name.
            signature: of this call.
            phase: in which it comes.
        """
        if phase is Phase.FORWARD:
            price = functools.partial(self.timings.price, signature)
            result, seconds, effects = _admit(func, run, args, kwargs, price)
        else:
            result, seconds, effects = _observe(func, run, args, kwargs)
        key = signature, phase is Phase.FORWARD
        self._known[key] = effects
        if effects.workspace_bytes:
            self._provisional.add(key)
        return result, seconds, effects

    def is_provisional(self, signature: str, phase: Phase) -> bool:
        """Whether the workspace has been seen only once: a first execution may allocate what later ones find."""
        return (signature, phase is Phase.FORWARD) in self._provisional

    def again(
        self, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, signature: str, phase: Phase
    ) -> tuple[Any, float, Effects]:
        """Run an op for real and measure its workspace a second time."""
        key = signature, phase is Phase.FORWARD
        result, seconds, workspace = _measured(run, args, kwargs)
        effects = self._known[key]
        if workspace is not None and workspace < effects.workspace_bytes:
            effects = replace(effects, workspace_bytes=workspace)
        self._known[key] = effects
        self._provisional.discard(key)
        return result, seconds, effects


def schema_effects(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Effects:
    """What the schema alone says."""
    return Effects(writes=_schema_writes(func, args, kwargs))


def _schema_writes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    written: set[int] = set()
    fewer, _ = replay_arguments(func, args, kwargs)
    if fewer is not args:
        written.update(id(t) for a, b in zip(args, fewer, strict=True) if a is not b for t in tensors_in((a,), None))
    if schema.is_mutable:
        for i, declared in enumerate(schema.arguments):
            if declared.alias_info is not None and declared.alias_info.is_write:
                given = args[i] if i < len(args) else kwargs.get(declared.name)
                written.update(id(t) for t in tensors_in((given,), None))
    if not written:
        return ()
    return tuple(i for i, t in enumerate(tensors_in(args, kwargs)) if id(t) in written)


def _observe(func: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, Effects]:
    """Time and workspace of an op that will never be replayed."""
    effects = schema_effects(func, args, kwargs)
    result, seconds, workspace = _measured(run, args, kwargs)
    return result, seconds, replace(effects, flops=flops_of(func, args, kwargs, result), workspace_bytes=workspace or 0)


def _measured(run: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, float, int | None]:
    tensors = tensors_in(args, kwargs)
    seconds = 0.0

    def timed() -> Any:
        nonlocal seconds
        _wait(tensors)
        began = time.perf_counter()
        result = run(*args, **kwargs)
        _wait(tensors)
        seconds = time.perf_counter() - began
        return result

    result, workspace = run_with_workspace(timed)
    return result, seconds, workspace


def _admit(
    func: Any, run: Any, args: tuple[Any, ...], kwargs: dict[str, Any], price: Price
) -> tuple[Any, float, Effects]:
    """Note 1."""
    tensors = tensors_in(args, kwargs)
    reason = _unfit(func, tensors)
    if reason:
        result, seconds, effects = _observe(func, run, args, kwargs)
        random = _declared_random(func, args, kwargs, tensors)
        return (
            result,
            seconds,
            replace(effects, replayable=False, why_not=reason, random=random[0], rng_bytes=random[1]),
        )
    generator, own = generator_of(func, args, kwargs, device_of(args, kwargs, tensors))
    state = RandomState(generator, own=own) if generator is not None else None
    try:
        with clean():
            twins = _twins(tensors)
    except torch.OutOfMemoryError:
        result, seconds, effects = _observe(func, run, args, kwargs)
        return result, seconds, replace(effects, replayable=False, why_not="no memory was left to try it")
    versions = [_version(t) for t in tensors]
    result, seconds, workspace = _measured(run, args, kwargs)
    outputs = tensors_out(result)
    random, rng_bytes = "", 0
    if state is not None and generator is not None:
        with clean():
            moved = not torch.equal(generator.get_state(), state.state)
        if moved or own or is_random(func):
            random = "own" if own else str(generator.device)
            rng_bytes = state.state.numel()
    declared = _schema_writes(func, args, kwargs)
    effects = Effects(
        writes=declared,
        random=random,
        rng_bytes=rng_bytes,
        flops=flops_of(func, args, kwargs, result),
        workspace_bytes=workspace or 0,
    )
    aliases = {t.untyped_storage()._cdata for t in tensors}
    if (
        not declared
        and not is_python(func)
        and outputs
        and all(o is not None and can_spill(o) and o.untyped_storage()._cdata in aliases for o in outputs)
    ):
        return result, seconds, _admit_view(func, args, kwargs, tensors, twins, outputs, effects, price)
    with clean():
        written = {
            i
            for i, (t, twin) in enumerate(zip(tensors, twins, strict=True))
            if i in declared or _version(t) != versions[i] or not _same_storage_bytes(t, twin)
        }
    # What another view of the same storage shows as written is written once.
    by_storage = {tensors[i].untyped_storage()._cdata for i in written}
    effects = replace(
        effects, writes=tuple(i for i, t in enumerate(tensors) if t.untyped_storage()._cdata in by_storage)
    )
    if is_python(func):  # note 4: what it does to its inputs is known by now
        return result, seconds, replace(effects, replayable=False, why_not=is_opaque(func))
    return (
        result,
        seconds,
        _replay(func, args, kwargs, tensors, twins, outputs, effects, state if random else None, price),
    )


def _admit_view(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    twins: list[Tensor],
    outputs: list[Tensor | None],
    effects: Effects,
    price: Price,
) -> Effects:
    placed, named = with_tensors(args, kwargs, list(twins))

    def call() -> Any:
        return func(*placed, **named)

    try:
        with clean():
            result, first = _timed(call, twins)
            again = tensors_out(result)
            seconds = price(first, lambda: _timed(call, twins)[1])
    except Exception as error:
        return replace(effects, replayable=False, why_not=f"its replay raised {type(error).__name__}: {_line(error)}")
    twin_of = {t.untyped_storage()._cdata: w.untyped_storage()._cdata for t, w in zip(tensors, twins, strict=True)}
    for a, b in zip(outputs, again, strict=True):
        if a is None or b is None or not _same_geometry(a, b):
            return replace(effects, replayable=False, why_not="its replay returns another view")
        if twin_of[a.untyped_storage()._cdata] != b.untyped_storage()._cdata:
            return replace(effects, replayable=False, why_not="its replay returns no view")
    return replace(effects, seconds=seconds)


def _replay(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tensors: list[Tensor],
    twins: list[Tensor],
    outputs: list[Tensor | None],
    effects: Effects,
    state: RandomState | None,
    price: Price,
) -> Effects:
    placed, named = with_tensors(args, kwargs, list(twins))
    fewer, fewer_named = replay_arguments(func, placed, named)
    left_out = {id(t) for t in twins} - {id(t) for t in tensors_in(fewer, fewer_named)}
    named = fewer_named or {}

    def call() -> Any:
        return func(*fewer, **named) if state is None else call_with_state(func, fewer, named, state)

    try:
        with clean():
            again, first = _timed(call, twins)
            why_not = _difference(func, tensors, twins, outputs, tensors_out(again), effects, left_out)
            del again
            if why_not:
                return replace(effects, replayable=False, why_not=why_not)
            return replace(effects, seconds=price(first, lambda: _timed(call, twins)[1]))
    except Exception as error:
        return replace(effects, replayable=False, why_not=f"its replay raised {type(error).__name__}: {_line(error)}")


def _difference(
    func: Any,
    tensors: list[Tensor],
    twins: list[Tensor],
    outputs: list[Tensor | None],
    again: list[Tensor | None],
    effects: Effects,
    left_out: set[int],
) -> str:
    """Why the replay is not the same; empty if it is."""
    if len(outputs) != len(again):
        return "its replay returns another number of tensors"
    undefined = getattr(func, "_opname", "") in _UNDEFINED
    gaps = results_with_gaps(func)
    for i, (a, b) in enumerate(zip(outputs, again, strict=True)):
        if (a is None) != (b is None):
            return f"its replay returns another result {i}"
        if a is None or b is None:
            continue
        if not can_spill(a) or not can_spill(b):
            return f"its result {i} is a {type(a).__name__} that is not an ordinary strided tensor"
        if not _same_geometry(a, b):
            return f"its replay returns result {i} with another shape, stride or dtype"
        if not undefined and i not in gaps and not same_bytes(a, b):
            return f"its replay returns result {i} with other bits"
    for i in effects.writes:
        if id(twins[i]) not in left_out and not _same_storage_bytes(tensors[i], twins[i]):
            return f"its replay writes other bits into argument {i}"
    return ""


def _timed(call: Callable[[], Any], tensors: list[Tensor]) -> tuple[Any, float]:
    _wait(tensors)
    began = time.perf_counter()
    result = call()
    _wait(tensors)
    return result, time.perf_counter() - began


def _wait(tensors: list[Tensor]) -> None:
    if any(t.device.type == "cuda" for t in tensors):
        torch.cuda.synchronize()


def _unfit(func: Any, tensors: list[Tensor]) -> str:
    """Why an op cannot even be tried."""
    reason = is_opaque(func)
    if reason and not is_python(func):
        return reason
    if func is torch.ops.aten._local_scalar_dense.default:
        return ""
    for i, t in enumerate(tensors):
        if not can_spill(t):
            return f"its argument {i} is a {type(t).__name__} that is not an ordinary strided tensor"
    return ""


def _declared_random(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]
) -> tuple[str, int]:
    if not isinstance(func, torch._ops.OpOverload) or not is_random(func):
        return "", 0
    generator, own = generator_of(func, args, kwargs, device_of(args, kwargs, tensors))
    if generator is None:
        return "", 0
    with _disable_current_modes():
        return ("own" if own else str(generator.device)), generator.get_state().numel()


def _twins(tensors: list[Tensor]) -> list[Tensor]:
    """Copies with the same strides, that share storage where the originals do."""
    storages: dict[int, torch.UntypedStorage] = {}
    twins: dict[int, Tensor] = {}
    for t in tensors:
        if id(t) in twins:
            continue
        storage = t.untyped_storage()
        if storage._cdata not in storages:
            copied = torch.UntypedStorage(storage.nbytes(), device=storage.device)
            copied.copy_(storage, non_blocking=False)
            storages[storage._cdata] = copied
        twins[id(t)] = Geometry(t).on(storages[storage._cdata])
    return [twins[id(t)] for t in tensors]


def _version(t: Tensor) -> int:
    return -1 if t.is_inference() else t._version


def _same_geometry(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and a.stride() == b.stride()
        and a.storage_offset() == b.storage_offset()
        and a.device == b.device
    )


def _same_storage_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(storage_bytes(a.untyped_storage()), storage_bytes(b.untyped_storage()))


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of equal geometry hold the same bits, NaNs and signed zeros included; below autograd only."""
    if a.numel() == 0:
        return True
    return torch.equal(bytes_of(a.detach()), bytes_of(b.detach()))


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else ""
