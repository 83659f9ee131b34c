"""More types and precisions: what a hostile model does."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from .parts import Block, Module, Stack
from .program import Case, Collection, Loss, case, mean_square

PRECISION = Collection("precision", is_wild=True)
COLLECTIONS = (PRECISION,)


def _scaled_steps(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    scaler = model.scaler
    total = torch.zeros(())
    for k, scale in enumerate((1.0, float("inf") if model.steps % 2 else 1.0)):
        model.optimizer.zero_grad(set_to_none=bool(k))
        with torch.autocast("cpu", torch.float16):
            loss = loss_fn(model(args[0])) * scale
        scaler.scale(loss).backward()
        scaler.unscale_(model.optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(model.optimizer)
        scaler.update()
        total = total + loss.detach()
    model.steps += 1
    return total


@PRECISION.add(
    "a loss scaler meets an infinity in every other step, and clips",
    step=_scaled_steps,
    update=False,
    not_finite=True,
    python_state=True,
    observe=lambda m: {"scale": m.scaler.get_scale()},
)
def scaler_with_infinities() -> Case:
    model: Any = Stack()
    model.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    model.steps = 0
    return case(model, torch.randn(4, 8))


@PRECISION.add("autocast opened and closed in each block, with shared weights and a weight changed between")
def autocast_in_pieces() -> Case:
    class Cast(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y = F.linear(h, self.up.weight.t()[:12, :8].t().repeat(1, 1)[:12, :12]) if False else self.down(h)
                y = self.up(y)
                with torch.autocast("cpu", enabled=False):
                    y = torch.tanh(y.float())
                return F.linear(y, self.up.weight @ self.down.weight).float()

    return case(Stack(Cast), torch.randn(4, 8))


@PRECISION.add("orthogonal, weight-normed, spectral and own parametrizations, cached in part")
def parametrized_weights() -> Case:
    class Symmetric(nn.Module):
        def forward(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu() + w.triu(1).t()

        def right_inverse(self, w: torch.Tensor) -> torch.Tensor:
            return w.triu()

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
            parametrizations.orthogonal(self.layers[0], orthogonal_map="householder")
            parametrizations.weight_norm(self.layers[1], dim=0)
            parametrizations.spectral_norm(self.layers[2])
            parametrize.register_parametrization(self.layers[3], "weight", Symmetric())

        def forward(self, x: torch.Tensor) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            with parametrize.cached():
                for layer in self.layers:
                    x = torch.sin(layer(x) + layer(x * 2))
            return x

    return case(Net(), torch.randn(4, 8))


@PRECISION.add(
    "older weight norm and spectral norm hooks, which keep the weight as an attribute", ops=("_weight_norm_interface",)
)
def older_norm_hooks() -> Case:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Stack()
        for block in model.blocks:
            nn.utils.weight_norm(block.up)
            nn.utils.spectral_norm(block.down, n_power_iterations=2)
    return case(model, torch.randn(4, 8))


@PRECISION.add("complex attention: conjugate transposes, magnitudes, polar forms, transforms, imaginary views")
def complex_attention() -> Case:
    class Complex(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            z = torch.complex(h, torch.tanh(h))
            scores = (z @ z.mH).abs().softmax(-1)
            z = torch.polar(scores @ h.exp().clamp(max=3), z.angle()) * z.conj()
            z = torch.fft.irfft(torch.fft.rfft(z.real) * 1j, n=12) + z.imag.neg()
            return z * torch.view_as_real(torch.complex(h, h)).sum(-1).conj()

    return case(Stack(Complex), torch.randn(4, 8))


@PRECISION.add(
    "sparse embeddings and bags, a sparse matrix product with CSR, masks of sparse tensors, summed gradients"
)
def sparse_of_many_kinds() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(30, 8, sparse=True)
            self.bag = nn.EmbeddingBag(30, 8, mode="sum", sparse=True)
            self.values = nn.Parameter(torch.rand(6))
            self.stack = Stack()

        def forward(self, ids: torch.Tensor) -> Any:
            index = torch.tensor([[0, 1, 2, 3, 0, 2], [1, 2, 3, 0, 3, 1]])
            with torch.sparse.check_sparse_tensor_invariants(enable=False):
                graph = torch.sparse_coo_tensor(index, torch.tanh(self.values), (4, 4))
                x = torch.sparse.mm(graph, self.e(ids).mean(1)) + self.bag(ids)
                x = x + torch.sparse.softmax(graph, 1).to_dense() @ x
            return self.stack(x)

    return case(Net(), torch.randint(0, 30, (4, 5)), loss=mean_square)


@PRECISION.add(
    "jagged rows with other lengths each step: products, norms, padding and back",
    opaque=True,
    inputs=lambda i, built: ((_jagged(i),), {}),
)
def jagged_lengths() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
            self.norm = nn.LayerNorm(8)

        def forward(self, rows: torch.Tensor) -> Any:
            for layer in self.layers:
                rows = torch.relu(self.norm(layer(rows))) * rows
            padded = torch.nested.to_padded_tensor(rows, 0.5)
            return torch.tanh(padded @ padded.transpose(1, 2))

    return case(Net(), _jagged(0))


def _jagged(i: int) -> torch.Tensor:
    g = torch.Generator().manual_seed(i)
    return torch.nested.nested_tensor([torch.randn(n + i, 8, generator=g) for n in (2, 3, 1)], layout=torch.jagged)


@PRECISION.add("dynamic int8 activations: scales from data, products of integers, straight-through")
def integer_products() -> Case:
    class Int8(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            scale = h.detach().abs().amax(-1, keepdim=True) / 127
            q = (h / scale).round().clamp(-127, 127).to(torch.int8)
            products = torch._int_mm(q.repeat(5, 2)[:, :16].contiguous(), torch.ones(16, 8, dtype=torch.int8))
            straight = h + (q.float() * scale - h).detach()
            return straight * torch.tanh(straight) + products[:4, :1].float() * 1e-3

    return case(Stack(Int8), torch.randn(4, 8))


@PRECISION.add(
    "quantised tensors in forward: quantize_per_tensor and per channel, dequantised in forward", ops=("quantize_per",)
)
def quantised_weights_made_inside() -> Case:
    class Quantised(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            q = torch.quantize_per_tensor(h.detach(), 0.05, 3, torch.quint8).dequantize()
            w = self.up.weight.detach()
            c = torch.quantize_per_channel(w, torch.full((12,), 0.02), torch.zeros(12), 0, torch.qint8).dequantize()
            return torch.tanh(h) * q + h @ c @ c.t()

    return case(Stack(Quantised), torch.randn(4, 8))


@PRECISION.add("channels last through convolutions, pools with indices, norms and upsampling, and 3-d")
def channels_last_everywhere() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=2) for _ in range(2))
            self.norm, self.back = nn.GroupNorm(2, 4), nn.ConvTranspose2d(4, 4, 2, stride=2)
            self.deep = nn.Conv3d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            x = x.to(memory_format=torch.channels_last)
            for conv in self.convs:
                y, where = F.max_pool2d(F.gelu(self.norm(conv(x))), 2, return_indices=True)
                x = x + F.max_unpool2d(y, where, 2) + self.back(y)
            x = F.interpolate(x, scale_factor=1.5, mode="bilinear") * x.mean()
            return self.deep(F.pixel_unshuffle(F.pad(x, (0, 1, 0, 1)), 2)[:, :4].unsqueeze(2)).squeeze(2)

    return case(Net(), torch.randn(2, 4, 6, 6))


@PRECISION.add("the same storage expanded, flipped, strided over and joined; a saved view of a view of a parameter")
def strides_of_every_kind() -> Case:
    class Strided(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            rows = h[:1].expand(4, 12)
            windows = h.unfold(1, 3, 1)
            diagonal = h.as_strided((4, 4), (12, 1)).diagonal()
            flipped = h.flip(0, 1).movedim(0, 1).mT
            y = rows * torch.tanh(windows.mean(-1).repeat(1, 2)[:, :12]) + diagonal[:, None] * flipped
            weight = self.up.weight.view(-1)[8:88].view(10, 8).t()
            return y.sin() * (weight.T @ weight).diagonal()[:1] + torch.cat([h[::2], h[1::2]]).cos()

    return case(Stack(Strided), torch.randn(4, 8))


@PRECISION.add(
    "the weights are bf16, the master copy fp32 sits in the optimizer, updated in the step",
    step=lambda m, a, k, f: _master(m, a, f),
    update=False,
)
def master_weights() -> Case:
    model: Any = Stack().to(torch.bfloat16)
    model.master = [p.detach().float() for p in model.parameters()]
    return case(model, torch.randn(4, 8, dtype=torch.bfloat16), loss=lambda out: out.float().square().mean())


def _master(model: Any, args: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    loss.backward()
    with torch.no_grad():
        for p, wide in zip(model.parameters(), [q.detach().float() for q in model.parameters()], strict=True):
            wide.sub_(p.grad.float(), alpha=0.01)
            p.copy_(wide)
    return loss.detach()


class _Scaled(torch.Tensor):
    """A subclass with a Python attribute, which functions of it keep."""

    scale: float

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        found = [a.scale for a in args if isinstance(a, cls) and hasattr(a, "scale")]
        if isinstance(out, cls) and found:
            out.scale = found[0] * 1.5
        return out


@PRECISION.add("a tensor subclass whose Python attribute decides a number in forward", may_drop_nothing=True)
def subclass_with_an_attribute() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.as_subclass(_Scaled)
            y.scale = 1.0
            y = torch.tanh(self.inp(y))
            number = getattr(y, "scale", 2.0)
            return super().forward(y.as_subclass(torch.Tensor) * number)

    return case(Net(), torch.randn(4, 8))


@contextlib.contextmanager
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@PRECISION.add("the default dtype changes inside forward")
def default_dtype_inside() -> Case:
    class Changing(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with _double():
                wide = torch.tensor([1.0, 2.0]).sum() * torch.linspace(0, 1, 12)
            return torch.tanh(h * wide).to(h.dtype) + torch.tensor(0.5)

    return case(Stack(Changing), torch.randn(4, 8))


@PRECISION.add("infinities masked, NaN replaced, where on both sides, and logs of zero", not_finite=True)
def infinities_masked() -> Case:
    class Masked(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            scores = h.masked_fill(h > 0.3, float("-inf")).softmax(-1)
            y = torch.where(h > 0, h.clamp(min=0).log(), torch.zeros(())).nan_to_num(0.0, 5.0, -5.0)
            return torch.tanh(y) + torch.nan_to_num(scores) * h.logcumsumexp(-1)

    return case(Stack(Masked), torch.randn(4, 8))
