"""DistributedDataParallel with one gloo process; `test_ddp.py` starts two."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .parts import Block, Stack
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("ddp")


def one_process_group() -> None:
    """Join a group of one process, once."""
    if not dist.is_initialized():
        handle, path = tempfile.mkstemp()
        os.close(handle)
        os.unlink(path)
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)


class Skipping(Stack):
    """Leaves one block out and runs the first one twice."""

    def forward(self, x: torch.Tensor, skip: int = -1) -> torch.Tensor:
        x = torch.sin(self.inp(x))
        for k, block in enumerate(self.blocks):
            if k != skip:
                x = block(x)
        return self.blocks[0](x)


def _two_batches(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for x, skip in args:
        loss = loss_fn(model(x, skip))
        loss.backward()
        total = total + loss.detach()
    return total


@PROGRAMS.add("a parameter is unused and another used twice, differently in each pass", step=_two_batches)
def unused_and_reused() -> Case:
    one_process_group()
    model = DistributedDataParallel(Skipping(), find_unused_parameters=True)
    return case(model, (torch.randn(4, 8), 1), (torch.randn(4, 8), 2))


def _no_sync(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    with model.no_sync():
        for x in args[:-1]:
            loss_fn(model(x)).backward()
    loss = loss_fn(model(args[-1]))
    loss.backward()
    return loss


@PROGRAMS.add("accumulation under no_sync, then a synchronised step", step=_no_sync)
def no_sync_accumulation() -> Case:
    one_process_group()
    return case(DistributedDataParallel(Stack(Block)), *(torch.randn(n, 8) for n in (4, 3, 4)))


@PROGRAMS.add("gradients are views of the buckets, and buffers are broadcast", ops=("native_batch_norm",))
def bucket_views_and_buffers() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return torch.relu(self.norm(h))

    one_process_group()
    model = DistributedDataParallel(Stack(Normed), gradient_as_bucket_view=True)
    return case(model, torch.randn(4, 8))


@PROGRAMS.add("a static graph with a reused block")
def static_graph() -> Case:
    one_process_group()
    return case(DistributedDataParallel(Skipping(Block), static_graph=True), torch.randn(4, 8))


@PROGRAMS.add("a communication hook sees each bucket once", observe=lambda m: {"buckets": m.buckets}, python_state=True)
def communication_hook() -> Case:
    one_process_group()
    model: Any = DistributedDataParallel(Stack(Block), bucket_cap_mb=1)
    model.buckets = 0

    def hook(state: Any, bucket: Any) -> Any:
        model.buckets += 1
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer() * 0.5)
        return future

    hook.__annotations__.update({"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]})  # pyright: ignore[reportPrivateImportUsage]
    model.register_comm_hook(None, hook)
    return case(model, torch.randn(4, 8))
