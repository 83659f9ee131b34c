"""What is written down while a step runs, before it becomes the document."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from keepwise.ir import NO_OP, Phase
from keepwise.runtime.hooks import Hooks
from keepwise.trace.admission import Effects
from keepwise.trace.spill import Copy, Geometry
from keepwise.trace.values import Incarnation, StorageDraft

Tensor = torch.Tensor


@dataclass(slots=True, eq=False, kw_only=True)
class Visit:
    """One execution of an autograd node."""

    key: object
    name: str
    began: int
    """Clock when it was first seen."""
    first: int = NO_OP
    last: int = NO_OP
    saves: list[int] = field(default_factory=list)
    """Saved tensors that it unpacked."""
    released: bool = False
    """Whether it has let go of one of them."""


@dataclass(slots=True, eq=False, kw_only=True)
class OpDraft:
    """What becomes an `ir.Op`."""

    target: str
    phase: Phase
    signature: str
    inputs: list[int] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    is_view: bool = False
    effects: Effects | None = None
    why_not: str = ""
    overwrites: bool = False
    seconds: float = 0.0
    """Of this one execution."""
    path: str = ""
    source: str = ""
    visit: Visit | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class SaveDraft:
    """What becomes an `ir.Save`."""

    value: int
    at: int
    storage: StorageDraft
    visits: list[Visit] = field(default_factory=list)
    released: int | None = None
    """Clock when autograd let go."""
    in_forward: bool = False
    """Whether it was unpacked while the model's forward ran, or by a backward that builds a graph."""
    path: str = ""
    source: str = ""


class Saved:
    """What autograd holds instead of a saved tensor."""

    __slots__ = ("__weakref__", "copy", "foreign", "geometry", "incarnation", "index", "kept")

    def __init__(self, index: int, incarnation: Incarnation) -> None:
        self.index = index
        self.incarnation = incarnation
        self.kept: Tensor | None = None
        """The tensor itself, where it is held anyway or cannot be copied away."""
        self.copy: Copy | None = None
        self.geometry: Geometry | None = None
        self.foreign: tuple[Hooks, Any] | None = None
        """What the user's own hooks made of it, and how they undo that."""


class Visits:
    """Tells the executions of autograd nodes apart.

    Nothing holds a node: it would hold its saved tensors. Its address alone may be used again by the next one, hence the
    sequence number.
    """

    def __init__(self) -> None:
        self.current: Visit | None = None

    def at(self, node: Any, clock: int) -> Visit:
        """The visit of the node that runs now."""
        number = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1
        key = (id(node), number, torch._C._current_graph_task_id())
        if self.current is None or self.current.key != key:
            self.current = Visit(key=key, name=_name_of(node), began=clock)
        return self.current


def _name_of(node: Any) -> str:
    """`MmBackward0`; nodes of compiled code have no name in old versions of PyTorch."""
    try:
        return node.name()
    except RuntimeError:
        return type(node).__name__


def current_node() -> Any:
    """The autograd node that runs now; None outside of backward."""
    if torch._C._current_graph_task_id() == -1:
        return None
    return torch._C._current_autograd_node()


WeakTensor = weakref.ref[Tensor]
