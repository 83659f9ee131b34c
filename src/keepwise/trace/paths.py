"""Where an op comes from: the module path that is running, and the user's line.

Notes:
1. Global module hooks would be seen by every `torch.compile`d region; a model that has one gets hooks of its own on the modules
   outside of it instead. Either kind is removed without trace.
2. No frame's locals are read: doing so in Python 3.11 and 3.12 keeps the tensors in them alive.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _module

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_INTERNAL = (
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep,
    *(os.path.join(_PACKAGE, room) + os.sep for room in ("trace", "runtime", "session", "verify", "measure")),
)
_internal_code: dict[CodeType, bool] = {}


def source_line() -> str:
    """`file.py:line` of the innermost frame outside of torch and Keepwise; empty if there is none."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        internal = _internal_code.get(code)
        if internal is None:
            name = code.co_filename
            internal = name.startswith(_INTERNAL) or name.startswith("<")
            _internal_code[code] = internal
        if not internal:
            return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_compiled(module: nn.Module) -> bool:
    """Whether a module is a `torch.compile`d region."""
    return getattr(module, "_compiled_call_impl", None) is not None or type(module).__name__ == "OptimizedModule"


def compiled_regions(model: nn.Module) -> tuple[str, ...]:
    """Paths of the `torch.compile`d modules of a model."""
    return tuple(name for name, module in model.named_modules() if is_compiled(module))


class PathTracker:
    """Knows which module of a model is running."""

    def __init__(self, model: nn.Module | None) -> None:
        self._model = model
        self._names = (
            {id(m): name for name, m in model.named_modules(remove_duplicate=True)} if model is not None else {}
        )
        self._stack: list[str] = []
        self._handles: list[Any] = []
        self.on_root: Callable[[bool], None] | None = None
        """Told True when the model's forward begins and False when it ends."""

    @property
    def path(self) -> str:
        """Path of the innermost running module; empty for the model itself and outside of it."""
        return self._stack[-1] if self._stack else ""

    @property
    def depth(self) -> int:
        """Number of modules of the model that are running inside of each other."""
        return len(self._stack)

    def install(self) -> None:
        """Begin to watch (note 1)."""
        if self._model is None:
            return
        compiled = compiled_regions(self._model)
        if not compiled:
            self._handles = [
                _module.register_module_forward_pre_hook(self._enter),
                _module.register_module_forward_hook(self._leave, always_call=True),
            ]
            return
        for m in _outside(self._model, compiled):
            self._handles.append(m.register_forward_pre_hook(self._enter, prepend=True))
            self._handles.append(m.register_forward_hook(self._leave, always_call=True))

    def remove(self) -> None:
        """Stop; nothing stays behind."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._stack = []

    def _enter(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name is not None:
            self._stack.append(name)
            if module is self._model and self._stack.count(name) == 1 and self.on_root is not None:
                self.on_root(True)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        name = self._names.get(id(module))
        if name is None or name not in self._stack:
            return
        while self._stack.pop() != name:
            pass  # A module whose own hooks raised never left.
        if module is self._model and self.on_root is not None and name not in self._stack:
            self.on_root(False)


def _outside(model: nn.Module, compiled: Iterable[str]) -> list[nn.Module]:
    prefixes = tuple(compiled)
    return [
        m
        for name, m in model.named_modules()
        if not any(p == "" or name == p or name.startswith(p + ".") for p in prefixes)
    ]
