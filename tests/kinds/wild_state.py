"""More randomness and mutation: what a hostile model does."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Module, Stack, attributes, block_attributes
from .program import Case, Collection, Loss, case

RANDOMNESS = Collection("randomness", is_wild=True)
MUTATION = Collection("mutation", is_wild=True)
COLLECTIONS = (RANDOMNESS, MUTATION)


@RANDOMNESS.add("a generator is an argument of the call", observe=attributes("drawn"), python_state=True)
def generator_as_keyword() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.drawn = 0

        def forward(self, x: torch.Tensor, *, generator: torch.Generator) -> Any:
            x = self.inp(x)
            for block in self.blocks:
                mask = torch.rand(x.shape, generator=generator) > 0.3
                x = block(torch.tanh(x) * mask) + torch.randn(x.shape[1:], generator=generator) * 0.1
            self.drawn = int(generator.get_state().sum())
            return x

    return case(Net(), torch.randn(4, 8), generator=torch.Generator().manual_seed(5))


@RANDOMNESS.add("generators travel inside an argument's dict, one for each block")
def generators_in_a_container() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor, draw: dict[str, Any]) -> Any:
            x = self.inp(x)
            for block, generator in zip(self.blocks, draw["generators"], strict=True):
                keep = torch.empty_like(x).bernoulli_(0.7, generator=generator)
                x = block(x * keep / 0.7)
            return x

    generators = [torch.Generator().manual_seed(n) for n in range(3)]
    return case(Net(), torch.randn(4, 8), {"generators": generators})


@RANDOMNESS.add("a NumPy Generator object and a random.Random live in the module", observe=attributes("seen"))
def own_numpy_and_python_generators() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.np, self.py, self.seen = np.random.default_rng(3), random.Random(4), 0.0

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for block in self.blocks:
                noise = torch.from_numpy(self.np.normal(size=tuple(x.shape)).astype("float32"))
                x = block(torch.sin(x + noise)) * self.py.uniform(0.5, 1.5)
            self.seen = self.np.random() + self.py.random()
            return x

    return case(Net(), torch.randn(4, 8))


@RANDOMNESS.add("every block draws in place from a distribution of its own")
def draws_in_place() -> Case:
    class Noisy(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            noise = torch.empty_like(h)
            parts = (noise.normal_(), noise.clone().uniform_(-1, 1), noise.clone().cauchy_().clamp_(-1, 1))
            more = noise.clone().log_normal_(0, 0.2) + noise.clone().geometric_(0.4) * 0.1
            whole = h.detach().clone().random_(0, 5) * 0.1
            return torch.tanh(h * sum(parts) + more) + h * whole

    return case(Stack(Noisy), torch.randn(4, 8))


@RANDOMNESS.add("feature, alpha and channel dropout in train mode, in bfloat16 and with strides")
def other_dropouts() -> Case:
    class Dropped(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = F.feature_alpha_dropout(h.unsqueeze(-1), 0.2, True).squeeze(-1)
            h = F.dropout1d(h.unsqueeze(0), 0.3, True).squeeze(0)
            h = F.alpha_dropout(h.t(), 0.2, True).t()
            return F.dropout(h.to(torch.bfloat16), 0.4, True).float().tanh()

    return case(Stack(Dropped), torch.randn(4, 8))


@RANDOMNESS.add("multi-head attention with dropout and a mask, packed weights, and its attention weights returned")
def attention_weights_returned() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            total = x.new_zeros(())
            mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
            for layer in self.layers:
                out, weights = layer(x, x, x, attn_mask=mask)
                total = total + weights.square().mean()
                x = torch.tanh(x + out)
            return x + total

    return case(Net(), torch.randn(2, 5, 8))


@RANDOMNESS.add("gumbel-softmax, hard and soft, whose result decides an index")
def gumbel_choices() -> Case:
    class Choosing(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            hard = F.gumbel_softmax(h, tau=0.7, hard=True)
            k = int(torch.multinomial(h.detach().softmax(-1).mean(0), 1))
            return torch.roll(hard * h, k, dims=-1) + F.gumbel_softmax(h, tau=2.0)

    return case(Stack(Choosing), torch.randn(4, 8))


@RANDOMNESS.add("the generator's state is saved, moved and put back inside forward")
def state_put_back_inside() -> Case:
    class Twin(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            state = torch.get_rng_state()
            a = F.dropout(h, 0.5)
            torch.set_rng_state(state)
            b = F.dropout(h * 2, 0.5)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                c = F.dropout(h, 0.2)
            return torch.tanh(a * b + c)

    return case(Stack(Twin), torch.randn(4, 8))


@RANDOMNESS.add("random crops and flips: integers drawn in Python become indices")
def random_crops() -> Case:
    class Crops(Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for conv in self.convs:
                i, j = random.randrange(3), int(torch.randint(0, 3, ()))
                x = x[:, :, i : i + 6, j : j + 6] if x.shape[-1] > 8 else F.pad(x, (i, 3 - i, j, 3 - j))
                if np.random.rand() < 0.5:
                    x = x.flip(-1)
                x = F.fractional_max_pool2d(torch.sin(conv(x)), 2, output_size=(x.shape[-2] - 1, x.shape[-1] - 1))
            return x

    return case(Crops(), torch.randn(2, 3, 10, 10))


# ---------------------------------------------------------------------------------------------- mutation


@MUTATION.add("batch norm's functional forms that move their statistics", ops=("_native_batch_norm_legit",))
def functional_statistics() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(12))
            self.register_buffer("var", torch.ones(12))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            out, _, _ = torch.ops.aten._native_batch_norm_legit(h, None, None, self.mean, self.var, True, 0.1, 1e-5)
            more, _, _ = torch.ops.aten._native_batch_norm_legit.no_stats(h * 2, None, None, True, 0.1, 1e-5)
            third = torch.batch_norm(h, None, None, self.mean, self.var, True, 0.3, 1e-5, False)
            return torch.tanh(out + more) * third

    return case(Stack(Normed), torch.randn(4, 8))


@MUTATION.add("the newest batch norm op moves statistics", ops=("_batch_norm_with_update",))
def batch_norm_with_update() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            n = self.norm
            found = torch.ops.aten._batch_norm_with_update(
                h, n.weight, n.bias, n.running_mean, n.running_var, 0.1, 1e-5
            )
            return torch.tanh(found[0])

    return case(Stack(Normed), torch.randn(4, 8))


@MUTATION.add("quantisation-aware training with fused observers", ops=("fused_moving_avg_obs",))
def fused_observers() -> Case:
    class Observed(Block):
        def __init__(self) -> None:
            super().__init__()
            for name, value in (("low", 0.0), ("high", 0.0), ("scale", 1.0)):
                self.register_buffer(name, torch.full((1,), value))
            self.register_buffer("zero", torch.zeros(1, dtype=torch.int32))
            self.register_buffer("on", torch.ones(1, dtype=torch.long))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.fused_moving_avg_obs_fake_quant(
                h, self.on, self.on, self.low, self.high, self.scale, self.zero, 0.01, 0, 255, -1
            )
            return torch.sin(h) * h

    return case(Stack(Observed), torch.randn(4, 8))


@MUTATION.add("a hook resizes and refills the result's scratch, and another replaces the result")
def hooks_that_resize() -> Case:
    model = Stack(Block)
    scratch = torch.zeros(2)

    def refill(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scratch.resize_(out.shape).copy_(out).mul_(0.5)
        return out + scratch

    def grow(module: nn.Module, args: Any) -> Any:
        return (torch.cat([args[0], args[0][:1]])[:-1] * 1.01,)

    for block in model.blocks:
        block.up.register_forward_hook(refill)
        block.register_forward_pre_hook(grow)
    return case(model, torch.randn(4, 8))


@MUTATION.add("NumPy writes the argument's memory between the blocks", may_drop_nothing=True)
def numpy_writes_between_blocks() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            side = torch.ones(4, 8)
            view = side.numpy()
            out = self.inp(x)
            for k, block in enumerate(self.blocks):
                view[...] = k + 1.5
                out = block(out * side.clone())
                view += 0.25
            return out

    return case(Net(), torch.randn(4, 8))


@MUTATION.add("a ring buffer of past activations is rolled and written by slices each step")
def ring_buffer() -> Case:
    class Ring(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ring", torch.zeros(3, 12))
            self.place = 0

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            past = self.ring.clone()
            out = torch.tanh(h @ past.t()) @ past + torch.sin(h)
            with torch.no_grad():
                self.ring[self.place % 3].copy_(h.mean(0))
                self.ring.copy_(self.ring.roll(1, 0))
            self.place += 1
            return out

    return case(Stack(Ring), torch.randn(4, 8))


@MUTATION.add("in-place activations of every kind on results that their ops do not save")
def in_place_activations() -> Case:
    class InPlace(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = F.relu_(h.clone())
            h = F.silu(h * 1.1, inplace=True)
            h = F.leaky_relu_(h + 0.1, 0.2)
            h = F.elu(h * 2, inplace=True)
            h = F.hardswish(h * 1.5, inplace=True)
            h = F.mish(h + 0.5, inplace=True)
            return F.threshold_(h + 1, 0.5, 0.1).sigmoid_()

    return case(Stack(InPlace), torch.randn(4, 8))


@MUTATION.add("views of views are written, transposed and squeezed in place, and as_strided over all of it")
def shapes_changed_in_place() -> Case:
    class Moved(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            y = torch.tanh(h)
            y = y * 2
            part = y[:, 2:8].t()
            part[1:3].mul_(0.5)
            y.unsqueeze_(0).squeeze_(0)
            z = y.clone()
            z.t_().t_()
            z.as_strided((2, 3), (12, 2)).add_(h.detach()[:2, :3])
            z.diagonal().fill_(0.25)
            z[:, ::2] = z[:, 1::2].clone().sin()
            return z * y.detach()

    return case(Stack(Moved), torch.randn(4, 8))


def _edit_weight_between(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    first = loss_fn(model(*args))
    first.backward()
    with torch.no_grad():
        model.blocks[1].up.weight.mul_(0.9)
    loss = loss_fn(model(*args))
    loss.backward()
    return loss.detach() + first.detach()


@MUTATION.add("weights move between the two backward passes of one step", step=_edit_weight_between)
def weights_move_inside_a_step() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


class _Table(Module):
    """Its embedding, of more than 64 KiB, is read by replays and saved by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(1200, 16)
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)
        self.optimizer: Any = torch.optim.SGD([self.table.weight], 0.1)

    def forward(self, ids: torch.Tensor) -> Any:
        return self.down(torch.tanh(self.up(torch.tanh(self.table(ids)))))


