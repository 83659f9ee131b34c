"""Where an op comes from: the module path that is running, and the user's line.

Notes:
1. Global module hooks would be seen by every `torch.compile`d region; a model that has one gets hooks of its own on the modules
   outside of it instead. Either kind is removed without trace.
2. No frame's locals are read: doing so in Python 3.11 and 3.12 keeps the tensors in them alive.
3. Torch tells a module's hooks of an `Exception` in forward, not of a KeyboardInterrupt. Who is still running is therefore read off
   the Python stack: the frame that called our hook is there, at the height where it was, or the module has been left.
4. Modules that run in other threads are not looked at: their ops are not seen either.
5. The user's line is looked for within the step only, up to the frame that runs it: who called `fit` made no op. A model of torch's own
   modules alone has no line of the user's.
"""

from __future__ import annotations

import enum
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as _module

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
_INTERNAL = (
    _TORCH,
    "<",
    *(os.path.join(_PACKAGE, room) + os.sep for room in ("trace", "runtime", "session", "integrations")),
)
_OUTERMOST = os.path.join(_PACKAGE, "trace", "record.py")


class _Frame(enum.Enum):
    """What a frame on the Python stack says about where an op comes from (note 5)."""

    USER = enum.auto()
    MODULE = enum.auto()
    INTERNAL = enum.auto()
    OUTSIDE = enum.auto()


@functools.cache
def _kind_of(filename: str) -> _Frame:
    if filename == _OUTERMOST:
        return _Frame.OUTSIDE
    if filename.startswith(_MODULES):
        return _Frame.MODULE
    return _Frame.INTERNAL if filename.startswith(_INTERNAL) else _Frame.USER


def source_line() -> str:
    """`file.py:line` of the user's innermost frame in the step, else of torch's innermost module; empty if there is neither."""
    frame = sys._getframe(2)
    module = ""
    while frame is not None:
        filename = frame.f_code.co_filename
        kind = _kind_of(filename)
        if kind is _Frame.USER:
            return f"{os.path.basename(filename)}:{frame.f_lineno}"
        if kind is _Frame.OUTSIDE:
            break
        if kind is _Frame.MODULE and not module:
            module = f"torch/nn/modules/{os.path.basename(filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return module


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
        self._stack: list[_Entry] = []
        self._thread = threading.get_ident()
        self._handles: list[Any] = []
        self.on_root: Callable[[bool], None] | None = None
        """Told True when the model's forward begins and False when it ends."""

    @property
    def path(self) -> str:
        """Path of the innermost running module; empty for the model itself and outside of it."""
        return self._stack[-1].name if self._stack else ""

    def is_running(self) -> bool:
        """Whether a module of the model is running in this thread (note 3)."""
        return bool(self._stack) and threading.get_ident() == self._thread and self._stack[0].is_on(_frames())

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
        if torch.compiler.is_compiling():  # in a compiled function; what comes next would break its graph
            return
        name = self._names.get(id(module))
        if name is None or threading.get_ident() != self._thread:
            return
        frames = _frames()
        while self._stack and not self._stack[-1].is_on(frames):
            self._pop(self._stack[-1].name)
        caller = len(frames) - 2
        self._stack.append(_Entry(name, module is self._model, caller, frames[caller]))
        if module is self._model and self._num_roots() == 1 and self.on_root is not None:
            self.on_root(True)

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling():
            return
        name = self._names.get(id(module))
        if name is None or threading.get_ident() != self._thread:
            return
        if any(entry.name == name for entry in self._stack):
            self._pop(name)

    def _pop(self, name: str) -> None:
        """Take off the innermost entry of that name, and what lies on it: a module whose own hooks raised never left."""
        roots = self._num_roots()
        while self._stack.pop().name != name:
            pass
        if roots and not self._num_roots() and self.on_root is not None:
            self.on_root(False)

    def _num_roots(self) -> int:
        return sum(entry.is_root for entry in self._stack)


class _Entry(NamedTuple):
    """A module that is running: where on the Python stack the frame lies that called our hook."""

    name: str
    is_root: bool
    height: int
    frame: int

    def is_on(self, frames: list[int]) -> bool:
        """Note 3."""
        return self.height < len(frames) and frames[self.height] == self.frame


def _frames() -> list[int]:
    """Identities of the frames of this thread, the outermost first, without that of this function."""
    found: list[int] = []
    frame = sys._getframe(1)
    while frame is not None:
        found.append(id(frame))  # the frames themselves would be a cycle through the caller's locals
        frame = frame.f_back
    found.reverse()
    return found


def _outside(model: nn.Module, compiled: Iterable[str]) -> list[nn.Module]:
    prefixes = tuple(compiled)
    return [
        m
        for name, m in model.named_modules()
        if not any(p == "" or name == p or name.startswith(p + ".") for p in prefixes)
    ]
