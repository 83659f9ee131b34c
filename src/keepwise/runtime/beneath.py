"""What lies beneath our dispatch modes runs as it would without them.

Notes:
1. Most ops come to us from inside a function that the user's function modes have seen, and those are off by then. Some do not: what
   PyTorch hands to no function mode (`Tensor.set_`, what autograd calls). Then function modes are on, and see what the user's
   dispatch modes beneath us call, as they do plainly. They must not see that we call the op: the mode beneath is called as the
   dispatcher would call it. (The dispatcher has an entry that function modes do not see, but it takes no numbers for tensors.)
2. The user's hooks on saved tensors are called by our hooks, while all dispatch modes are on. The user's own modes see what they do;
   ours do not, as that is no part of the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _pop_mode_temporarily,
    _push_mode,
)

_c: Any = torch._C
_num_modes: Any = _c._len_torch_dispatch_stack
_is_on_for_subclasses: Any = _c._is_torch_function_enabled
_function_mode_is_on: Any = _c._is_torch_function_mode_enabled


class Beneath:
    """An op that a dispatch mode of ours was called with while function modes were on, as it is called from there (note 1)."""

    __slots__ = ("for_subclasses", "func", "types")

    def __init__(self, func: Any, types: Any) -> None:
        """To be made before function modes are switched off; `types` are those that the mode was told."""
        self.func = func
        self.types = types
        self.for_subclasses = _is_on_for_subclasses()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """What the user's innermost mode beneath ours returns, or the op."""
        func = self.func
        # modes for functions have seen a higher-order operator where it was called
        if not _num_modes() or isinstance(func, HigherOrderOperator):
            with _c.DisableTorchFunction():
                return func(*args, **kwargs)
        subclasses = contextlib.nullcontext() if self.for_subclasses else _c.DisableTorchFunctionSubclass()
        with _pop_mode_temporarily() as mode, _c._EnableTorchFunction(), subclasses:
            below: Any = mode
            return below.__torch_dispatch__(func, self.types, args, kwargs)


def beneath(handler: Callable[..., Any]) -> Callable[..., Any]:
    """The `__torch_dispatch__` of a mode of ours (note 1).

    Args:
        handler: `(mode, func, types, run, args, kwargs)`; it calls `run`, which is `func` or a `Beneath`, where it runs the op.
    """

    @functools.wraps(handler)
    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _function_mode_is_on():
            return handler(mode, func, types, func, args, kwargs)
        run = Beneath(func, types)
        with _c.DisableTorchFunction():
            return handler(mode, func, types, run, args, kwargs)

    return dispatch


@contextlib.contextmanager
def our_modes_off() -> Iterator[None]:
    """Only the user's dispatch modes are on (note 2)."""
    modes = _get_current_dispatch_mode_stack()
    if not any(_is_ours(mode) for mode in modes):
        yield
        return
    with _disable_current_modes():
        others = [mode for mode in modes if not _is_ours(mode)]
        num_pushed = 0
        try:
            for mode in others:
                _push_mode(mode)
                num_pushed += 1
            yield
        finally:
            for _ in range(num_pushed):
                _pop_mode()


def _is_ours(mode: Any) -> bool:
    return getattr(mode, "is_of_keepwise", False)


__all__ = ["beneath", "our_modes_off"]
