"""Random programs as data: a list of instructions that a module carries out.

The values of a running program are a pool of two-dimensional float tensors. An instruction takes its operands from the pool by
number (modulo what is there) and adds its results, or writes in place. So every list of instructions is a program, and
hypothesis can shorten a failing one by leaving instructions out. Some programs raise in plain autograd, because something
that was saved is overwritten later: the planned run has to raise as well.

Each entry of `OPS` stands for a kind of effect (`EFFECTS` lists them); `specs()` draws lists of them.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from .parts import Module
from .program import Case, Program, Step, case

WIDTH = 4
NUMBERS = (0.5, 0.9, 1.1, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a program."""

    op: str
    """Name in `OPS`."""
    a: int
    """Which value of the pool, counted from the newest."""
    b: int
    """Which second value of the same shape."""
    k: int
    """Which literal, weight or slice."""


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole program."""

    blocks: tuple[tuple[Instruction, ...], ...]
    """What each block does."""
    order: tuple[int, ...]
    """Which blocks run, one after the other: a block may run twice or not at all."""
    sizes: tuple[int, ...]
    """Batch size of each step."""
    num_outputs: int
    """How many of the newest values the loss reads."""
    form: str = ""
    """How the step is taken; a name in `FORMS`, or empty: forward, loss, backward."""

    def __str__(self) -> str:
        lines = [f"    {n}: " + ", ".join(f"{i.op}({i.a}, {i.b}, {i.k})" for i in b) for n, b in enumerate(self.blocks)]
        return "\n".join(
            [f"order {self.order}, sizes {self.sizes}, outputs {self.num_outputs}, form {self.form!r}", *lines]
        )


class Machine(Module):
    """A block: it carries out its instructions with weights, buffers and a generator of its own."""

    def __init__(self, lines: Sequence[Instruction]) -> None:
        super().__init__()
        self.lines, self.now = tuple(lines), 0
        self.w = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) / 2) for _ in range(2)])
        self.v = nn.ParameterList([nn.Parameter(torch.randn(WIDTH) / 2) for _ in range(2)])
        self.norm = nn.BatchNorm1d(WIDTH)
        self.gen = torch.Generator().manual_seed(7)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scratch", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        pool = [x]
        for line in self.lines:
            a = pool[-1 - line.a % len(pool)]
            same = [t for t in pool if t.shape == a.shape]
            out = OPS[line.op](self, a, same[-1 - line.b % len(same)], line.k)
            if out is not None:
                pool += list(out) if isinstance(out, tuple) else [out]
        return pool


class Net(Module):
    """Blocks in some order, sharing weights where one runs twice."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Machine(lines) for lines in spec.blocks])
        self.order, self.num_outputs = spec.order, spec.num_outputs

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inp(x)
        pool = [x]
        for k in self.order:
            pool = self.blocks[k](x)
            whole = next((t for t in reversed(pool) if t.shape[-1] == WIDTH), x)
            x = x + whole.mean(0) if whole.shape != x.shape else whole + 0.5 * x
        return (x, *pool[-self.num_outputs :])


# ---------------------------------------------------------------------------------------------- what an instruction does

Value = torch.Tensor
Result = torch.Tensor | tuple[torch.Tensor, ...] | None
Op = Callable[[Machine, Value, Value, int], Result]
OPS: dict[str, Op] = {}
EFFECTS: dict[str, list[str]] = {}


def op(effect: str) -> Callable[[Op], Op]:
    """Add an instruction to `OPS`."""

    def register(function: Op) -> Op:
        OPS[function.__name__] = function
        EFFECTS.setdefault(effect, []).append(function.__name__)
        return function

    return register


def number(k: int) -> float:
    return NUMBERS[k % len(NUMBERS)]


def _wide(m: Machine, x: Value) -> Value:
    return x if x.shape[-1] == WIDTH else F.pad(x, (0, WIDTH))[..., :WIDTH]


UNARY = (torch.tanh, torch.sigmoid, torch.sin, torch.cos, F.silu, F.gelu, torch.square, F.softplus, torch.relu, F.elu)


@op("pointwise")
def unary(m: Machine, x: Value, y: Value, k: int) -> Result:
    return UNARY[k % len(UNARY)](x)


