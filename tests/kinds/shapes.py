"""Shapes: batches and sequences that change from call to call, and accumulation over them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Stack, attributes
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("shapes")


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.mlp = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.dropout((q @ k.mT / 3).softmax(-1), 0.1, self.training) @ v)
        return self.mlp(x)


class _Tokens(nn.Module):
    """A little language model with learned positions."""

    def __init__(self, longest: int = 24) -> None:
        super().__init__()
        self.emb, self.pos, self.head = nn.Embedding(11, 8), nn.Embedding(longest, 8), nn.Linear(8, 11)
        self.blocks = nn.ModuleList([_Attending() for _ in range(2)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 11, (batch, length), generator=torch.Generator().manual_seed(seed + 100 * length))


def _lengths(*sizes: tuple[int, int]) -> Any:
    return lambda i, built: ((tokens(*sizes[i], seed=i),), {})


@PROGRAMS.add(
    "another sequence length in each step, then the first again",
    num_steps=5,
    inputs=_lengths((2, 7), (2, 12), (2, 4), (2, 12), (2, 7)),
)
def variable_sequence() -> Case:
    return case(_Tokens().train(), tokens(2, 7), loss=lambda o: o)


@PROGRAMS.add(
    "the last batch of an epoch is short, and one sample is left over",
    num_steps=4,
    inputs=_lengths((4, 6), (4, 6), (3, 6), (1, 6)),
)
def short_last_batch() -> Case:
    return case(_Tokens().train(), tokens(4, 6), loss=lambda o: o)


@PROGRAMS.add(
    "a loader sorts into buckets: few lengths, often",
    num_steps=8,
    inputs=lambda i, built: ((tokens(2, (4, 8, 4, 16, 8, 4, 16, 8)[i], i),), {}),
)
def bucketed_lengths() -> Case:
    return case(_Tokens().train(), tokens(2, 16), loss=lambda o: o)


@PROGRAMS.add(
    "batch and length swap their sizes: as many elements as before",
    num_steps=4,
    inputs=_lengths((4, 6), (6, 4), (3, 8), (4, 6)),
)
def same_number_of_elements() -> Case:
    return case(_Tokens().train(), tokens(4, 6), loss=lambda o: o)


def _accumulate(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for ids in args:
        loss = loss_fn(model(ids)) / len(args)
        loss.backward()
        total = total + loss.detach()
    return total


@PROGRAMS.add("gradients are accumulated over micro-batches of several lengths", step=_accumulate, heavy=True)
def accumulation() -> Case:
    return case(_Tokens().train(), *(tokens(2, n) for n in (4, 13, 7, 10)), loss=lambda o: o)


def _accumulate_then_step(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for k, ids in enumerate(args):
        loss = loss_fn(model(ids))
        loss.backward()
        total = total + loss.detach()
        if k % 2:
            model.optimizer.step()
            model.optimizer.zero_grad(set_to_none=k == 1)
    return total


@PROGRAMS.add(
    "an optimizer step after each two micro-batches of different shape",
    step=_accumulate_then_step,
    heavy=True,
    update=False,
    python_state=True,
)
def accumulation_with_optimizer() -> Case:
    model: Any = _Tokens().train()
    model.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return case(model, *(tokens(2, n) for n in (5, 5, 9, 3, 6)), loss=lambda o: o)


@PROGRAMS.add(
    "rounds of computing depend on the micro-batch",
    step=_accumulate,
    observe=attributes("rounds"),
    python_state=True,
    shows=lambda records: len({n for _, n in records[0].observed["rounds"]}) > 1,
)
def adaptive_rounds() -> Case:
    class Adaptive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.cell, self.halt = nn.Embedding(11, 8), nn.Linear(8, 8), nn.Linear(8, 1)
            self.rounds: list[Any] = []

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x, n = self.emb(ids), 0
            while n < 6:
                x, n = x + torch.tanh(self.cell(x)), n + 1
                if self.halt(x).mean().item() > 0.01 * ids.shape[1]:
                    break
            self.rounds.append((ids.shape[1], n))
            return x.square().mean()

    model = Adaptive()
    with torch.no_grad():
        model.halt.bias.fill_(0.05)
    return case(model, *(tokens(2, n) for n in (4, 19, 7, 11)), loss=lambda o: o)


@PROGRAMS.add(
    "images of another size, odd and even, with pooling and interpolation",
    inputs=lambda i, built: (
        (torch.randn(2, 3, *((6, 6), (9, 7), (5, 8))[i], generator=torch.Generator().manual_seed(i)),),
        {},
    ),
    ops=("convolution", "upsample"),
)
def variable_images() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.relu(self.norm(self.a(x)), inplace=True)
            low = F.max_pool2d(self.b(h), 2, ceil_mode=True)
            return F.adaptive_avg_pool2d(h + F.interpolate(low, size=h.shape[-2:], mode="bilinear"), 2).flatten(1)

    return case(Net(), torch.randn(2, 3, 6, 6))


@PROGRAMS.add(
    "the number of dimensions changes: with and without batch",
    inputs=lambda i, built: ((built.args[0] if i == 0 else built.args[0][0] if i == 1 else built.args[0][None],), {}),
)
def changing_rank() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


@PROGRAMS.add(
    "optional inputs come and go",
    inputs=lambda i, built: ((built.args[0],), {"mask": (None, built.kwargs["mask"], None, built.kwargs["mask"])[i]}),
    num_steps=4,
)
def optional_inputs() -> Case:
    class Masked(Stack):
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            if mask is not None:
                x = x.masked_fill(mask, 0.0) * (~mask).sum()
            return self.blocks[0](x)

    return case(Masked(), torch.randn(4, 8), mask=torch.rand(4, 8) > 0.5)
