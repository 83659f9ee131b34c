"""Steps that differ: what changes from step to step while all saved tensors look alike."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Counted, Stack, attributes, calls
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("differing_steps")


class Numbered(Stack):
    """Knows the number of its step; `between` sets it."""

    now = 0


def _count(model: Any, i: int) -> None:
    getattr(model, "module", model).now = i


# ---------------------------------------------------------------------------------------------- numbers and ops


@PROGRAMS.add("numbers in ops follow the step: scale, power, slope, temperature", between=_count, num_steps=4)
def scheduled_numbers() -> Case:
    class Scheduled(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.now
            x = torch.sin(self.inp(x) / (1 + n)).pow(2 + n)
            x = F.leaky_relu(self.blocks[0](x), 0.1 * (1 + n))
            x = torch.softmax(x / (0.5 + n), -1) + torch.full_like(x, 0.1 * n)
            return torch.add(x, self.blocks[1](x), alpha=1.0 + n).clamp(-2.0 + 0.1 * n, 2.0)

    return case(Scheduled(), torch.randn(4, 8))


@PROGRAMS.add("a random scale of Python's in each call", python_state=True)
def random_numbers() -> Case:
    class Scaled(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(h * random.random()) * random.choice([0.5, 2.0])

    return case(Stack(Scaled), torch.randn(4, 8))


@PROGRAMS.add("the rate of dropout follows a schedule", between=_count, num_steps=4, ops=("bernoulli",))
def scheduled_dropout() -> Case:
    class Scheduled(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            for block in self.blocks:
                x = F.dropout(block(x), 0.1 + 0.2 * self.now, training=True)
            return x

    return case(Scheduled(), torch.randn(4, 8))


@PROGRAMS.add("another op of the same shape: tril for triu, sin for cos, max for min", between=_count, num_steps=4)
def another_op_each_step() -> Case:
    class Alternating(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            odd = self.now % 2
            x = self.inp(x)
            x = torch.tril(x @ x.t()) @ x if odd else torch.triu(x @ x.t()) @ x
            x = torch.sin(x) if odd else torch.cos(x)
            x = self.blocks[0](x) * (x.amax(-1, keepdim=True) if odd else x.amin(-1, keepdim=True))
            return torch.exp(x * 0.1) * (x + 1 if odd else x - 1)

    return case(Alternating(), torch.randn(4, 8))


@PROGRAMS.add("integers in ops change: dimension, index, shift, diagonal, slices", between=_count, num_steps=4)
def another_dimension_each_step() -> Case:
    class Turning(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.now
            x = torch.tanh(self.inp(x))  # 8 x 8: no shape tells the dimensions apart
            x = x.softmax(n % 2) * x.cumsum((n + 1) % 2)
            x = x.roll(n, 0) + torch.tril(x, n - 1) * x[:, n : n + 1]
            x = x.transpose(0, 1) if n % 2 else x.transpose(1, 1)
            return self.blocks[0](x) * x[n] + x.select(1, n).square()

    return case(Turning(), torch.randn(8, 8))


@PROGRAMS.add("another memory format, dtype or rounding in a keyword", between=_count, num_steps=4)
def another_keyword_each_step() -> Case:
    class Keywords(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n = self.now
            x = self.inp(x)
            low = x.to((torch.bfloat16, torch.float16, torch.float64)[n % 3]).float()
            y = F.gelu(low, approximate=("none", "tanh")[n % 2])
            z = torch.div(y, 0.3, rounding_mode=(None, "floor", "trunc")[n % 3])
            return self.blocks[0](y) * z.sin() + x.sum(1, keepdim=n % 2 == 0).mean()

    return case(Keywords(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- leaves


@PROGRAMS.add("another constant out of a bank in each step", between=_count, num_steps=4)
def another_leaf_each_step() -> Case:
    bank = [torch.randn(8) for _ in range(4)]

    class Banked(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x) * bank[self.now])
            return self.blocks[0](x + bank[-1 - self.now]).tanh() * x

    return case(Banked(), torch.randn(4, 8))


@PROGRAMS.add(
    "the blocks run in another order each step", between=_count, num_steps=4, observe=calls, python_state=True
)
def another_order_each_step() -> Case:
    class Shuffled(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            for k in ((0, 1, 2), (2, 1, 0), (1, 1, 1), (0, 2, 1))[self.now]:
                x = self.blocks[k](x)
            return x

    return case(Shuffled(Counted), torch.randn(4, 8))


def _swap(model: Any, i: int) -> None:
    a, b = model.blocks[0].up, model.blocks[1].up
    a.weight, b.weight = b.weight, a.weight
    a.weight.grad = b.weight.grad = None


@PROGRAMS.add("weights of two layers change places", between=_swap, num_steps=4)
def weights_change_places() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


@PROGRAMS.add(
    "a layer is skipped in some steps, another one takes its place",
    between=_count,
    num_steps=5,
    observe=calls,
    python_state=True,
)
def layers_come_and_go() -> Case:
    class Gating(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            for k, block in enumerate(self.blocks):
                if (k + self.now) % 3:
                    x = block(x)
            return x if self.now % 2 else x.tanh()

    return case(Gating(Counted, 4), torch.randn(4, 8))


@PROGRAMS.add("an output is used in some steps only", between=_count, num_steps=4)
def outputs_used_now_and_then() -> Case:
    class Heads(Numbered):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            heads = [block(x).exp() for block in self.blocks]
            return heads[self.now % 3] * heads[0].detach()

    return case(Heads(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- parameters


def _freeze(model: Any, i: int) -> None:
    for k, block in enumerate(model.blocks):
        block.requires_grad_(k != i - 1)
        for p in block.parameters():
            p.grad = None


@PROGRAMS.add("a layer is frozen, thawed, and another one frozen", between=_freeze, num_steps=5)
def frozen_and_thawed() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _freeze_from_below(model: Any, i: int) -> None:
    model.inp.requires_grad_(i == 2)
    model.blocks[0].requires_grad_(i == 2)
    for p in [*model.inp.parameters(), *model.blocks[0].parameters()]:
        p.grad = None


@PROGRAMS.add("the lower part of the model is frozen, so its tensors are no longer saved", between=_freeze_from_below)
def lower_part_frozen() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _replace(model: Any, i: int) -> None:
    old = model.blocks[1].up
    if i == 1:
        old.weight = nn.Parameter(old.weight.detach() * 0.5)
    elif i == 2:
        model.blocks[1].up = copy.deepcopy(old)
    else:
        model.inp.weight = nn.Parameter(model.blocks[0].up.weight[:8].detach().clone())


@PROGRAMS.add("a parameter is replaced by a new one, then a whole layer", between=_replace, num_steps=4)
def parameters_replaced() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _swap_tensors(model: Any, i: int) -> None:
    for p in list(model.parameters()):
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.9))


@PROGRAMS.add(
    "parameters exchange what they are with others: nobody may hold a weak reference to them", between=_swap_tensors
)
def parameters_swapped() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _move_storage(model: Any, i: int) -> None:
    with torch.no_grad():
        if i == 1:
            flat = torch.cat([p.flatten() for p in model.parameters()])  # one flat storage, as shards are gathered
            start = 0
            for p in model.parameters():
                p.data = flat[start : start + p.numel()].view_as(p)
                start += p.numel()
        elif i == 2:
            for p in model.parameters():
                p.data = p.data.clone() * 0.9


@PROGRAMS.add(
    "the storages of parameters are exchanged, as when shards are gathered", between=_move_storage, num_steps=4
)
def parameters_resharded() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


class _Adapted(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.low, self.high = base, nn.Linear(8, 2, bias=False), nn.Linear(2, 12, bias=False)
        with torch.no_grad():
            self.low.weight.copy_(torch.linspace(-0.3, 0.3, 16).view(2, 8))
            self.high.weight.copy_(torch.linspace(0.2, -0.2, 24).view(12, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + torch.tanh(self.high(self.low(x)))


def _grow(model: Any, i: int) -> None:
    if i == 1:
        state = torch.get_rng_state()
        model.blocks[0].up = _Adapted(model.blocks[0].up)
        torch.set_rng_state(state)
    elif i == 2:
        model.blocks.append(copy.deepcopy(model.blocks[1]))


@PROGRAMS.add("an adapter and a layer are added after planning", between=_grow, num_steps=4)
def modules_added() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _hook_later(model: Any, i: int) -> None:
    if i == 1:
        model.blocks[0].up.register_forward_hook(lambda _m, _i, out: out * 1.5)
        model.blocks[1].register_forward_pre_hook(lambda _m, inp: (inp[0].sin(),))
    elif i == 2:
        model.blocks[2].forward = lambda x, block=model.blocks[2]: type(block).forward(block, x * 0.5)


@PROGRAMS.add("hooks and a patched forward arrive after planning", between=_hook_later, num_steps=4)
def hooks_added() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _prune(model: Any, i: int) -> None:
    from torch.nn.utils import parametrize, prune

    if i == 1:
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.4)
    elif i == 2:
        prune.remove(model.blocks[0].up, "weight")
        parametrize.register_parametrization(model.blocks[1].down, "bias", nn.Tanh())


@PROGRAMS.add("weights are pruned and parametrised after planning", between=_prune, num_steps=4)
def weights_parametrised() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- copies and optimizers


def _average_step(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    student = model
    with torch.no_grad():
        target = student.teacher[0](*args)
    loss = loss_fn(student(*args) - target)
    loss.backward()
    with torch.no_grad():
        for slow, fast in zip(student.teacher[0].parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 0.2)
    student.distance = target.clone()
    return loss


@PROGRAMS.add(
    "a moving average made by deepcopy computes with its own weights",
    step=_average_step,
    observe=attributes("distance"),
    python_state=True,
)
def moving_average_copy() -> Case:
    class Student(Stack):
        teacher: list[nn.Module]
        distance: Any = None

    model = Student(Block)
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        for p in teacher.parameters():
            p.mul_(0.7)
    model.teacher = [teacher]  # a list: not a submodule
    return case(model, torch.randn(4, 8))


def _copy_later(model: Any, i: int) -> None:
    if i == 1:
        model.teacher = [copy.deepcopy(model)]  # a copy of the planned model
        with torch.no_grad():
            for p in model.teacher[0].parameters():
                p.mul_(0.5)


def _with_later_copy(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    target = torch.zeros(())
    if model.teacher:
        with torch.no_grad():
            target = model.teacher[0](*args)
        model.seen = target.clone()
    loss = loss_fn(model(*args) - target)
    loss.backward()
    return loss


@PROGRAMS.add(
    "the copy is made of the planned model",
    step=_with_later_copy,
    between=_copy_later,
    observe=attributes("seen"),
    python_state=True,
)
def copy_of_planned_model() -> Case:
    class Student(Stack):
        teacher: list[nn.Module]
        seen: Any = None

    model = Student(Block)
    model.teacher = []
    return case(model, torch.randn(4, 8))


def _adversarial(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    real, noise = args
    for p in model.judge.parameters():
        p.requires_grad_(True)
    fake = model("make", noise)
    first = F.softplus(model("judge", fake.detach())).mean() + F.softplus(-model("judge", real)).mean()
    model.judge_optimizer.zero_grad()
    first.backward()
    model.judge_optimizer.step()
    for p in model.judge.parameters():
        p.requires_grad_(False)
    second = F.softplus(-model("judge", fake)).mean()
    model.maker_optimizer.zero_grad()
    second.backward()
    model.maker_optimizer.step()
    return first.detach() + second.detach()


@PROGRAMS.add(
    "two optimizers: the judge learns between a forward of the maker and its backward",
    step=_adversarial,
    update=False,
    python_state=True,
)
def two_optimizers() -> Case:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.maker, self.judge = Stack(Block, 2), Stack(Block, 2)
            self.maker_optimizer: Any = torch.optim.Adam(self.maker.parameters(), lr=0.01)
            self.judge_optimizer: Any = torch.optim.SGD(self.judge.parameters(), lr=0.02, momentum=0.9)

        def forward(self, part: str, x: torch.Tensor) -> torch.Tensor:
            return self.maker(x).tanh() if part == "make" else self.judge(x).mean(-1)

    return case(Pair(), torch.randn(4, 8), torch.randn(4, 8))


@PROGRAMS.add(
    "the plain step itself does not repeat: entropy of the system",
    not_repeatable=True,
    may_drop_nothing=True,
    num_steps=1,
)
def not_repeatable() -> Case:
    import os

    class Leaky(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return torch.tanh(h) + 1e-3 * int.from_bytes(os.urandom(2), "little") / 65535

    return case(Stack(Leaky), torch.randn(4, 8))
