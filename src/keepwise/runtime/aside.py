"""Hooks on saved tensors step aside where PyTorch forbids them.

`torch.func.grad`, `vjp`, `vmap` and `torch.autograd.graph.disable_saved_tensors_hooks` refuse to begin while hooks are active.
Inside a model that works plainly they must work under a plan, so ours are taken off for as long as hooks are forbidden and
put back afterwards; what is saved in between is held by autograd itself.

User code that takes off a pair of its own which lies below ours (entered before forward, left in it) means that one, not ours.

The functions of PyTorch that switch hooks off and on, and the one that pops a pair, are wrapped, once for the process. Where the
innermost hooks are not ours the wrappers do what they wrap and nothing else. What was taken off is remembered for each thread, as the
hooks themselves are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from keepwise.runtime.hooks import innermost_hooks, pop, push

ours: Any = None
"""The unpack hook by which our pairs are known; set by `watch`."""

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_local = threading.local()
_lock = threading.Lock()
_wrapper: Any = None


def install() -> None:
    """Wrap PyTorch's functions, unless they are wrapped."""
    global _wrapper
    if _autograd._saved_tensors_hooks_disable is _wrapper:
        return
    with _lock:
        if _autograd._saved_tensors_hooks_disable is not _wrapper:
            disable, enable = _wrapped(_autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable)
            _autograd._saved_tensors_hooks_enable = enable
            _autograd._pop_saved_tensors_default_hooks = _pops_the_users
            _autograd._saved_tensors_hooks_disable = _wrapper = disable


def _wrapped(disable: Callable[..., None], enable: Callable[..., None]) -> tuple[Callable[..., None], ...]:
    def step_aside(*args: Any, **kwargs: Any) -> None:
        taken = _take_off()
        try:
            disable(*args, **kwargs)
        except BaseException:
            _put_back(taken)
            raise
        if taken:
            _local.taken = taken

    def step_in(*args: Any, **kwargs: Any) -> None:
        enable(*args, **kwargs)
        taken, _local.taken = getattr(_local, "taken", []), []
        _put_back(taken)

    return step_aside, step_in


def _take_off() -> list[tuple[Any, Any]]:
    """Pop our pairs from the top of the stack, the innermost first."""
    taken: list[tuple[Any, Any]] = []
    while True:
        top = innermost_hooks()
        if top is None or top[1] is not ours:
            return taken
        taken.append((top[0], top[1]))
        pop()


def _pops_the_users() -> None:
    taken = _take_off()
    try:
        pop()
    finally:
        if taken:
            taken[-1][0].__self__.lies_on(innermost_hooks())
        _put_back(taken)


def _put_back(taken: list[tuple[Any, Any]]) -> None:
    for pack, unpack in reversed(taken):
        push(pack, unpack)
