"""What the guard captures of a step for replays: calls with their arguments, and the places that their results go to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from keepwise.runtime.ambient import Ambient
from keepwise.runtime.clean import RandomState
from keepwise.runtime.geometry import Geometry
from keepwise.runtime.reuse import Form

Tensor = torch.Tensor


class Cell:
    """Place of one replayed tensor: see note 1 of `replay`."""

    __slots__ = ("__weakref__", "digest", "geometry", "is_lent", "num_readers", "num_reads", "task", "tensor", "view")

    def __init__(self, view: int, geometry: Geometry | None) -> None:
        self.view = view
        self.geometry = geometry
        self.tensor: Tensor | None = None
        self.digest: int | None = None
        self.is_lent = False
        """Whether an inner region reads it."""
        self.num_readers = 0
        self.num_reads = 0
        self.task = -1


class Call:
    """One captured op: the function, its arguments with everything but replayed tensors in place, and how to fill those in."""

    __slots__ = (
        "ambient",
        "args",
        "copies",
        "form",
        "frees",
        "func",
        "grad",
        "hold_places",
        "holds",
        "is_dense",
        "is_view",
        "kwargs",
        "makes",
        "outs",
        "owns",
        "places",
        "random",
        "sources",
        "spare_bytes",
        "where",
        "writes",
    )

    def __init__(
        self,
        func: Any,
        args: list[Any],
        outs: tuple[int, ...],
        where: str,
        kwargs: dict[str, Any] | None = None,
        places: Sequence[tuple[Any, Any]] = (),
        sources: list[tuple[int, Cell | None, Geometry | None]] | None = None,
        copies: tuple[int, ...] = (),
        owns: list[tuple[Any, Any]] | None = None,
        holds: list[tuple[Tensor, int]] | None = None,
        hold_places: list[tuple[Any, Any]] | None = None,
        random: RandomState | None = None,
        writes: tuple[int, ...] = (),
        spare_bytes: int = 0,
    ) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.places = places
        """(container, key) of each argument to fill in, aligned with `sources`."""
        self.sources = sources if sources is not None else []
        """(view id, cell of an outer run or None, geometry or None)."""
        self.copies = copies
        """Indices into `sources` that must be copied before the call because it writes them and an outer run owns them."""
        self.owns = owns if owns is not None else []
        """(container, key) of each argument that was captured by copy and that the call writes."""
        self.holds = holds or []
        """Captured tensors with their versions, for the version check."""
        self.hold_places = hold_places or []
        """Where each of `holds` stands among the arguments."""
        self.outs = outs
        self.random = random
        self.where = where
        self.grad = torch.is_grad_enabled()
        """Whether gradients were recorded: some kernels make more results then."""
        self.ambient: Ambient | None = None
        """Settings that it ran under, where they are not those that its window began with."""
        self.form: Form | None = None
        """How to write the result into given memory, if that is possible."""
        self.is_dense = False
        """What `reuse.is_dense_call` says of it."""
        self.is_view = False
        """Whether its results share the memory of an argument that it does not write."""
        self.makes = False
        """Whether its results have memory of their own, worth using again."""
        self.spare_bytes = spare_bytes
        """Dead memory that may be held while it is replayed."""
        self.frees: tuple[int, ...] = ()
        self.writes = writes
        """Views made by the same run that it writes."""

    def writes_own(self, views: list[int]) -> bool:
        """Whether it writes one of these views, made by its own run."""
        return not set(self.writes).isdisjoint(views)


def set_frees(calls: list[Call], needed: set[int]) -> None:
    """Set on each call which views nobody reads after it; `needed` are read when all calls have run."""
    seen = set(needed)
    for call in reversed(calls):
        frees = []
        for view, cell, geometry in call.sources:
            if cell is not None:
                continue
            key = view if geometry is None else geometry.root
            if key not in seen:
                seen.add(key)
                frees.append(key)
        for view in call.outs:
            if view not in seen:
                seen.add(view)
                frees.append(view)
        call.frees = tuple(frees)