def _step_between(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    model.table.weight.grad, *_ = torch.autograd.grad(loss, model.table.weight, retain_graph=True)
    model.optimizer.step()
    model.optimizer.zero_grad()
    loss.backward()
    return loss.detach()


@MUTATION.add(
    "an optimizer moves an embedding between two passes over one graph",
    step=_step_between,
    update=False,
    from_args=True,
    alone=True,
    python_state=True,
)
def embedding_moved_between_passes() -> Case:
    return case(_Table(), torch.randint(0, 1200, (4, 9)))


def _unread(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    keep, drop = model(*args)
    drop.data.zero_()
    with torch.no_grad():
        drop.add_(1.0)
    loss = loss_fn(keep)
    loss.backward()
    return loss


@MUTATION.add("an unused result is overwritten before backward", step=_unread)
def unused_result_overwritten() -> Case:
    class Two(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            return self.blocks[0](x), torch.exp(self.blocks[1](x)) * 2

    return case(Two(), torch.randn(4, 8))


@MUTATION.add("the caller's staging tensor is a view whose base is written after forward", same_inputs=True)
def base_of_the_argument_written() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.step = itertools.count(1)

        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(torch.sin(x.clone() * (1 + x.detach().mean())))

    base = torch.randn(6, 8)
    return case(Net(), base[1:5])


@MUTATION.add("a mean of outputs is kept by `lerp_` and `addcmul_` on buffers that the output reads")
def moving_target_read_later() -> Case:
    class Centred(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(12))
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.centre.lerp_(h.mean(0), 0.1)
                self.centre.addcmul_(self.centre, self.centre, value=0.01)
                self.count += 1
            y = torch.tanh(h - self.centre) * self.centre.exp()
            with torch.no_grad():
                self.centre.mul_(0.99)
            return y / (1 + self.count)

    return case(Stack(Centred), torch.randn(4, 8), loss=lambda out: out.square().mean())


@MUTATION.add(
    "counters and lists: block-level Python state feeds numbers into ops",
    observe=block_attributes("calls", "log"),
    python_state=True,
)
def numbers_from_python_state() -> Case:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls, self.log = 0, []

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.log.append(float(h.detach().mean()))
            return torch.tanh(h * self.log[-1]) / self.calls + torch.pow(h, 1 + self.calls % 3)

    return case(Stack(Counting), torch.randn(4, 8))
