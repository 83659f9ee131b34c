"""Randomness: masks and draws from every source; gradients belong to the very draw that made the loss."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Counted, Stack, block_attributes, calls
from .program import Case, Collection, case

PROGRAMS = Collection("randomness")


@PROGRAMS.add("a replay with another mask gives gradients of another sample", ops=("bernoulli",))
def dropout_module() -> Case:
    class Dropped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.4)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return self.drop(F.gelu(h))

    return case(Stack(Dropped).train(), torch.randn(5, 8))


@PROGRAMS.add("functional forms draw without a module that could be found", ops=("bernoulli",))
def dropout_functional_forms() -> Case:
    class Dropped(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = F.dropout(h.sin(), 0.3, training=True)
            h = F.alpha_dropout(h, 0.2, training=True)
            channels = h.view(h.shape[0], 4, -1)
            channels = F.feature_alpha_dropout(F.dropout1d(channels, 0.25, training=True), 0.1, training=True)
            return channels.reshape(h.shape)

    return case(Stack(Dropped), torch.randn(6, 8))


@PROGRAMS.add("the in-place form ends the region and overwrites what was kept", ops=("bernoulli",))
def dropout_in_place_last() -> Case:
    class Dropped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.down(torch.sigmoid(self.up(x))), 0.5, training=True, inplace=True)

    return case(Stack(Dropped), torch.randn(4, 8, requires_grad=True))


@PROGRAMS.add("p = 0 and p = 1 draw differently from any p between", ops=("bernoulli",))
def dropout_extremes() -> Case:
    class Extremes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.p = nn.Linear(8, 8), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.lin(x))
            return (
                x
                + F.dropout(h, 0.0, True)
                + F.dropout(h, 1.0, True)
                + F.dropout(h, 0.5, True)
                + F.dropout(h, 0.9, False)
            )

    return case(Stack(Extremes), torch.randn(4, 8))


@PROGRAMS.add("the mask is drawn inside attention", ops=("bernoulli",))
def sdpa_dropout() -> Case:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
            return x + self.out(y.transpose(1, 2).flatten(2))

    return case(Stack(Attention, 2), torch.randn(2, 5, 8))


@PROGRAMS.add("nn.MultiheadAttention and a transformer layer draw four masks a layer", ops=("bernoulli",), heavy=True)
def transformer_layers() -> Case:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)

    class Attended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer
            self.cross = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layer(x)
            mixed, weights = self.cross(x, x.flip(1), x, need_weights=True)
            return x + mixed * weights.mean()

    return case(Stack(Attended, 2).train(), torch.randn(2, 4, 8))


class _OwnSources(Block):
    """Draws from a torch.Generator, a NumPy generator and a random.Random of its own."""

    seeds = iter(range(10**9))

    def __init__(self) -> None:
        super().__init__()
        seed = int(torch.randint(0, 1000, ()))
        self.torch_gen = torch.Generator().manual_seed(seed)
        self.numpy_gen = np.random.default_rng(seed)
        self.python_gen = random.Random(seed)

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        keep = torch.rand(h.shape, generator=self.torch_gen) > 0.3
        noise = torch.randn(h.shape, generator=self.torch_gen)
        scale, shift = 1 + 0.2 * self.python_gen.random(), float(self.numpy_gen.normal(scale=0.1))
        return (F.silu(h) * keep + 0.1 * noise * h) * scale + shift * h.tanh()


def _own_states(model: Any) -> dict[str, Any]:
    return {
        "torch": [b.torch_gen.get_state() for b in model.blocks],
        "numpy": [str(b.numpy_gen.bit_generator.state) for b in model.blocks],
        "python": [hash(b.python_gen.getstate()) for b in model.blocks],
    }


@PROGRAMS.add(
    "only the global generators are put back by others",
    observe=_own_states,
    python_state=True,
    restored=frozenset({"torch"}),
    ops=("aten.rand.generator", "aten.randn.generator"),
)
def own_generators() -> Case:
    return case(Stack(_OwnSources).train(), torch.randn(5, 8))


@PROGRAMS.add(
    "one generator is shared by all blocks, and the global one is drawn from in between",
    observe=lambda m: {"torch": m.blocks[0].gen.get_state()},
    python_state=True,
    restored=frozenset({"torch"}),
    ops=("bernoulli_.float", "aten.normal_"),
)
def shared_generator() -> Case:
    gen = torch.Generator().manual_seed(11)

    class Shared(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gen = gen

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            keep = torch.empty_like(h).bernoulli_(0.7, generator=self.gen)
            h = torch.tanh(h * keep) * torch.rand_like(h)
            return h + h.detach().clone().normal_(generator=self.gen) * h.sin()

    return case(Stack(Shared), torch.randn(4, 8))


@PROGRAMS.add("Python's and NumPy's global generators decide scales and masks")
def global_python_and_numpy() -> Case:
    class Scaled(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            mask = torch.from_numpy((np.random.rand(*h.shape) > 0.4).astype(np.float32))
            return torch.sin(h * mask * random.uniform(0.5, 1.5)) * (1 + 0.1 * float(np.random.normal()))

    return case(Stack(Scaled), torch.randn(5, 8))


@PROGRAMS.add("the noise is saved first and filled afterwards", ops=("rrelu_with_noise",))
def rrelu_last() -> Case:
    class Leaky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.act = nn.Linear(8, 8), nn.RReLU(0.1, 0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.lin(x))

    return case(Stack(Leaky).train(), torch.randn(6, 8))


@PROGRAMS.add("the same, in place, and followed by a product", ops=("rrelu_with_noise_",))
def rrelu_in_place() -> Case:
    class Leaky(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return F.rrelu(h, 0.2, 0.6, training=True, inplace=True) * h.detach().sigmoid()

    return case(Stack(Leaky), torch.randn(6, 8))


@PROGRAMS.add(
    "whole samples of a residual branch are dropped",
    ops=("bernoulli",),
    shows=lambda records: len({float(r.loss) for r in records}) == len(records),
)
def stochastic_depth() -> Case:
    class Depth(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            keep = torch.empty(x.shape[0], 1).bernoulli_(0.6).div_(0.6)
            return x + self.down(F.gelu(self.up(x))) * keep

    return case(Stack(Depth, 4), torch.randn(6, 8))


@PROGRAMS.add(
    "every kind of draw: bernoulli, multinomial, permutations, integers, exponential, poisson",
    ops=("multinomial", "randperm", "randint", "exponential_", "poisson", "bernoulli"),
)
def many_distributions() -> Case:
    class Draws(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            order = torch.randperm(h.shape[-1])
            picks = torch.multinomial(h.detach().softmax(-1), 5, replacement=False)
            h = h[:, order].tanh() + torch.zeros_like(h).scatter(-1, picks, 1.0) * h
            gumbel = -torch.empty_like(h).exponential_().log()
            soft = torch.softmax((h + gumbel) / 0.7, -1)
            counts = torch.poisson(h.detach().abs())
            coin = torch.bernoulli(soft.detach())
            shift = torch.randint(0, h.shape[-1], ())
            return (soft * coin + h.sin() * counts).roll(int(shift), -1)

    return case(Stack(Draws), torch.randn(4, 8))


@PROGRAMS.add("straight-through and relaxed samples save the sample itself", ops=("exponential_", "randn"))
def reparameterised_samples() -> Case:
    class Latent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc, self.dec = nn.Linear(8, 16), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean, log_scale = self.enc(x).chunk(2, -1)
            z = mean + log_scale.exp() * torch.randn_like(mean)
            choice = F.gumbel_softmax(z, tau=0.8, hard=True)
            return x + self.dec(choice * z)

    return case(Stack(Latent), torch.randn(4, 8))


@PROGRAMS.add("torch.distributions draws with rsample and broadcasting", ops=("normal",))
def distributions_rsample() -> Case:
    class Sampled(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            normal = torch.distributions.Normal(h.tanh(), F.softplus(h) + 0.1, validate_args=False)
            uniform = torch.distributions.Uniform(-1.0, h.detach().abs() + 1.0, validate_args=False)
            return normal.rsample() * uniform.rsample() - 0.01 * normal.entropy()

    return case(Stack(Sampled), torch.randn(4, 8))


def _layer_drop(model: Any, x: torch.Tensor, coins: list[float]) -> torch.Tensor:
    x = model.inp(x)
    for block, coin in zip(model.blocks, coins, strict=True):
        if coin > 0.4:
            x = block(x)
    return x


def _changes(records: Any) -> bool:
    patterns = [tuple(r.observed["calls"]) for r in records]
    jumps = {tuple(b - a for a, b in zip(x, y, strict=True)) for x, y in itertools.pairwise(patterns)}
    return len(jumps) > 1


@PROGRAMS.add(
    "whole layers are skipped at random and all of them look alike",
    observe=calls,
    python_state=True,
    num_steps=6,
    shows=_changes,
)
def layer_drop_python() -> Case:
    class Dropping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _layer_drop(self, x, [random.random() for _ in self.blocks])

    return case(Dropping(Counted, 4), torch.randn(6, 8))


@PROGRAMS.add(
    "the same, decided by torch's generator",
    observe=calls,
    python_state=True,
    num_steps=6,
    ops=("local_scalar_dense",),
    shows=_changes,
)
def layer_drop_torch() -> Case:
    class Dropping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _layer_drop(self, x, [torch.rand(()).item() for _ in self.blocks])

    return case(Dropping(Counted, 4), torch.randn(6, 8))


@PROGRAMS.add(
    "exactly one of several equal layers is left out: number, shapes and nodes of saved tensors never change",
    observe=calls,
    python_state=True,
    num_steps=6,
    shows=_changes,
)
def one_equal_layer_skipped() -> Case:
    class Skipping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skip = random.randrange(len(self.blocks))
            for i, block in enumerate(self.blocks):
                if i != skip:
                    x = block(x) * (1 + 0.1 * random.random())
            return x

    return case(Skipping(Counted, 4), torch.randn(6, 8))


@PROGRAMS.add("forward seeds the global generator itself, and forks it", ops=("bernoulli", "rand"))
def seeded_inside_forward() -> Case:
    class Seeding(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                fixed = torch.rand_like(h)
            free = F.dropout(h.sin(), 0.3, training=True)
            return free * fixed + h

    return case(Stack(Seeding), torch.randn(4, 8))


@PROGRAMS.add(
    "a generator is wound back in each forward: the same mask for all calls",
    observe=lambda m: {"state": m.blocks[0].gen.get_state()},
    restored=frozenset({"state"}),
    ops=("rand",),
)
def locked_mask_generator() -> Case:
    class Locked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gen = torch.Generator().manual_seed(3)
            self.start = self.gen.get_state()

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            self.gen.set_state(self.start)
            first = torch.rand(h.shape, generator=self.gen) > 0.5
            self.gen.set_state(self.start)
            second = torch.rand(h.shape, generator=self.gen) > 0.5
            return torch.where(first, h.sin(), h.cos()) * second

    return case(Stack(Locked), torch.randn(4, 8))


@PROGRAMS.add("mixup: a permutation of the batch and a Beta draw of NumPy", ops=("randperm",))
def mixup() -> Case:
    class Mixup(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            share = float(np.random.beta(0.4, 0.4))
            x = share * x + (1 - share) * x[torch.randperm(x.shape[0])]
            return super().forward(x)

    return case(Mixup(), torch.randn(6, 8))


@PROGRAMS.add("one mask is drawn once a step and kept for all time steps", ops=("bernoulli",))
def variational_dropout() -> Case:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.mask = nn.GRUCell(8, 8), None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state, mask = torch.zeros_like(x[0]), torch.empty_like(x[0]).bernoulli_(0.7)
            for item in x:
                state = self.cell(item, state) * mask
            return state

    return case(Locked(), torch.randn(5, 3, 8))


@PROGRAMS.add("LSTM layers draw between layers inside one call", heavy=True, ops=("bernoulli",))
def recurrent_dropout() -> Case:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(8, 6, 3, dropout=0.4), nn.GRU(6, 8, 2, dropout=0.4, bidirectional=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(self.lstm(x)[0])[0]

    return case(Recurrent().train(), torch.randn(4, 3, 8))


@PROGRAMS.add("more draws in each step than in the one before", observe=block_attributes("rounds"), python_state=True)
def more_draws_each_step() -> Case:
    class Growing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rounds = 0

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            self.rounds += 1
            for _ in range(self.rounds):
                torch.rand(3)  # thrown away, but the generator moves
            return F.dropout(h.sin(), 0.3, training=True)

    return case(Stack(Growing, 2), torch.randn(4, 8))
