"""One plan for all ranks of a model in `DistributedDataParallel`.

Ranks that plan alone time their ops differently and may drop different tensors: right, but each step then waits for the slowest plan.
Worse, what `fit` does next may depend on what a rank saw (memory that is free, a replay that differs), and a rank that makes one
step more than the others waits for their gradients for ever. So the first rank's prices count for all, and so do the least budget
and everybody's doubts.

A model that is not wrapped (yet) says nothing about other processes: nothing is exchanged then. What DDP will allocate when it is
wrapped is counted: a set of buckets as large as the gradients, unless it is told that gradients shall lie in them.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

import msgspec
import torch
from torch import nn

from keepwise._units import show_bytes
from keepwise.ir import NO_OP, Category, Step, Storage


class Ranks:
    """The processes that train one model together; this one alone if it is not wrapped."""

    def __init__(self, model: nn.Module) -> None:
        self.group: Any = None
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        if several and isinstance(model, nn.parallel.DistributedDataParallel):
            self.group = model.process_group
        self.unwrapped = several and torch.distributed.get_world_size() > 1 and not holds_ddp(model)
        """Whether it is one of several processes, and nothing says how they train together."""

    def gathered(self, mine: Any) -> list[Any]:
        """Everybody's value, the first rank's first."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * torch.distributed.get_world_size(self.group)
        torch.distributed.all_gather_object(found, mine, self.group)
        return found

    def agree(self, flag: bool) -> bool:
        """Whether it is so for everybody."""
        return all(self.gathered(flag))

    def least(self, limit: int | None) -> int | None:
        """The smallest of all limits; None: nobody has one."""
        least = min(math.inf if n is None else n for n in self.gathered(limit))
        return None if least == math.inf else int(least)

    def union(self, storages: frozenset[int]) -> frozenset[int]:
        """What anybody names."""
        return frozenset().union(*self.gathered(storages))

    def first_text(self, text: str) -> str:
        """The text of the first rank that has one; empty if none has."""
        return next(filter(None, self.gathered(text)), "")

    def with_first_prices(self, step: Step) -> tuple[Step, str]:
        """The step with the seconds of the first rank.

        Returns:
            The step, and a note where the ranks recorded different ops and each keeps its own prices; else an empty text.
        """
        if self.group is None:
            return step, ""
        structure = hashlib.sha256()
        for op in step.ops:
            structure.update(f"{op.target} {op.inputs} {op.outputs}".encode())
        seconds = step.seconds, [op.seconds for op in step.ops], [s.pack_seconds for s in step.storages]
        everybody = self.gathered((structure.hexdigest(), seconds))
        if len({structure for structure, _ in everybody}) > 1:
            return step, "the ranks recorded different ops, so each of them plans with prices of its own"
        whole, ops, packing = everybody[0][1]
        replace = msgspec.structs.replace
        priced = replace(
            step,
            seconds=whole,
            ops=tuple(replace(op, seconds=s) for op, s in zip(step.ops, ops, strict=True)),
            storages=tuple(replace(x, pack_seconds=s) for x, s in zip(step.storages, packing, strict=True)),
        )
        return priced, ""

    def with_buckets(self, step: Step, model: nn.Module) -> tuple[Step, str]:
        """The step with the buckets of a model that will be wrapped.

        Returns:
            The step, and a note on what was counted; an empty text where nothing was.
        """
        nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        if not self.unwrapped or not nbytes:
            return step, ""
        buckets = Storage(
            id=len(step.storages),
            nbytes=nbytes,
            device=step.device,
            category=Category.GRADIENT,
            birth=NO_OP,
            held_until=len(step.ops) - 1,
            name="buckets",
            holder="DistributedDataParallel, once it wraps the model",
        )
        note = (
            f"{show_bytes(nbytes)} are counted for the buckets of DistributedDataParallel, as torch.distributed has several processes and "
            "the model is not wrapped yet; fit after wrapping counts what it really allocates (none with gradient_as_bucket_view=True)"
        )
        return msgspec.structs.replace(step, storages=(*step.storages, buckets)), note


def holds_ddp(model: nn.Module) -> bool:
    """Whether a model, or a part of it, is wrapped for training in several processes."""
    return any(isinstance(m, nn.parallel.DistributedDataParallel) for m in model.modules())
