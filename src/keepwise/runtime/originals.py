"""Custom Functions see the parameter that they saved, not a stand-in for it.

Without hooks on saved tensors, `ctx.saved_tensors` gives back a saved leaf as the very object that forward had: a `Parameter`, with
the attributes that people put on it (`weight.main_grad`, into which fused products accumulate) and a key of their dictionaries.
Under hooks of any kind autograd makes a new tensor of what `unpack` returns. That new tensor has the gradient accumulator of the leaf,
which knows the leaf: `ctx.saved_tensors` is made to look there. Where no hooks are active it finds what it would have returned.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from keepwise.runtime.unseen import unseen

Tensor = torch.Tensor

_base: Any = torch._C._FunctionBase  # type: ignore[attr-defined]
_given: Any = _base.saved_tensors.__get__
_view: Any = torch._C.TensorBase.view_as


@unseen
def _saved_tensors(ctx: Any) -> tuple[Tensor | None, ...]:
    found = _given(ctx)
    with torch._C.DisableTorchFunction():
        if any(type(t) is Tensor and t.requires_grad and t.is_leaf for t in found):
            return tuple(_original(t) for t in found)
    return found


def _original(t: Any) -> Any:
    """The leaf whose gradient accumulator `t` has; `t` itself if it is no such leaf."""
    if type(t) is not Tensor or not t.requires_grad or not t.is_leaf:
        return t
    with torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = _view(t, t).grad_fn
    accumulator = node.next_functions[0][0] if node is not None else None
    return getattr(accumulator, "variable", t)


def install() -> None:
    """Have `ctx.saved_tensors` give originals back, in the whole process; once is enough."""
    if "saved_tensors" not in vars(BackwardCFunction):
        BackwardCFunction.saved_tensors = property(_saved_tensors)  # type: ignore[assignment,method-assign]
