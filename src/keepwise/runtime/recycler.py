"""Memory of dead results, held for the next ones (see `reuse`).

Dead memory counts as memory. Handles on dead results are let go, the oldest first, until they are within what the plan leaves free
at this moment (`ir.Spare`); so no peak rises. What is still alive is not counted: its handle costs nothing.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from keepwise.ir import spare
from keepwise.runtime.reuse import use_count

Tensor = torch.Tensor
Handle = tuple[torch.UntypedStorage, int, int]
"""(storage, its address, its bytes). Whoever keeps a handle besides the recycler keeps the memory from being used again."""


class Recycler:
    """Handles on the last results of a piece of work; those that are dead give their memory to the next ones."""

    __slots__ = ("handles", "nbytes", "sizes")

    def __init__(self, sizes: set[int], handles: Iterable[Handle] = ()) -> None:
        self.sizes = sizes
        """Bytes that results may want: what is of another size is not remembered. `take` adds what it is asked for."""
        self.handles: dict[int, Handle] = {handle[1]: handle for handle in handles}
        """Address of the storage -> handle, oldest first. One a storage: some ops return their argument's without saying so."""
        self.nbytes = sum(n for _, _, n in self.handles.values())
        """Of all handles."""

    def clear(self) -> None:
        """Let go of everything."""
        self.handles.clear()
        self.nbytes = 0

    def lend(self, result: Any) -> None:
        """Results were made: their memory may be used again when they are dead."""
        if isinstance(result, Tensor):
            self._lend(result)
        elif type(result) is tuple or type(result) is list:
            for r in result:
                if isinstance(r, Tensor):
                    self._lend(r)

    def _lend(self, t: Tensor) -> None:
        handle = handle_of(t)
        if handle is None or handle[2] not in self.sizes or handle[1] in self.handles:
            return
        if len(self.handles) == spare.MAX_HANDLES:
            self._drop(next(iter(self.handles)))
        self.handles[handle[1]] = handle
        self.nbytes += handle[2]

    def num_handles(self, t: Tensor) -> int:
        """Handles on the storage of a tensor: 0 or 1."""
        return int(t.untyped_storage()._cdata in self.handles)

    def _drop(self, address: int) -> None:
        self.nbytes -= self.handles.pop(address)[2]

    def take(self, shape: Any, stride: Any, dtype: torch.dtype) -> Tensor | None:
        """A tensor over dead memory of exactly that size; None where there is none."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < spare.MIN_BYTES:
            return None
        self.sizes.add(nbytes)
        for handle in reversed(self.handles.values()):  # the latest is the likeliest to be in the caches
            if handle[2] == nbytes and _is_dead(handle):
                self._drop(handle[1])
                t = torch.empty(0, dtype=dtype)
                return t.set_(handle[0], 0, shape, stride) if stride is not None else t.set_(handle[0], 0, shape)  # type: ignore[arg-type]
        return None

    def trim(self, spare_bytes: int) -> None:
        """Let go of dead memory, the oldest first, until it is within what may be held."""
        if self.nbytes <= spare_bytes:
            return
        dead = [handle for handle in self.handles.values() if _is_dead(handle)]
        excess = sum(n for _, _, n in dead) - spare_bytes
        for _, address, n in dead:
            if excess <= 0:
                break
            excess -= n
            self._drop(address)


def handle_of(t: Tensor) -> Handle | None:
    """A handle on the memory of a tensor; None where it is not worth one, or not ours to give."""
    if t.layout is not torch.strided or t.device.type != "cpu" or t.is_nested:
        return None
    storage = t.untyped_storage()
    nbytes = storage.nbytes()
    if nbytes < spare.MIN_BYTES or not storage.resizable():  # memory of somebody else's: a NumPy array, a file
        return None
    return (storage, storage._cdata, nbytes)


def _is_dead(handle: Handle) -> bool:
    """Whether nobody else holds the storage, in C++ or in Python, nor another process, and it is as large as it was."""
    return (
        use_count(handle[1]) == 1
        and sys.getrefcount(handle[0]) == 2
        and handle[0].nbytes() == handle[2]
        and not handle[0].is_shared()
    )


class Loans:
    """Memory of what windows retained, or autograd kept, held for the replay of later windows of the same forward pass."""

    __slots__ = ("__weakref__", "forward", "handles", "task")

    def __init__(self, forward: Recycler | None = None) -> None:
        self.forward = forward
        """What forward held for itself: no use after it."""
        self.handles: dict[int, list[Handle]] = {}
        """Borrower -> handles."""
        self.task = -1

    def take(self, window: int, task: int) -> list[Handle]:
        """What a window may write over."""
        self._begin(task)
        return self.handles.pop(window, [])

    def give(self, window: int, t: Tensor, task: int) -> None:
        """Hold the memory of a tensor for a window; no longer than the pass lasts."""
        self._begin(task)
        handle = handle_of(t)
        lent = self.handles.setdefault(window, [])
        if handle is None or any(handle[1] == address for _, address, _ in lent):
            return
        if self.task != task:
            self.task = task
            weak = weakref.ref(self)

            def end_of_pass() -> None:
                loans = weak()
                if loans is not None:
                    loans.handles.clear()

            torch.autograd.Variable._execution_engine.queue_callback(end_of_pass)
        lent.append(handle)

    def _begin(self, task: int) -> None:
        """A pass is running, so forward is over; what an earlier one left is of no use where that failed."""
        if self.forward is not None:
            self.forward.clear()
        if self.task != task:
            self.handles.clear()
