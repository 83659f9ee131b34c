"""What the instructions of random programs do: what is rarer, and what is done to a step rather than computed in it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

import keepwise

from .fuzz_machine import WIDTH, Machine, Result, Value, number, op, wide


def _rows(x: Value, k: int) -> torch.Tensor:
    return torch.randint(0, x.shape[0], (x.shape[0],)) if k % 2 else torch.arange(x.shape[0]).roll(k)


# ---------------------------------------------------------------------------------------------- indexing


@op("indexing")
def put(m: Machine, x: Value, y: Value, k: int) -> Result:
    rows = _rows(x, k)
    if k % 4 < 2:
        return x.index_put((rows,), y.sin(), accumulate=k % 3 == 0)
    x = x.clone()
    x.index_put_((rows,), y.cos(), accumulate=True)
    x[x > 0.5] = number(k)
    return x.square()


@op("indexing")
def scattered(m: Machine, x: Value, y: Value, k: int) -> Result:
    index = _rows(x, k)[:, None].expand(x.shape)
    forms: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: x.scatter(0, index, y.sin()),
        lambda: x.scatter_add(0, index, y),
        lambda: torch.zeros_like(x).scatter_reduce(0, index, x * y, "prod", include_self=False),
        lambda: torch.zeros_like(x).scatter_reduce_(0, index, y, "amax"),
        lambda: x.clone().scatter_add_(0, index, x),
    )
    return forms[k % len(forms)]().sin()


@op("indexing")
def masked(m: Machine, x: Value, y: Value, k: int) -> Result:
    mask = x.detach() > y.detach()
    if k % 2:
        return x.masked_scatter(mask, y.sin().flatten().contiguous())
    chosen = torch.masked_select(x, mask)  # its length depends on data
    return x * chosen.square().mean() if chosen.numel() else x.sin()


@op("indexing")
def rows_by_data(m: Machine, x: Value, y: Value, k: int) -> Result:
    keep = x.detach().sum(1) > number(k) - 1
    return torch.tanh(x[keep]) * y[keep] if int(keep.sum()) > 1 else x.sin()


@op("indexing")
def embedded(m: Machine, x: Value, y: Value, k: int) -> Result:
    index = (x.detach().abs() * 3).long().clamp(0, WIDTH - 1)[:, 0]
    return F.embedding(index, m.w[k % 2], max_norm=None) * number(k)


@op("indexing")
def along(m: Machine, x: Value, y: Value, k: int) -> Result:
    order = x.detach().sort(dim=0, stable=True).indices
    return torch.take_along_dim(y, order, 0).sin() * x.gather(0, order)


# ---------------------------------------------------------------------------------------------- several results


@op("tuples")
def split_and_stacked(m: Machine, x: Value, y: Value, k: int) -> Result:
    first, *rest = x.unbind(0) if k % 2 else x.split(1, dim=-1)
    return torch.stack([first.sin(), *(t.cos() for t in rest)], k % 3 % 2).reshape(x.shape[0], -1)


@op("tuples")
def chunks_written(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.sin()
    halves = torch.tensor_split(x, 2, dim=k % 2)
    with torch.no_grad():
        for t in x.detach().clone().chunk(2, -1):
            t.mul_(number(k))
    return torch.cat([t.square() for t in halves], k % 2)


@op("tuples")
def topmost(m: Machine, x: Value, y: Value, k: int) -> Result:
    values, index = x.topk(min(2, x.shape[1]), -1)
    low = y.min(0, keepdim=True)
    return (values * y.gather(-1, index)).sin(), low.values * x


@op("tuples")
def moments(m: Machine, x: Value, y: Value, k: int) -> Result:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    least, most = torch.aminmax(y, dim=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 0.1) * (most - least)


@op("tuples")
def cell(m: Machine, x: Value, y: Value, k: int) -> Result:
    x, y = wide(m, x), wide(m, y)
    weight = torch.cat([m.w[0], m.w[1], m.w[0].sin(), m.w[1].t()])
    hidden, state = torch.lstm_cell(x, (y, y.tanh()), weight, weight * 0.5)
    return hidden, state


@op("tuples")
def pooled(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = wide(m, x)
    values, index = F.max_pool1d(x[None], 2, return_indices=True)
    return F.max_unpool1d(values.sin(), index, [2])[0] * x


@op("tuples")
def factors(m: Machine, x: Value, y: Value, k: int) -> Result:
    square = m.w[k % 2] @ m.w[k % 2].t() + torch.eye(WIDTH)
    return torch.linalg.solve(square, wide(m, x).t()).t() * torch.linalg.slogdet(square).logabsdet


# ---------------------------------------------------------------------------------------------- layouts


@op("layout")
def convolved(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = wide(m, x)
    image = x.reshape(1, 1, *x.shape).expand(2, 2, *x.shape)
    if k % 2:
        image = image.contiguous(memory_format=torch.channels_last)
    kernel = torch.stack([m.w[0], m.w[1]])[None, :, :3, :3]
    return F.conv2d(image, kernel, padding=1)[k % 2, 0]


@op("layout")
def overlapping(m: Machine, x: Value, y: Value, k: int) -> Result:
    windows = wide(m, x).unfold(1, 2, 1)  # overlapping in memory
    return windows.sin().sum(-1) * windows[..., 0]


@op("layout")
def permuted_copy(m: Machine, x: Value, y: Value, k: int) -> Result:
    holed = torch.empty_strided(x.shape, (3 * x.shape[1], 3))
    holed.copy_(x.detach())
    return torch.sin(x * holed) * x.t().contiguous().t()


@op("layout")
def broadcast(m: Machine, x: Value, y: Value, k: int) -> Result:
    row = x.mean(0, keepdim=True).expand_as(x)
    return row.sin() * row * y  # what is saved is an expanded tensor


@op("layout")
def interpolated(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.interpolate(x[None, None], scale_factor=2, mode=("nearest", "bilinear")[k % 2])[0, 0, ::2, ::2].tanh()


# ---------------------------------------------------------------------------------------------- writes


@op("resizing")
def resized(m: Machine, x: Value, y: Value, k: int) -> Result:
    room = torch.empty(0)
    room.resize_(x.shape).copy_(x.detach()).mul_(number(k))
    out = torch.sin(x * room)
    if k % 2:
        room = room.clone()
        room.resize_(1, 1)
    return out


@op("resizing")
def out_slice(m: Machine, x: Value, y: Value, k: int) -> Result:
    room = torch.zeros(x.shape[0], x.shape[1] + 1)
    with torch.no_grad():
        torch.mul(x, y, out=room[:, 1:])
        torch.sigmoid(x, out=room[:, :-1])
    return room[:, 1:] * x


@op("resizing")
def into_buffer(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.no_grad():
        torch.mean(wide(m, x), 0, out=m.scratch)
    return torch.cos(wide(m, x) * m.scratch.clone())


@op("resizing")
def set_elsewhere(m: Machine, x: Value, y: Value, k: int) -> Result:
    room = torch.empty(0)
    room.set_(x.detach().clone())  # pyright: ignore[reportArgumentType]
    return x.sin() * room.exp().clamp(max=2)


@op("overwriting")
def buffer_written_after_use(m: Machine, x: Value, y: Value, k: int) -> Result:
    out = wide(m, x) + m.mean if k % 3 else torch.sin(wide(m, x) * m.mean)
    with torch.no_grad():
        m.mean.add_(0.1)
    return out


@op("overwriting")
def argument_of_block_written(m: Machine, x: Value, y: Value, k: int) -> Result:
    out = x + number(k)
    if x.is_contiguous() and not x.is_leaf:
        x.relu_()
    return out.tanh_()


@op("overwriting")
def result_written_twice(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.exp().clamp(max=2) if k % 2 else x.sigmoid() + 0
    x += y.sin()
    x[:1].mul_(number(k))
    return x


@op("in place")
def detached_in_place(m: Machine, x: Value, y: Value, k: int) -> Result:
    gate = y.sin()
    gate.detach_()
    return x * gate.mul_(number(k))


@op("in place")
def residual_in_place(m: Machine, x: Value, y: Value, k: int) -> Result:
    out = x.clone()
    out += F.linear(wide(m, y), m.w[0])[:, : x.shape[1]].sin()
    out.view(-1)[::2].clamp_(-0.5, 0.5)
    return out


@op("in place")
def touched_up(m: Machine, x: Value, y: Value, k: int) -> Result:
    fresh = x * 1.5  # nobody saves it
    if (m.now + k) % 3 == 1:
        (fresh.data if k % 2 else fresh).clamp_(max=0.1)
    return torch.tanh(fresh) * torch.sigmoid(x)


@op("in place")
def numpy_written(m: Machine, x: Value, y: Value, k: int) -> Result:
    noise = torch.zeros(x.shape)
    noise.numpy()[...] = np.random.rand(*x.shape)  # before anything of it is saved
    return torch.sin(x * noise)


# ---------------------------------------------------------------------------------------------- draws


@op("random")
def other_draws(m: Machine, x: Value, y: Value, k: int) -> Result:
    forms: tuple[Callable[[], torch.Tensor], ...] = (
        lambda: torch.empty_like(x).uniform_(-1, 1),
        lambda: torch.empty_like(x).exponential_(),
        lambda: torch.multinomial(torch.ones(x.shape[0], 5), x.shape[1], replacement=True) * 0.3,
        lambda: torch.normal(x.detach(), 0.5),
        lambda: torch.randint_like(x, 0, 3),
        lambda: torch.poisson(x.detach().abs()),
        lambda: torch.zeros(x.shape).t().bernoulli_(0.5).t(),
    )
    return torch.sin(x * forms[k % len(forms)]())


@op("random")
def own_generator_in_place(m: Machine, x: Value, y: Value, k: int) -> Result:
    noise = torch.zeros(x.shape)
    noise[:, 1:].normal_(generator=m.gen)
    rows = torch.randperm(x.shape[0], generator=m.gen)
    return torch.tanh(x * noise) + x[rows].sin()


@op("random")
def dropped_features(m: Machine, x: Value, y: Value, k: int) -> Result:
    forms = (F.alpha_dropout, lambda t, p, training: F.dropout1d(t[None], p, training)[0], F.feature_alpha_dropout)
    return forms[k % len(forms)](x.sin(), 0.4, training=True)


@op("random")
def gumbel(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.gumbel_softmax(x, tau=number(k), hard=k % 2 == 0) * y


@op("random")
def forked(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(k + m.now)
        noise = torch.rand_like(x)
    return torch.cos(x * noise) * torch.rand(1)


@op("random")
def reseeded(m: Machine, x: Value, y: Value, k: int) -> Result:
    torch.manual_seed(11 * k + m.now)
    return F.dropout(x.cos(), 0.4)


@op("random")
def fused_dropout(m: Machine, x: Value, y: Value, k: int) -> Result:
    kept, mask = torch.native_dropout(x.sin(), 0.4, True)  # takes no generator
    return kept.cos() if k % 2 else kept * mask


@op("random")
def numpy_draw(m: Machine, x: Value, y: Value, k: int) -> Result:
    return torch.sin(x * float(np.random.rand())) * torch.from_numpy(np.random.rand(1, x.shape[1])).float()


# ---------------------------------------------------------------------------------------------- state


@op("state")
def power_iteration(m: Machine, x: Value, y: Value, k: int) -> Result:
    w = m.w[k % 2]
    with torch.no_grad():
        m.direction.copy_(F.normalize(w.t() @ (w @ m.direction), dim=0, eps=1e-6))
    v = m.direction.clone()
    return F.linear(wide(m, x), w / ((w @ v).norm() + 0.1))


@op("state")
def buffer_replaced(m: Machine, x: Value, y: Value, k: int) -> Result:
    if not torch.is_inference_mode_enabled():  # else it could not be saved in the next step
        m.mean = (m.mean * 0.5 + wide(m, x).detach().mean(0)).clone()
    return torch.sin(wide(m, x) * m.mean)


@op("state")
def held_by_user(m: Machine, x: Value, y: Value, k: int) -> Result:
    feature = x.sin()
    m.held = [feature.detach() if k % 2 else feature]
    return feature.square() * number(k)


@op("state")
def read_from_last_step(m: Machine, x: Value, y: Value, k: int) -> Result:
    last = m.last
    if not torch.is_inference_mode_enabled():
        m.last = wide(m, x).detach().mean(0).float()
    return torch.tanh(wide(m, x) * last)


@op("state")
def large_scratch(m: Machine, x: Value, y: Value, k: int) -> Result:
    out = torch.tanh(torch.tanh(x + m.large[: x.shape[1]]) * 2)  # autograd does not save what is read
    if m.now and k % 4:
        with torch.no_grad():
            m.large.mul_(-0.5).add_(0.3)
    return out


@op("state")
def group_norm(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.group_norm(wide(m, x), 2, m.v[0], m.v[1]) if k % 2 else F.instance_norm(wide(m, x)[None] * 2)[0]


# ---------------------------------------------------------------------------------------------- structure


@op("structure")
def loop_by_data(m: Machine, x: Value, y: Value, k: int) -> Result:
    for _ in range(3):
        x = torch.tanh(x * 1.2)
        if float(x.detach().abs().mean()) < 0.5:
            break
    return x


@op("structure")
def some_steps_only(m: Machine, x: Value, y: Value, k: int) -> Result:
    return x if (m.now + k) % 3 == 0 else x.sin() * F.dropout(y, 0.3)


@op("structure")
def other_op_by_step(m: Machine, x: Value, y: Value, k: int) -> Result:
    return (x.sin() * y, x.cos() * y, torch.maximum(x, y).tanh())[(m.now * k) % 3]


@op("structure")
def other_leaf_by_step(m: Machine, x: Value, y: Value, k: int) -> Result:
    return F.linear(torch.sin(wide(m, x)), m.w[(m.now + k) % 2].sin())


@op("structure")
def recursion(m: Machine, x: Value, y: Value, k: int) -> Result:
    def down(t: torch.Tensor, depth: int) -> torch.Tensor:
        return t if depth == 0 else t.sin() + down(t * number(k), depth - 1)

    return down(x, 1 + k % 3)


@op("structure")
def caught(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = x.sin()
    try:
        return (x * y).view(7, -1)
    except RuntimeError:
        return x.cos() * y


@op("structure")
def unused(m: Machine, x: Value, y: Value, k: int) -> Result:
    (x.exp() * y).tanh().matmul(y.t())  # its graph goes at once
    return x * 0.9


@op("structure")
def new_leaf(m: Machine, x: Value, y: Value, k: int) -> Result:
    leaf = x.detach().sin().requires_grad_()
    return leaf.cos() * y


# ---------------------------------------------------------------------------------------------- types


@op("types")
def complex_numbers(m: Machine, x: Value, y: Value, k: int) -> Result:
    z = torch.complex(x, y.sin())
    z = z.conj() * number(k) if k % 2 else torch.fft.fft(z)
    return (z * z).imag + z.abs() if k % 3 else torch.view_as_real(z.exp())[..., 1]


@op("types")
def bits(m: Machine, x: Value, y: Value, k: int) -> Result:
    flipped = x.detach().contiguous().view(torch.int32).bitwise_and(~0xFF).view(torch.float32)
    return x * flipped.clamp(-1, 1) + (x.detach() > 0).to(x.dtype) * y


@op("types")
def half_way(m: Machine, x: Value, y: Value, k: int) -> Result:
    low = x.to(torch.float16 if k % 2 else torch.bfloat16)
    return (
        (low * low.sin()).to(torch.float64).sqrt_().float().nan_to_num(0.1)
        if k % 3 == 0
        else (low.tanh() * low).float()
    )


@op("types")
def sparse_product(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.autocast("cpu", enabled=False):
        mask = (y.detach() @ y.detach().t()).relu().float().to_sparse()
        return torch.sparse.mm(mask, x.float().sin()).tanh()


@op("types")
def autocast_shared(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        h = F.linear(wide(m, x), m.w[0]).relu()
        with torch.autocast("cpu", enabled=k % 2 == 0):
            h = F.linear(h.float(), m.w[1].float() if k % 2 else m.w[1]).float()
        with torch.no_grad():
            F.linear(h, m.w[k % 2])  # a cast cached without history
        return F.linear(h, m.w[0]).float()


# ---------------------------------------------------------------------------------------------- autograd


class _Dirty(torch.autograd.Function):
    """Writes its input, and gives a result that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:  # type: ignore[override]
        x.mul_(0.5)
        ctx.mark_dirty(x)
        ranks = x.argsort(-1)
        ctx.mark_non_differentiable(ranks)
        ctx.save_for_backward(x, ranks)
        return x, ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: torch.Tensor, _: Any) -> Any:  # type: ignore[override]
        x, ranks = ctx.saved_tensors
        return g * 0.5 + 0 * x + 0 * ranks


