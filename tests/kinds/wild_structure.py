"""More structure, shapes and devices: what a hostile model does."""

from __future__ import annotations

import collections
import dataclasses
import functools
import types
from collections import UserDict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from .parts import Block, Module, Stack
from .program import Case, Collection, case, mean_square

STRUCTURE = Collection("structure", is_wild=True)
SHAPES = Collection("shapes", is_wild=True)
DEVICES = Collection("devices", is_wild=True)
COLLECTIONS = (STRUCTURE, SHAPES, DEVICES)


@dataclasses.dataclass
class Nested:
    x: torch.Tensor
    rest: Any = None


class Result(NamedTuple):
    first: torch.Tensor
    more: dict[str, Any]


@STRUCTURE.add(
    "containers inside containers: UserDict, deque, frozen dataclass, namespace, NamedTuple, set of names, slice"
)
def exotic_containers() -> Case:
    @dataclasses.dataclass(frozen=True, slots=True)
    class Frozen:
        x: torch.Tensor

    class Net(Stack):
        def forward(self, batch: Any, *, options: Any) -> Any:
            x = self.inp(batch["x"].x) * batch["queue"][0][options.rows].mean()
            for k, block in enumerate(self.blocks):
                x = block(x) if f"skip{k}" not in batch["names"] else x
            return Result(x, {"extra": types.SimpleNamespace(y=x.tanh()), "frozen": Frozen(x), "none": None})

    batch = UserDict(
        x=Nested(torch.randn(4, 8)),
        queue=collections.deque([torch.randn(4, 8), torch.randn(2)]),
        names={"skip1"},
    )
    return case(
        Net(),
        batch,
        options=types.SimpleNamespace(rows=slice(0, 3)),
        loss=lambda r: r.first.square().mean() + r.more["extra"].y.mean() + r.more["frozen"].x.mean(),
    )


def _packed(i: int, built: Case) -> Any:
    generator = torch.Generator().manual_seed(i)
    lengths = [(5, 3, 2), (4, 4, 1), (6, 2, 2)][i % 3]
    x = torch.randn(3, max(lengths), 8, generator=generator)
    return (pack_padded_sequence(x, torch.tensor(lengths), batch_first=True),), {}


@STRUCTURE.add("a packed sequence whose lengths change, through two recurrent layers and back", inputs=_packed)
def packed_lengths() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnns = nn.ModuleList(
                (nn.LSTM(8, 8, batch_first=True, bidirectional=True), nn.GRU(16, 8, batch_first=True))
            )
            self.out = nn.Linear(8, 4)

        def forward(self, packed: PackedSequence) -> Any:
            for rnn in self.rnns:
                packed, _ = rnn(packed)
                packed = packed._replace(data=torch.tanh(packed.data))
            padded, lengths = pad_packed_sequence(packed, batch_first=True, padding_value=-1.0)
            return self.out(padded) * lengths[:, None, None]

    return case(Net(), *_packed(0, None)[0])  # type: ignore[arg-type]


@STRUCTURE.add("one weight reaches the model by several names, a buffer and a closure")
def weights_by_many_names() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(Block)
            self.blocks[2].up.weight = self.blocks[0].up.weight
            self.blocks[1].down.weight = nn.Parameter(self.blocks[0].up.weight.detach().t().contiguous())
            self.alias = self.blocks[1].down.weight
            weight = self.inp.weight
            self.call = lambda x: x @ weight
            self.register_buffer("view", self.blocks[0].up.weight.detach()[:4])

        def forward(self, x: torch.Tensor) -> Any:
            x = super().forward(self.call(x))
            return x + F.linear(x, self.alias.t()) @ self.alias.t() + F.linear(x, self.view).sum()

    return case(Net(), torch.randn(4, 8))


@STRUCTURE.add("blocks are called through partials, bound methods and a functional that takes modules")
def indirect_calls() -> Case:
    class Net(Stack):
        def run(self, block: nn.Module, x: torch.Tensor, *, scale: float) -> torch.Tensor:
            return block(x) * scale

        def forward(self, x: torch.Tensor) -> Any:
            steps = [functools.partial(self.run, block, scale=1 + k) for k, block in enumerate(self.blocks)]
            x = functools.reduce(lambda y, step: step(y), steps, self.inp(x))
            return nn.Module.__call__(self.blocks[0], self.blocks[1].forward(x))

    return case(Net(), torch.randn(4, 8))


