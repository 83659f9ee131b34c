"""What the instructions of random programs do: the usual."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .fuzz_machine import WIDTH, Machine, Result, Value, number, op, wide

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
    if k % 2:
        fresh.mul_(1.1)  # carrying it out twice is not the same as once
    return torch.sin(x * fresh) * torch.full((1,), number(k) + m.now)


@op("matmul")
def linear(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.linear(wide(m, x), m.w[k % 2], m.v[k % 2] if k % 3 else None)


@op("matmul")
def product(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x @ y.t()) @ x * 0.3 if k % 2 else torch.mm(wide(m, x), m.w[k % 2].t() @ m.w[0])


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
    whole = wide(m, x)
    return m.norm(whole) if whole.shape[0] > 1 else F.layer_norm(whole, (WIDTH,), m.v[0])


@op("state")
def moving_mean(m: Machine, x: Value, y: Value, k: int) -> Result:
    whole = wide(m, x)
    out = torch.tanh(whole - m.mean) * (1 + 0.01 * m.count.item())
    with torch.no_grad():
        m.mean.lerp_(whole.mean(0), 0.3)
        m.count += 1
    return out


@op("state")
def scratch_used(m: Machine, x: Value, y: Value, k: int) -> Result:
    whole = wide(m, x)
    with torch.no_grad():
        if k % 2:
            m.scratch.lerp_(whole[0], 0.5).mul_(1.1)  # carrying it out twice is not the same as once
        else:
            m.scratch.copy_(whole[0]).abs_()
    return torch.sin(whole * m.scratch.clone())


@op("state")
def layer_norm(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.layer_norm(wide(m, x), (WIDTH,), m.v[0], m.v[1])


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


@op("structure")
def crossed(m: Machine, x: Value, y: Value, k: int) -> Result:
    a, b = torch.tanh(x), torch.sin(y)
    if (m.now + k) % 2:
        a, b = b, a
    return torch.sin(torch.exp(a * 0.5) * 2.0) * b


@op("types")
def casts(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x.double().sin().float() if k % 2 else x.bfloat16().float()) * y


@op("types")
def autocast(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=k % 2 == 0):
        return F.linear(torch.tanh(F.linear(wide(m, x), m.w[0])), m.w[k % 2]).float()


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
    return checkpoint(lambda t: torch.tanh(F.linear(F.dropout(t, 0.3), m.w[0])).sin(), wide(m, x), use_reentrant=False)  # type: ignore[return-value]


@op("autograd")
def hooked(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.sin()
    if x.requires_grad:
        x.register_hook(lambda g: g.clamp(-1, 1) * number(k))
    return x * y