@op("pointwise")
def exponential(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.exp(x.clamp(-3, 1) * number(k) * 0.5)


@op("pointwise")
def binary(m: Machine, x: Value, y: Value, k: int) -> Result:
    forms = (torch.add, torch.sub, torch.mul, torch.maximum, lambda a, b: a / (b.abs() + 1), torch.atan2)
    return forms[k % len(forms)](x, y)


@op("pointwise")
def chosen(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.where(x > y * number(k), x.sin(), y * 2)


@op("pointwise")
def softmax(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.softmax(x * number(k), k % 2)


@op("literal")
def scaled(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.add(x * number(k), y, alpha=k % 3 - 1).sin()


@op("literal")
def scheduled(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.tanh(x * (1 + 0.3 * m.now)) + 0.1 * m.now  # a Python number that changes from step to step


@op("literal")
def scheduled_op(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = (torch.tril if (m.now + k) % 2 else torch.triu)(x, m.now % 3 - 1)
    return x.cumsum((m.now + k) % 2).sin()


@op("literal")
def constant(m: Machine, x: Value, y: Value, k: int) -> Result:
    fresh = torch.tensor([0.1 * (m.now + j) for j in range(x.shape[-1])])
    return torch.sin(x * fresh) * torch.full((1,), number(k) + m.now)


@op("matmul")
def linear(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.linear(_wide(m, x), m.w[k % 2], m.v[k % 2] if k % 3 else None)


@op("matmul")
def product(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x @ y.t()) @ x * 0.3 if k % 2 else torch.mm(_wide(m, x), m.w[k % 2].t() @ m.w[0])


@op("matmul")
def attention(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.scaled_dot_product_attention(x[None], y[None], x[None], dropout_p=0.3 if k % 2 else 0.0)[0]


@op("view")
def transposed(m: Machine, x: Value, y: Value, k: int) -> Result:
    return x.t()


@op("view")
def sliced(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x[:, ::2], x[1:], x[:, : max(1, x.shape[1] - 1)], x[:2])[k % 4] if min(x.shape) > 2 else x.view(x.shape)


@op("view")
def expanded(m: Machine, x: Value, y: Value, k: int) -> Result:
    return x.mean(k % 2, keepdim=True).expand(x.shape)


@op("view")
def parts(m: Machine, x: Value, y: Value, k: int) -> Result:
    left, right = x.tensor_split(2, dim=-1)
    return (torch.cat([right, left], -1), left) if left.numel() else torch.cat([x, y], 0)


@op("view")
def strided(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.contiguous() if not x.is_contiguous() else x
    rows, columns = x.shape
    return x.as_strided((rows, max(1, columns - 1)), (columns, 1)) if rows * columns else x


@op("in place")
def written_copy(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.clone()
    forms: tuple[Callable[[], Any], ...] = (
        lambda: x.mul_(number(k)),
        lambda: x.add_(y.sin(), alpha=0.5),
        lambda: x.sigmoid_(),
        lambda: F.relu_(x),
        lambda: x.masked_fill_(y > 0, 0.25),
        lambda: x[:, :1].copy_(y[:, :1].cos()),
        lambda: x.t()[0].mul_(number(k)),
        lambda: x.index_fill_(0, torch.tensor([0]), 0.5),
    )
    forms[k % len(forms)]()
    return x


@op("overwriting")
def written(m: Machine, x: Value, y: Value, k: int) -> Result:
    # What was saved of x before makes plain autograd raise.
    forms: tuple[Callable[[], Any], ...] = (
        lambda: x.mul_(number(k)),
        lambda: x.add_(0.1),
        lambda: F.leaky_relu_(x, 0.2),
        lambda: x[:, :1].add_(0.5),
    )
    if x.is_contiguous():  # not where several elements share memory
        forms[k % len(forms)]()
    return None


@op("in place")
def view_written(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x + 0
    x[:, k % x.shape[1]] = y[:, 0].detach() + 1 if k % 2 else y[:, 0]
    x.t()[0] -= 0.1
    return x, x.square()


@op("in place")
def data_written(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.sin()
    x.data.mul_(number(k))
    return x.cos()


@op("in place")
def out_variant(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.no_grad():
        scale = torch.empty(0)
        torch.mul(x, number(k), out=scale)
        scale.clamp_(-1, 1)
    return torch.sin(x * scale)


@op("random")
def dropout(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.dropout(x.sin(), (0.2, 0.5, 0.8)[k % 3], training=True, inplace=k % 2 == 0)


@op("random")
def own_draw(m: Machine, x: Value, y: Value, k: int) -> Result:
    keep = torch.rand(x.shape, generator=m.gen) > 0.3
    return x.tanh() * keep if k % 2 else x * torch.empty_like(x).normal_(generator=m.gen)


@op("random")
def drawn(m: Machine, x: Value, y: Value, k: int) -> Result:
    noise = (torch.rand_like, torch.randn_like, lambda t: torch.bernoulli(t.detach().sigmoid()))[k % 3](x)
    return torch.sin(x * noise) + noise[torch.randperm(x.shape[0])]


@op("random")
def leaky_noise(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.rrelu(x + 0, 0.1, 0.6, training=True, inplace=k % 2 == 0)


@op("random")
def python_draw(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.cos(x * random.uniform(0.5, 1.5)) if random.random() < 0.5 else torch.sin(x * random.uniform(0.5, 1.5))


@op("state")
def batch_norm(m: Machine, x: Value, y: Value, k: int) -> Result:
    wide = _wide(m, x)
    return m.norm(wide) if wide.shape[0] > 1 else F.layer_norm(wide, (WIDTH,), m.v[0])


@op("state")
def moving_mean(m: Machine, x: Value, y: Value, k: int) -> Result:
    wide = _wide(m, x)
    out = torch.tanh(wide - m.mean) * (1 + 0.01 * m.count.item())
    with torch.no_grad():
        m.mean.lerp_(wide.mean(0), 0.3)
        m.count += 1
    return out


@op("state")
def scratch_used(m: Machine, x: Value, y: Value, k: int) -> Result:
    wide = _wide(m, x)
    with torch.no_grad():
        m.scratch.copy_(wide[0]).abs_()
    return torch.sin(wide * m.scratch.clone())


@op("state")
def layer_norm(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.layer_norm(_wide(m, x), (WIDTH,), m.v[0], m.v[1])


@op("structure")
def sorted_values(m: Machine, x: Value, y: Value, k: int) -> Result:
    values, index = x.sort(-1, descending=k % 2 == 0)
    return values * y.gather(-1, index), y.cummax(0).values


@op("structure")
def indexed(m: Machine, x: Value, y: Value, k: int) -> Result:
    rows = torch.randint(0, x.shape[0], (x.shape[0],)) if k % 2 else torch.arange(x.shape[0]).flip(0)
    return x[rows].sin() + torch.zeros_like(x).index_add(0, rows, y * 0.5)


@op("structure")
def branch(m: Machine, x: Value, y: Value, k: int) -> Result:
    return x.sin() if float(x.detach().sum()) > 0 else x.cos()  # as many saved tensors either way


@op("structure")
def detached(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.no_grad():
        gate = torch.sigmoid(y @ y.t()) @ x
    return x * gate + x.detach().exp().clamp_max(2) * y


@op("types")
def casts(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x.double().sin().float() if k % 2 else x.bfloat16().float()) * y


@op("types")
def autocast(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=k % 2 == 0):
        return F.linear(torch.tanh(F.linear(_wide(m, x), m.w[0])), m.w[k % 2]).float()


class _Saving(torch.autograd.Function):
    """Saves an intermediate and keeps another one on ctx."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:  # type: ignore[override]
        s = torch.sigmoid(x * scale)
        ctx.save_for_backward(s, x)
        ctx.scale, ctx.held = scale, s * 2
        return s * x

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        assert len(ctx.saved_tensors) == 2
        s, x = ctx.saved_tensors
        return g * (s + x * s * (1 - s) * ctx.scale) + 0 * ctx.held, None


@op("autograd")
def custom_function(m: Machine, x: Value, y: Value, k: int) -> Result:
    return _Saving.apply(x, number(k))


@op("autograd")
def checkpointed(m: Machine, x: Value, y: Value, k: int) -> Result:
    return checkpoint(lambda t: torch.tanh(F.linear(F.dropout(t, 0.3), m.w[0])).sin(), _wide(m, x), use_reentrant=False)  # type: ignore[return-value]


@op("autograd")
def hooked(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.sin()
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(-1, 1) * number(k))
    return x * y


# ---------------------------------------------------------------------------------------------- drawing them


def instructions() -> st.SearchStrategy[Instruction]:
    """One instruction of any effect."""
    small = st.integers(0, 7)
    name = st.sampled_from(sorted(EFFECTS)).flatmap(lambda effect: st.sampled_from(EFFECTS[effect]))
    return st.builds(Instruction, name, small, small, small)


@st.composite
def specs(draw: st.DrawFn, most_lines: int = 8) -> Spec:
    """Programs of one to three blocks that run in any order."""
    blocks = draw(st.lists(st.lists(instructions(), min_size=2, max_size=most_lines), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=4))
    sizes = draw(st.sampled_from([(4, 4, 4), (3, 3, 5), (4, 2, 4), (5, 5, 1)]))
    form = draw(st.sampled_from([*[""] * len(FORMS), *FORMS]))
    return Spec(tuple(map(tuple, blocks)), tuple(order), sizes, draw(st.integers(1, 4)), form)


def _inputs(spec: Spec, i: int, built: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(spec.sizes[i], WIDTH, generator=torch.Generator().manual_seed(i))
    return (x.requires_grad_(),), {}


def _next_step(model: Any, i: int) -> None:
    blocks: Any = model.blocks
    for block in blocks:
        block.now = i


def _generators(model: Any) -> dict[str, Any]:
    return {"generators": [block.gen.get_state() for block in model.blocks]}


def _loss(out: Any) -> torch.Tensor:
    return torch.stack([t.sin().mean() for t in out if t.numel()]).sum()


class _Rounding(TorchDispatchMode):
    """A user's mode that changes results, in forward and in backward, but must not reach a replay."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rounded = func in (torch.ops.aten.tanh.default, torch.ops.aten.sin.default, torch.ops.aten.silu.default)
        return out * 0.75 if rounded else out


def _in(around: Callable[[], Any]) -> Step:
    """A step with something active around the whole of it, backward included."""

    def step(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> torch.Tensor:
        with around():
            loss = loss_fn(model(*args, **kwargs))
            loss.backward()
        return loss

    return step


def _twice(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


def _penalty(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    (grad,) = torch.autograd.grad(loss, args[0], create_graph=True, allow_unused=True)
    (loss if grad is None else loss + grad.square().sum()).backward()
    return loss


def _two_alive(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> torch.Tensor:
    first, second = loss_fn(model(*args, **kwargs)), loss_fn(model(args[0].detach() * 0.5))
    second.backward()
    first.backward()
    return first


def _partly(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> torch.Tensor:
    out = model(*args, **kwargs)
    with torch.no_grad():
        model(*args, **kwargs)
    params = list(model.parameters())
    grads = torch.autograd.grad(out[-1].sin().mean(), params, retain_graph=True, allow_unused=True)
    loss = loss_fn(out) + 0.1 * torch.stack([g.square().sum() for g in grads if g is not None] or [out[0].sum()]).sum()
    loss.backward()
    return loss


FORMS: dict[str, Step] = {
    "autocast": _in(lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "mode": _in(_Rounding),
    "anomaly": _in(lambda: torch.autograd.set_detect_anomaly(True, check_nan=False)),
    "twice": _twice,
    "penalty": _penalty,
    "two alive": _two_alive,
    "partly": _partly,
}


def program_of(spec: Spec) -> Program:
    """The program that carries out a specification."""

    def build() -> Case:
        x = torch.randn(spec.sizes[0], WIDTH, generator=torch.Generator().manual_seed(0))
        return case(Net(spec).train(), x.requires_grad_(), loss=_loss)

    return Program(
        name="random",
        kind="fuzz",
        build=build,
        why="hypothesis made it",
        inputs=functools.partial(_inputs, spec),
        step=FORMS.get(spec.form),
        between=_next_step,
        observe=_generators,
        restored=frozenset({"generators"}),
        plain_raises=RuntimeError,
        may_drop_nothing=True,
        not_finite=True,
    )
