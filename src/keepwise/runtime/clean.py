"""Where replays run: no gradients, no autocast, no user modes, and randomness from captured states.

Notes:
1. Recorded ops lie below autograd and below autocast, so replaying them under either would apply it twice.
2. User dispatch modes saw the op in forward; a replay is no user op and must not reach them.
3. Ops with a generator argument replay from a private generator, and so do those that have a sibling with one (`rand_like`). The
   rest (fused kernels) draw from the default generator of the device, which is set and put back under one process-wide lock.
4. Recorded ops also lie below the layer that remembers what a view is a view of. Above it, a view of a dead tensor would keep that
   object alive, and with it a holder of memory that could be used again. Other ops are replayed above it, as it counts versions.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

_AUTOCAST_KEYS = [
    getattr(torch._C.DispatchKey, name)
    for name in (
        "AutocastCPU",
        "AutocastCUDA",
        "AutocastXPU",
        "AutocastHPU",
        "AutocastXLA",
        "AutocastMPS",
        "AutocastPrivateUse1",
    )
    if hasattr(torch._C.DispatchKey, name)
]
_NO_AUTOCAST = torch._C.DispatchKeySet(_AUTOCAST_KEYS[0])
for _key in _AUTOCAST_KEYS[1:]:
    _NO_AUTOCAST = _NO_AUTOCAST | torch._C.DispatchKeySet(_key)

_VIEWS = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)

DEFAULT_GENERATOR_LOCK = threading.RLock()


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Everything inside runs below autograd and autocast and outside all modes."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST),
    ):
        yield


def call_view(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an op that returns a view, which is to hold the memory and not the tensor that it was made of (note 4)."""
    with torch._C._ExcludeDispatchKeyGuard(_VIEWS):
        return func(*args, **kwargs)


def default_generator(device: torch.device) -> torch.Generator | None:
    """The generator that ops on `device` draw from when none is given; None where the device has none."""
    if device.type == "cpu":
        return torch.default_generator
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return None


def is_random(func: Any) -> bool:
    """Whether the schema's tags say that the op draws random numbers; False for whatever has none (higher-order operators)."""
    return torch.Tag.nondeterministic_seeded in getattr(func, "tags", ())


def takes_generator(func: torch._ops.OpOverload) -> bool:
    """Whether the op has a `generator` argument."""
    return any(a.name == "generator" for a in func._schema.arguments)


@functools.cache
def _with_generator(func: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The overload that takes a generator and otherwise what `func` takes; None where there is none."""
    if takes_generator(func):
        return func

    def others(overload: torch._ops.OpOverload) -> list[tuple[str, str, bool]]:
        return [(a.name, str(a.type), a.kwarg_only) for a in overload._schema.arguments if a.name != "generator"]

    packet = func.overloadpacket
    siblings = [getattr(packet, name) for name in packet.overloads()]
    return next((s for s in siblings if takes_generator(s) and others(s) == others(func)), None)


class RandomState:
    """State of one generator, captured just before an op drew from it."""

    __slots__ = ("device", "own", "state")

    def __init__(self, generator: torch.Generator, *, own: bool) -> None:
        self.device = generator.device
        self.state = generator.get_state()
        self.own = own


def generator_of(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any] | None, device: torch.device
) -> tuple[torch.Generator | None, bool]:
    """The generator that a call draws from, and whether the caller gave it."""
    for a in (*args, *(kwargs or {}).values()):
        if isinstance(a, torch.Generator):
            return a, True
    return default_generator(device), False


def call_with_state(
    func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], random: RandomState
) -> Any:
    """Run a random op from a captured generator state; leaves every other generator as it was (note 3)."""
    drawing = _with_generator(func)
    if drawing is not None:
        private = torch.Generator(random.device)
        private.set_state(random.state)
        names = [a.name for a in drawing._schema.arguments if not a.kwarg_only]
        at = names.index("generator") if "generator" in names else len(args)
        if at < len(args):
            args = (*args[:at], private, *args[at + 1 :])
        else:
            kwargs = {**kwargs, "generator": private}
        return drawing(*args, **kwargs)
    generator = default_generator(random.device)
    assert generator is not None
    with DEFAULT_GENERATOR_LOCK:
        before = generator.get_state()
        try:
            generator.set_state(random.state)
            return func(*args, **kwargs)
        finally:
            generator.set_state(before)