@STRUCTURE.add("forward is a generator-driven coroutine, and a module that returns functions of its activations")
def results_are_closures() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            hidden = [x]

            def walk() -> Any:
                for block in self.blocks:
                    hidden.append(block(hidden[-1]))
                    yield hidden[-1].square().mean()

            losses = list(walk())
            return lambda scale: sum(loss * scale**k for k, loss in enumerate(losses)) + hidden[1].mean()

    return case(Net(), torch.randn(4, 8), loss=lambda read: read(0.5))


@STRUCTURE.add("a mixture of depths: the rows with the highest score go through a layer, the others past it")
def mixture_of_depths() -> Case:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            weight = self.score(x).squeeze(-1)
            top, rows = weight.topk(3)
            part = super().forward(x[rows]) * torch.sigmoid(top)[:, None]
            return x.index_copy(0, rows, part).scatter_add(0, rows[:, None].expand(-1, 8), part * 0.1)

    return case(Stack(Routed), torch.randn(6, 8))


@STRUCTURE.add("a loop whose length depends on data, with its states stacked and the unused ones cut off")
def states_stacked() -> Case:
    class Loop(Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.stop = nn.GRUCell(8, 8), nn.Linear(8, 1)

        def forward(self, x: torch.Tensor) -> Any:
            h, states, halt = torch.zeros_like(x), [], torch.zeros(len(x))
            while len(states) < 6 and bool((halt < 0.9).any()):
                h = self.cell(x, h)
                halt = halt + torch.sigmoid(self.stop(h)).squeeze(-1)
                states.append(h * halt[:, None])
            return torch.stack(states[: max(2, len(states) - 1)], 1).cumsum(1)

    return case(Loop(), torch.randn(4, 8))


@STRUCTURE.add("residuals kept on the module between blocks and deleted at the end", python_state=True)
def residuals_on_modules() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                setattr(self, f"skip{k}", torch.sin(x))
                x = block(x)
            for k in reversed(range(3)):
                x = x * getattr(self, f"skip{k}")
                delattr(self, f"skip{k}")
            return x

    return case(Net(), torch.randn(4, 8))


@STRUCTURE.add("einsum, unfold, fold, stft, cdist and linear algebra, all with things saved for backward")
def unusual_ops() -> Case:
    class Odd(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(h)
            a = torch.einsum("bi,ci->bc", h, h) + torch.eye(4) * 20
            b = torch.linalg.solve(a, h) + torch.linalg.cholesky(a).sum() * 0.01
            c = torch.cdist(h, b + 1, p=2.0).softmax(-1) @ h
            d = F.unfold(h.view(1, 1, 4, 12), 2).mean(-1).tanh().sum()
            e = torch.linalg.svdvals(h)[0] + torch.logsumexp(h, 1, keepdim=True) + h.sort(1, descending=True).values
            return torch.tanh(b + c + d) + e.cummax(1).values + h.kthvalue(3, dim=1, keepdim=True).values

    return case(Stack(Odd, num=2), torch.randn(4, 8))


@STRUCTURE.add("a submodule of the model wraps the model itself")
def model_in_a_cycle() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.depth = 0

        def forward(self, x: torch.Tensor) -> Any:
            x = super().forward(x)
            if self.depth == 0:
                self.depth = 1
                try:
                    x = torch.tanh(x) + self(x * 0.5)
                finally:
                    self.depth = 0
            return x

    return case(Net(), torch.randn(4, 8))


@STRUCTURE.add("embedding with padding, max norm and scaling by frequency, which write the weight in forward")
def embeddings_that_write() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(20, 8, max_norm=0.5, padding_idx=0, scale_grad_by_freq=True)
            self.bag = nn.EmbeddingBag(20, 8, mode="max")
            self.stack = Stack()

        def forward(self, ids: torch.Tensor) -> Any:
            return self.stack(self.e(ids).mean(1) + self.bag(ids))

    return case(Net(), torch.randint(0, 20, (4, 5)), loss=mean_square)


# ---------------------------------------------------------------------------------------------- shapes


def _masks(i: int, built: Case) -> Any:
    g = torch.Generator().manual_seed(i)
    x = torch.randn(3, 5 + i % 3, 8, generator=g)
    if i % 2:
        return (x,), {"mask": torch.rand(3, x.shape[1], generator=g) < 0.8}
    return (x,), {"bias": torch.randn(x.shape[1], x.shape[1], generator=g)} if i % 4 == 2 else {}


class _Attention(Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 24) for _ in range(3))

    def forward(self, x: torch.Tensor, mask: Any = None, bias: Any = None) -> Any:
        for layer in self.qkv:
            q, k, v = layer(x).chunk(3, -1)
            scores = q @ k.transpose(1, 2)
            if bias is not None:
                scores = scores + bias
            if mask is not None:
                scores = scores.masked_fill(~mask[:, None, :], -1e9)
            x = x + F.dropout(scores.softmax(-1), 0.1) @ torch.tanh(v)
        return x


@SHAPES.add("a mask in some batches, a bias in others, and other lengths", inputs=_masks, num_steps=6)
def masks_now_and_then() -> Case:
    return case(_Attention(), *_masks(0, None)[0])  # type: ignore[arg-type]


@SHAPES.add(
    "the first batch has the mask, later ones lack it", inputs=lambda i, built: _masks(i + 1, built), num_steps=6
)
def masks_at_first() -> Case:
    args, kwargs = _masks(1, None)  # type: ignore[arg-type]
    return case(_Attention(), *args, **kwargs)


def _empty(i: int, built: Case) -> Any:
    return (torch.randn((4, 0, 2, 1)[i % 4] if i else 4, 8),), {}


@SHAPES.add("batches of one sample and of none", inputs=_empty, num_steps=5, not_finite=True)
def empty_batches() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _growing(i: int, built: Case) -> Any:
    return ([torch.randn(2 + k, 8) for k in range(1 + i)],), {}


@SHAPES.add("a list of tensors that grows by one each step", inputs=_growing, num_steps=5)
def growing_lists() -> Case:
    class Net(Stack):
        def forward(self, xs: list[torch.Tensor]) -> Any:
            return torch.cat([super(Net, self).forward(x) for x in xs])

    return case(Net(), [torch.randn(2, 8)])


def _dtypes(i: int, built: Case) -> Any:
    return (torch.randn(4, 8).to([torch.float32, torch.float64, torch.float16, torch.bfloat16][i % 4]),), {}


@SHAPES.add("another dtype in each batch, cast inside", inputs=_dtypes, num_steps=5)
def other_dtypes() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward((x.sin() * x).float())

    return case(Net(), torch.randn(4, 8))


def _strides(i: int, built: Case) -> Any:
    x = torch.randn(4, 8)
    return ([x, x.t().contiguous().t(), x[:, :1].expand(4, 8), torch.randn(4, 16)[:, ::2]][i % 4],), {}


@SHAPES.add("the same shape with other strides in each batch", inputs=_strides, num_steps=5)
def other_strides() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(torch.tanh(x) * x)

    return case(Net(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- devices


@DEVICES.add("`.to` with a device, a dtype and copy=True, and pinned-like staging through lists")
def moved_by_every_spelling() -> Case:
    class Moving(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = h.to("cpu").to(torch.device("cpu"), torch.float64, copy=True).cpu().float()
            other = torch.tensor(h.detach().tolist()).to(h)
            return torch.tanh(h.to(other) * other.type_as(h))

    return case(Stack(Moving), torch.randn(4, 8))


@DEVICES.add("factories with every keyword, `new_*`, `*_like`, and arange in loops")
def factories() -> Case:
    class Making(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            place = torch.arange(12, device=h.device, dtype=h.dtype) / 12
            wave = torch.linspace(0, 1, 12, device=h.device) + h.new_full((12,), 0.5) + torch.zeros_like(h[0])
            grid = torch.meshgrid(torch.arange(4.0), torch.arange(12.0), indexing="ij")[0]
            return torch.tanh(h * place + wave) * (1 + grid) + F.one_hot(torch.arange(4) % 12, 12) * h

    return case(Stack(Making), torch.randn(4, 8))


@DEVICES.add("a part of the model lives on the meta device and is never run")
def unused_part_on_meta() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.holder = [nn.Linear(1000, 1000, device="meta")]  # not registered

        def forward(self, x: torch.Tensor) -> Any:
            rows = self.holder[0](torch.empty(4, 1000, device="meta")).shape[0]
            return super().forward(x) * rows

    return case(Net(), torch.randn(4, 8))
