"""Precision and types: casts, scalers, layouts, subclasses, strides and shared storage."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

from .parts import Block, Module, Stack, attributes
from .program import Case, Collection, Loss, case, mean_square

PROGRAMS = Collection("precision")


def _bf16() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


# ---------------------------------------------------------------------------------------------- autocast


@PROGRAMS.add(
    "the cache of cast weights: a shared layer is cast once, a pass under no_grad fills the cache first",
    observe=lambda m: {"dtype": str(m.inp.weight.grad.dtype)},
    ops=("_to_copy",),
    shows=lambda records: records[0].observed["dtype"] == "torch.float32",
)
def autocast_weight_cache() -> Case:
    class Sharing(nn.Module):
        def __init__(self, shared: nn.Linear) -> None:
            super().__init__()
            self.shared, self.own = shared, nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.own(self.shared(F.gelu(self.shared(x)))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(8, 8)
            self.inp, self.blocks = nn.Linear(8, 8), nn.ModuleList([Sharing(shared), Sharing(shared)])

        def forward(self, x: torch.Tensor) -> Any:
            with _bf16():
                with torch.no_grad():
                    target = self.blocks[0](self.inp(x))
                h = self.inp(x)
                for block in self.blocks:
                    h = block(h)
            return h.float(), target.float()

    return case(Net(), torch.randn(4, 8), loss=lambda o: F.mse_loss(o[0], o[1] * 0.5))


class _Mixed(Block):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return self.norm(h).softmax(-1) * F.gelu(h)


@PROGRAMS.add(
    "autocast around the whole model, as a training loop has it", around=_bf16, ops=("_to_copy", "layer_norm")
)
def autocast_around() -> Case:
    return case(Stack(_Mixed), torch.randn(4, 8), loss=lambda o: o.float().square().mean())


@PROGRAMS.add(
    "autocast without its cache, and switched off for a part",
    around=lambda: torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=False),
    ops=("_to_copy",),
)
def autocast_switched_off_inside() -> Case:
    class Careful(_Mixed):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            with torch.autocast("cpu", enabled=False):
                return x.float() @ self.up.weight.t() @ self.up.weight * 0.3

    return case(Stack(Careful, 2), torch.randn(4, 8))


class CastProduct(torch.autograd.Function):
    """A Function with autocast decorators."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return (g.to(x.dtype) @ w.t()).float(), (x.t() @ g.to(x.dtype)).float()


@PROGRAMS.add("a Function that casts its inputs itself", around=_bf16, ops=("_to_copy",))
def autocast_custom_function() -> Case:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(CastProduct.apply(x.float(), self.w).float()) + x

    return case(Stack(Product), torch.randn(4, 8), loss=lambda o: o.float().square().mean())