class _Hiding(torch.autograd.Function):
    """Keeps its tensors on ctx, saves a parameter, and saves nothing in some calls."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, all_saved: bool) -> torch.Tensor:  # type: ignore[override]
        ctx.hidden = torch.sin(x)
        ctx.all_saved = all_saved
        if all_saved:
            ctx.save_for_backward(w, None, torch.cos(x))
        return ctx.hidden * w

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.all_saved:
            return g * ctx.hidden, None, None
        w, nothing, cosine = ctx.saved_tensors
        assert nothing is None
        return g * w * cosine, (g * ctx.hidden).sum(0), None


@op("autograd")
def dirty_function(m: Machine, x: Value, y: Value, k: int) -> Result:
    return _Dirty.apply(x.sin() + 0)[0] * y


@op("autograd")
def hiding_function(m: Machine, x: Value, y: Value, k: int) -> Result:
    return _Hiding.apply(wide(m, x), m.v[k % 2], k % 3 != 0)


@op("autograd")
def region(m: Machine, x: Value, y: Value, k: int) -> Result:
    return keepwise.checkpoint(lambda t: torch.tanh(F.linear(F.dropout(t.sin(), 0.3), m.w[0])) * number(k), wide(m, x))


@op("autograd")
def inner_gradient(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.enable_grad():
        at = x if x.requires_grad else x.detach().requires_grad_()
        energy = (at.sin() * y).square().sum()
        (force,) = torch.autograd.grad(energy, at, create_graph=k % 2 == 0)
    return x.cos() * force


@op("autograd")
def transformed(m: Machine, x: Value, y: Value, k: int) -> Result:
    if k % 2:
        return torch.func.vmap(lambda r, s: torch.tanh(r * s) * r.sum())(x, y)
    return torch.func.grad(lambda t: (t.sin() * y.detach()).square().sum())(x.detach()) * x


@op("autograd")
def own_hooks(m: Machine, x: Value, y: Value, k: int) -> Result:
    around: Any = save_on_cpu() if k % 2 else saved_tensors_hooks(lambda t: t * 2, lambda t: t / 2)
    with around:
        x = torch.tanh(x) * y.sin()
    return x.square()


@op("autograd")
def watched_gradients(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = torch.sin(x)
    if x.requires_grad:
        x.retain_grad()
        node: Any = x.grad_fn
        node.register_prehook(lambda grads: tuple(g * number(k) for g in grads))
    return x * x


@op("autograd")
def without_gradients(m: Machine, x: Value, y: Value, k: int) -> Result:
    with torch.set_grad_enabled(k % 2 == 0):
        gate = torch.sigmoid(y * 2).mul_(number(k))
    with torch.inference_mode():
        table = torch.arange(x.shape[1]).float().sin()
    return x.tanh() * gate * table.clone()


@op("autograd")
def backend(m: Machine, x: Value, y: Value, k: int) -> Result:
    with sdpa_kernel(SDPBackend.MATH if k % 2 else SDPBackend.FLASH_ATTENTION):
        q = x[None, None]
        return F.scaled_dot_product_attention(q, y[None, None], q, is_causal=k % 3 == 0)[0, 0]


@op("autograd")
def read_early(m: Machine, x: Value, y: Value, k: int) -> Result:
    x = torch.tanh(x * number(k))
    node: Any = x.grad_fn
    if node is not None:
        assert torch.equal(node._saved_result.nan_to_num(), x.nan_to_num())  # unpacked in forward
    return x * random.choice((0.5, 1.5))
