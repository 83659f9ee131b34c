"""Backward passes that compute as they do without us, where a dispatch mode that is on would change that.

PyTorch has gradient formulas that look whether any dispatch mode is on, and then go another way, whose rounding may differ: the product
of `prod` by zeros found or without looking for them, the sum over what was filled by `masked_fill` with a tensor. Inside of `with plan:`
our mode is on until the step ends. In a step that runs such an op, it is taken off while the engine runs, as it always is where a plan
watches the model's forward alone. What the pass does meanwhile to tensors that we know is then unknown: all of them are forgotten, so
that what is saved of them later is kept.

The function through which PyTorch's Python code starts the engine is wrapped, once for the process, when such an op is first seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from keepwise.runtime.beneath import our_modes_off

_aten: Any = torch.ops.aten
_MODULES: tuple[Any, ...] = (torch.autograd, torch.autograd.graph)
_NAME = "_engine_run_backward"

BY_MODE = frozenset(
    (
        _aten.prod.default,
        _aten.prod.dim_int,
        _aten.cumprod.default,
        _aten.cumprod_.default,
        _aten.masked_fill.Tensor,
        _aten.masked_fill_.Tensor,
        _aten.max.default,
        _aten.min.default,
        _aten.median.default,
        _aten.nanmedian.default,
    )
)
"""Ops with such a formula. Found by comparing the gradients of all samples in PyTorch's own operator database with and without a mode that
does nothing, and by reading the formulas; `tests/runtime/test_passes.py` repeats the first."""

_lock = threading.Lock()


def install() -> None:
    """Wrap PyTorch's function, unless it is wrapped."""
    if hasattr(getattr(torch.autograd, _NAME), "is_of_keepwise"):
        return
    with _lock:
        for module in _MODULES:
            run = getattr(module, _NAME)
            if not hasattr(run, "is_of_keepwise"):
                setattr(module, _NAME, _wrapped(run))


def _wrapped(run: Callable[..., Any]) -> Callable[..., Any]:
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        modes: list[Any] = _get_current_dispatch_mode_stack()
        # A mode of the user's is on in the plain step, too, and one that records wants to see the pass.
        if not all(hasattr(mode, "look_away") for mode in modes) or not any(mode.looks_away for mode in modes):
            return run(*args, **kwargs)
        for mode in modes:
            mode.look_away()
        try:
            with our_modes_off():
                return run(*args, **kwargs)
        finally:
            for mode in modes:
                mode.look_away()

    run_backward.is_of_keepwise = True  # type: ignore[attr-defined]
    return run_backward
