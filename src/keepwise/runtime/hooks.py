"""Which hooks on saved tensors are innermost, for all versions of PyTorch.

PyTorch tells since 2.7. Before, the two functions through which every pair is pushed and popped are wrapped, and the pairs of each
thread remembered beside PyTorch's own stack, from the import of this module on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
_top: Any = getattr(_autograd, "_top_saved_tensors_default_hooks", None)


class Shadow(threading.local):
    """The pairs that this thread has pushed and not popped."""

    def __init__(self) -> None:
        self.stack: list[Hooks] = []

    def install(self, module: Any) -> None:
        """Wrap `module`'s functions that push and pop."""
        push, pop = module._push_saved_tensors_default_hooks, module._pop_saved_tensors_default_hooks

        def pushing(pack: Any, unpack: Any) -> None:
            push(pack, unpack)
            self.stack.append((pack, unpack))

        def popping() -> None:
            pop()
            if self.stack:  # else it was pushed before we were there
                self.stack.pop()

        module._push_saved_tensors_default_hooks, module._pop_saved_tensors_default_hooks = pushing, popping

    def innermost(self) -> Hooks | None:
        """The pair that sees what this thread saves now."""
        return self.stack[-1] if self.stack else None


def _told() -> Hooks | None:
    top = _top(False)
    return (top[0], top[1]) if top is not None else None


if _top is None:
    _shadow = Shadow()
    _shadow.install(_autograd)

innermost_hooks: Callable[[], Hooks | None] = _told if _top is not None else _shadow.innermost  # pyright: ignore[reportPossiblyUnboundVariable]
"""The pair that sees what is saved now; None if there is none."""


push: Callable[[Any, Any], None] = _autograd._push_saved_tensors_default_hooks
"""Put a pair on top."""

pop: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
"""Take the top pair off, whoever's it is (see `aside` for what the user's own code calls)."""