def _scaled_step(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        loss = loss_fn(model(*args, **kwargs))
    model.scaler.scale(loss).backward()
    model.scaler.unscale_(model.optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    model.scaler.step(model.optimizer)
    model.scaler.update()
    model.scale = float(model.scaler.get_scale())
    return loss


@PROGRAMS.add(
    "fp16 with a loss scaler that finds an overflow and skips a step",
    step=_scaled_step,
    not_finite=True,
    observe=attributes("scale"),
    python_state=True,
    update=False,
    num_steps=4,
    inputs=lambda i, built: ((built.args[0] * (1, 1e4, 1, 1)[i],), {}),
    shows=lambda records: len({r.observed["scale"] for r in records}) > 1,
)
def fp16_grad_scaler() -> Case:
    model: Any = Stack(_Mixed, 2)
    model.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**15, growth_interval=2)
    return case(model, torch.randn(4, 8), loss=lambda o: o.float().square().sum())


# ---------------------------------------------------------------------------------------------- dtypes


@PROGRAMS.add("weights in bf16, sums in float32, and back", ops=("_to_copy",))
def bf16_weights() -> Case:
    class Half(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return (h.float().exp().log1p() * 0.5).to(h.dtype).tanh()

    return case(
        Stack(Half).bfloat16(), torch.randn(4, 8, dtype=torch.bfloat16), loss=lambda o: o.float().square().mean()
    )


@PROGRAMS.add("float16 and float64 in one graph", ops=("_to_copy",))
def half_and_double() -> Case:
    class Both(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return h.double().sin().half().float() * h.half().sigmoid().float() + h.double().mean().float()

    return case(Stack(Both), torch.randn(4, 8))


@PROGRAMS.add("the default dtype is float64 while the model runs", around=lambda: _default_dtype(torch.float64))
def default_dtype_double() -> Case:
    class Fresh(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(h.shape) * torch.tensor(0.5) + torch.full((1,), 0.25)
            return torch.tanh(h * noise.to(h.dtype)) * torch.linspace(0, 1, h.shape[-1]).to(h.dtype)

    return case(Stack(Fresh), torch.randn(4, 8))


class _default_dtype:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __enter__(self) -> None:
        self.before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *exc: Any) -> None:
        torch.set_default_dtype(self.before)


@PROGRAMS.add("complex numbers: transforms, conjugates, views as real", ops=("_fft", "view_as_real"))
def complex_numbers() -> Case:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.lin = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(torch.tanh(self.lin(x)))
            turned = spectrum * self.w.conj() + spectrum.conj() * self.w
            power = torch.view_as_real(turned).square().sum(-1)
            return torch.fft.irfft(turned * torch.polar(power.sigmoid(), power), n=8) + x

    return case(Stack(Spectral), torch.randn(4, 8))


@PROGRAMS.add("a complex weight and a complex loss, lazily conjugated and negated", ops=("_conj",))
def complex_parameters() -> Case:
    class Unitary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.complex(x, x.flip(-1)) @ self.a
            h = h @ self.a.mH + h.imag * 1j + h.conj().imag
            return (h * h.conj()).real + torch.view_as_real(h.exp()).sum(-1) * 0.01

    return case(Unitary(), torch.randn(4, 6))


@PROGRAMS.add("booleans, small integers and indices are saved", ops=("topk", "gather", "aten.where"), heavy=True)
def integers_and_masks() -> Case:
    class Choosing(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            values, index = h.topk(6, -1)
            kept = torch.where(h > values[:, -1:], h, h.new_full((), -2.0)).masked_fill(h.abs() > 1.5, 0.0)
            pooled = F.max_pool1d(kept[:, None], 3, stride=1, padding=1)[:, 0]
            ordered, _ = h.sort(-1, descending=True)
            return pooled + h.gather(1, index.repeat(1, 2)) * ordered + kept.cummax(-1).values

    return case(Stack(Choosing), torch.randn(4, 8))


@PROGRAMS.add("NaN, infinities, negative zero and numbers close to zero come through", not_finite=True)
def special_values() -> Case:
    class Special(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            odd = h * h.new_tensor([float("nan"), float("inf"), -0.0, 1e-42, 1, 1, 1, 1, 1, 1, 1, 1])
            return torch.nan_to_num(torch.tanh(odd) * odd.sign(), 0.5) * h.sin() + torch.copysign(h.abs(), odd)

    return case(Stack(Special, 2), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- sparse, nested, quantised


@PROGRAMS.add("sparse adjacency with learned values", ops=("sparse",))
def sparse_messages() -> Case:
    index = torch.randint(0, 6, (2, 9))

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.edge = nn.Linear(8, 8), nn.Parameter(torch.rand(9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            adjacency = torch.sparse_coo_tensor(index, torch.sigmoid(self.edge), (6, 6), check_invariants=False)
            return x + torch.tanh(torch.sparse.mm(adjacency, self.lin(x)))

    return case(Stack(Graph), torch.randn(6, 8))


@PROGRAMS.add(
    "sparse gradients of an embedding and a bag",
    observe=lambda m: {"layout": str(m.emb.weight.grad.layout)},
    shows=lambda records: records[0].observed["layout"] == "torch.sparse_coo",
    ops=("embedding",),
)
def sparse_gradients() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.bag = nn.Embedding(12, 8, sparse=True), nn.EmbeddingBag(12, 8, mode="max")
            self.blocks = nn.ModuleList([Block() for _ in range(2)])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.emb(ids).mean(1) + self.bag(ids)
            for block in self.blocks:
                x = block(x)
            return x

    return case(Net(), torch.randint(0, 12, (4, 3)))


@PROGRAMS.add("nested tensors with jagged rows", ops=("values",), opaque=True, may_drop_nothing=True)
def jagged_rows() -> Case:
    class Jagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)

        def forward(self, nt: Any) -> Any:
            return F.silu(self.lin(nt)) + nt

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.blocks = nn.Linear(8, 8), nn.ModuleList([Jagged(), Jagged()])

        def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
            nt = torch.nested.nested_tensor_from_jagged(torch.sin(self.inp(x)), offsets=offsets)
            for block in self.blocks:
                nt = block(nt)
            return nt.values().tanh()

    return case(Net(), torch.randn(10, 8), torch.tensor([0, 2, 7, 10]))


@PROGRAMS.add("frozen int8 weights, taken apart in each forward", ops=("_to_copy",))
def quantised_base() -> Case:
    class Quantised(Module):
        def __init__(self) -> None:
            super().__init__()
            w = torch.randn(8, 8) / 3
            self.register_buffer("scale", w.abs().amax(1, keepdim=True) / 127)
            self.register_buffer("q", (w / self.scale).round().to(torch.int8))
            self.low, self.high = nn.Parameter(torch.randn(2, 8) * 0.2), nn.Parameter(torch.randn(8, 2) * 0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.q.to(x.dtype) * self.scale
            return x + torch.tanh(x @ w.t() + x @ self.low.t() @ self.high.t())

    return case(Stack(Quantised), torch.randn(4, 8))


@PROGRAMS.add("4-bit weights packed two in a byte, unpacked with shifts", ops=("bitwise_and",))
def packed_four_bit_base() -> Case:
    class Packed(Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("codes", torch.randint(0, 256, (8, 4), dtype=torch.uint8))
            self.register_buffer("table", torch.linspace(-0.5, 0.5, 16))
            self.gain = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            low, high = self.codes & 15, self.codes >> 4
            w = self.table[torch.stack([low, high], -1).flatten(1).int()]
            return x + torch.sin((x * self.gain) @ w.t())

    return case(Stack(Packed), torch.randn(4, 8))


@PROGRAMS.add("quantisation-aware training: observers move, values are rounded", ops=("fake_quantize",))
def fake_quantised() -> Case:
    class Fake(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("peak", torch.ones(1))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.peak.mul_(0.9).add_(h.abs().amax(), alpha=0.1)
            scale = (self.peak / 127).clone()
            return torch.fake_quantize_per_tensor_affine(
                h.sin() * 2, scale, torch.zeros(1, dtype=torch.int32), -127, 127
            )

    return case(Stack(Fake), torch.randn(4, 8))


@PROGRAMS.add("float8 storage with a moving scale", ops=("_to_copy",))
def float8_storage() -> Case:
    class Eight(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("history", torch.zeros(3))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.history.copy_(self.history.roll(1))
                self.history[0] = h.detach().abs().amax()
            scale = self.history.amax().clone() / 448
            eight = (h.detach() / scale).to(torch.float8_e4m3fn)
            return torch.tanh(h) * (eight.float() * scale)

    return case(Stack(Eight), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- subclasses


class Scaled(torch.Tensor):
    """A value kept as q * s in two plain tensors."""

    q: torch.Tensor
    s: torch.Tensor

    @staticmethod
    def __new__(cls, q: torch.Tensor, s: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, q.shape, dtype=s.dtype, device=q.device)  # type: ignore[attr-defined]

    def __init__(self, q: torch.Tensor, s: torch.Tensor) -> None:
        self.q, self.s = q, s

    def __tensor_flatten__(self) -> Any:
        return ["q", "s"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["q"], inner["s"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        aten = torch.ops.aten
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return Scaled(func(args[0].q), func(args[0].s))
        plain = lambda t: t.q.to(t.s.dtype) * t.s if isinstance(t, Scaled) else t  # noqa: E731
        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))


@PROGRAMS.add(
    "a subclass of two inner tensors is an argument and a frozen weight",
    observe=lambda m: {"types": [b.seen for b in m.blocks]},
    opaque=True,
    shows=lambda records: records[0].observed["types"] == ["Scaled"] * 2,
)
def wrapper_subclass() -> Case:
    class Weighted(nn.Module):
        seen = ""

        def __init__(self) -> None:
            super().__init__()
            w = torch.randn(8, 8) / 3
            s = w.abs().amax() / 127
            self.w = Scaled((w / s).round().to(torch.int8), s)
            self.low, self.high = nn.Parameter(torch.randn(2, 8) * 0.2), nn.Parameter(torch.randn(8, 2) * 0.2)

        def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
            self.seen = type(gain).__name__
            h = x @ self.w + x @ self.low.t() @ self.high.t()
            return x + torch.tanh(h * gain)

    class Net(Stack):
        def forward(self, x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            x = torch.sin(self.inp(x))
            for block in self.blocks:
                x = block(x, gain)
            return x

    gain = Scaled(torch.randint(1, 9, (4, 8), dtype=torch.int8), torch.tensor(0.25))
    return case(Net(Weighted, 2), torch.randn(4, 8), gain)


class Tagged(torch.Tensor):
    """A subclass that only carries a name along, through `__torch_function__`."""

    tag: str = ""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(func, types, args, kwargs or {})
        tags = [a.tag for a in args if isinstance(a, Tagged) and a.tag]
        if isinstance(out, Tagged) and tags and not out.tag:
            out.tag = tags[0]
        return out


@PROGRAMS.add(
    "a subclass that carries metadata through every function",
    observe=attributes("seen"),
    shows=lambda records: records[0].observed["seen"] == ("Tagged", "mine"),
    may_drop_nothing=True,
)
def tagged_subclass() -> Case:
    class Net(Stack):
        seen: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            tagged = x.as_subclass(Tagged)
            tagged.tag = "mine"
            x = super().forward(tagged)
            self.seen = (type(x).__name__, getattr(x, "tag", None))
            return x.as_subclass(torch.Tensor)

    return case(Net(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- strides


@PROGRAMS.add("channels last: weights, inputs and results keep their order", ops=("convolution", "aten.cat"))
def channels_last() -> Case:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.norm = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = F.silu(self.norm(self.a(x)))
            assert h.is_contiguous(memory_format=torch.channels_last)
            return x + self.b(F.avg_pool2d(h, 3, 1, 1)) + torch.cat([x[:, :2], x[:, 2:]], 1).sin()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(nn.Conv2d(3, 4, 1), Conv(), Conv())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    model = Net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return case(model, torch.randn(2, 3, 5, 5).to(memory_format=torch.channels_last))


@PROGRAMS.add("rows expanded with stride 0 are saved", ops=("expand",))
def expanded_strides() -> Case:
    class Expanded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.row, self.lin = nn.Parameter(torch.randn(1, 8)), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = torch.sigmoid(self.row).expand_as(x)
            column = x.mean(1, keepdim=True).expand(-1, 8)
            return self.lin(x * gate).sin() * column + gate.exp() * column.cos()

    return case(Stack(Expanded), torch.randn(4, 8))


@PROGRAMS.add("windows that overlap in memory are saved", ops=("unfold", "as_strided"))
def overlapping_strides() -> Case:
    class Windows(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = h.sin()
            windows = h.unfold(1, 4, 2)
            strided = torch.as_strided(h, (h.shape[0], 9, 4), (h.stride(0), 1, 1))
            return (
                h * (windows.exp().sum() + (strided * strided.tanh()).mean()) / 100
                + windows.square().sum((1, 2))[:, None]
            )

    return case(Stack(Windows), torch.randn(4, 8))


@PROGRAMS.add("a square and its transpose, slices and flips of one storage", ops=("aten.t", "aten.slice"))
def views_of_one_storage() -> Case:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.row = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.randn(1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = torch.tanh(x @ self.w)
            b = a * a.t()
            c = b[:, ::2].repeat_interleave(2, 1) * b.transpose(0, 1)[::2].repeat(2, 1)
            return x + (c * self.row.sigmoid().expand_as(c)) @ a.t() + a.diagonal() * a[0]

    return case(Stack(Square), torch.randn(8, 8, requires_grad=True))


@PROGRAMS.add(
    "one result split, chunked, unbound and put together in another order", ops=("split", "unbind"), heavy=True
)
def split_and_joined() -> Case:
    class Splits(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            a, b, c = h.split([2, 4, 6], -1)
            rows = torch.stack([r.sin() * r for r in h.unbind(0)][::-1])
            d, e = c.chunk(2, -1)
            return torch.cat([a.sin() * d[:, :2], b.exp() * b, d * e.tanh(), e.square()], -1)[:, :12] * rows

    return case(Stack(Splits), torch.randn(4, 8))


@PROGRAMS.add("transposed and permuted operands reach the products", ops=("bmm", "permute"))
def permuted_operands() -> Case:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(2, 4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (2, 4)).permute(1, 0, 2)
            y = torch.bmm(heads, self.w).transpose(1, 2).softmax(-1)
            z = torch.einsum("hij,hjk->hik", y, heads).relu()
            return x + z.permute(1, 0, 2).flatten(1)[:, :8].sum() + torch.bmm(y.mT, y).permute(1, 0, 2).flatten(1)

    return case(Stack(Permuted), torch.randn(4, 8), loss=mean_square)
