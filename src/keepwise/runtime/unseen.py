"""Functions of ours that run inside of the user's compiled ones, and that a compiler must not look into.

Where `torch.compile` gives a frame up and runs it as it is, it still tries to compile every Python function that is called in it:
our hooks among them, whose insides it cannot follow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

F = TypeVar("F", bound=Callable[..., Any])


def unseen(function: F) -> F:
    """Decorator: neither the function nor what it calls is ever compiled. Torch's compiler is not loaded for it."""
    compiler: Any = getattr(torch._C, "_dynamo", None)
    dynamo: Any = getattr(compiler, "eval_frame", None)
    action = getattr(dynamo, "_FrameAction", None)
    if action is not None:
        skip = dynamo._FrameExecStrategy(action.SKIP, action.SKIP)
        dynamo.set_code_exec_strategy(function.__code__, skip)
    return function
