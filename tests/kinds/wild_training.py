"""Training programs of whole fields: what their loops and models do that plain examples do not."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import random
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from .parts import Block, Module, Stack, attributes
from .program import Case, Collection, Loss, case

RANDOMNESS = Collection("randomness", is_wild=True)
MUTATION = Collection("mutation", is_wild=True)
STRUCTURE = Collection("structure", is_wild=True)
AUTOGRAD = Collection("autograd", is_wild=True)
PRECISION = Collection("precision", is_wild=True)
MODES = Collection("modes", is_wild=True)
SHAPES = Collection("shapes", is_wild=True)
DIFFERING = Collection("differing_steps", is_wild=True)
TIME = Collection("time_threads", is_wild=True)
COLLECTIONS = (RANDOMNESS, MUTATION, STRUCTURE, AUTOGRAD, PRECISION, MODES, SHAPES, DIFFERING, TIME)


class _Dropped(Block):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.gelu(h), 0.3, self.training)


def _itself(out: Any) -> Any:
    return out


# ---------------------------------------------------------------------------------------------- randomness


@RANDOMNESS.add("a decoder feeds itself samples or the truth by chance, and stops early by data", num_steps=5)
def scheduled_sampling() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.cell, self.out = nn.Embedding(12, 8), nn.GRUCell(8, 8), nn.Linear(8, 12)

        def forward(self, ids: torch.Tensor) -> Any:
            h, token, found = torch.zeros(len(ids), 8), ids[:, 0], []
            for t in range(1, ids.shape[1]):
                h = self.cell(self.table(token), h)
                logits = self.out(h)
                found.append(logits)
                drawn = torch.multinomial(logits.softmax(-1).detach(), 1).squeeze(1)
                token = ids[:, t] if random.random() < 0.5 else drawn
                if t > 3 and bool(logits.argmax(-1).eq(int(ids[0, 0])).any()):
                    break
            return torch.stack(found, 1)

    return case(Net(), torch.randint(0, 12, (3, 9)))


@RANDOMNESS.add("a code book kept by moving averages, whose dead entries are drawn anew from the batch", num_steps=5)
def code_book() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Stack(_Dropped), Stack()
            self.register_buffer("book", torch.randn(10, 8))
            self.register_buffer("count", torch.ones(10))
            self.register_buffer("total", self.book.clone())

        def forward(self, x: torch.Tensor) -> Any:
            z = self.encoder(x)
            index = torch.cdist(z, self.book).argmin(1)
            code = F.embedding(index, self.book)
            with torch.no_grad():
                hot = F.one_hot(index, 10).float()
                self.count.mul_(0.8).add_(hot.sum(0), alpha=0.2)
                self.total.mul_(0.8).add_(hot.t() @ z, alpha=0.2)
                self.book.copy_(self.total / self.count[:, None].clamp_min(1e-3))
                dead = self.count < 0.6
                if bool(dead.any()):
                    self.book[dead] = z[torch.randint(0, len(z), (int(dead.sum()),))]
            passed = z + (code - z).detach()
            return F.mse_loss(self.decoder(passed), x) + 0.25 * F.mse_loss(z, code.detach())

    return case(Net(), torch.randn(6, 8), loss=_itself)


@RANDOMNESS.add("a diffusion loss: a time and noise for each sample, and guidance dropped by chance")
def diffusion() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.norm = nn.Linear(2, 8), nn.GroupNorm(2, 8)
            self.down, self.low = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, 2, 1)
            self.up, self.out = nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.Conv2d(16, 3, 1)
            self.register_buffer("level", torch.linspace(0.99, 0.1, 10).cumprod(0))

        def forward(self, clean: torch.Tensor) -> Any:
            t = torch.randint(0, 10, (len(clean),))
            noise, level = torch.randn_like(clean), self.level[t].view(-1, 1, 1, 1)
            x = level.sqrt() * clean + (1 - level).sqrt() * noise
            angle = t[:, None].float()
            shift = F.silu(self.time(torch.cat([angle.sin(), angle.cos()], -1)))[:, :, None, None]
            high = F.silu(self.norm(self.down(x)) + shift * (random.random() > 0.3), inplace=True)
            low = F.silu(self.low(high))
            q = low.flatten(2).transpose(1, 2)
            low = low + F.scaled_dot_product_attention(q, q, q).transpose(1, 2).reshape(low.shape)
            error = (self.out(torch.cat([self.up(low), high], 1)) - noise).square().mean((1, 2, 3))
            return (error * (level / (1 - level)).clamp(max=5).flatten()).mean()

    return case(Net(), torch.randn(3, 3, 8, 8), loss=_itself)


# ---------------------------------------------------------------------------------------------- mutation


class _Queue(Module):
    """Contrastive learning against a queue of keys that a moving average of the encoder makes."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(True), nn.Linear(12, 6))
        self.momentum = copy.deepcopy(self.encoder).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(6, 16), dim=0))
        self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        q = F.normalize(self.encoder(a), dim=1)
        with torch.no_grad():
            for p, r in zip(self.encoder.parameters(), self.momentum.parameters(), strict=True):
                r.data = r.data * 0.9 + p.data * 0.1
            order = torch.randperm(len(b))
            k = F.normalize(self.momentum(b[order]), dim=1)[order.argsort()]
        queue = self.queue.clone() if self.copied else self.queue
        logits = torch.cat([torch.einsum("nc,nc->n", q, k)[:, None], q @ queue], 1) / 0.2
        with torch.no_grad():
            at = int(self.at)
            self.queue[:, at : at + len(b)] = k.T
            self.at[0] = (at + len(b)) % 16
        return F.cross_entropy(logits, torch.zeros(len(b), dtype=torch.long))


@MUTATION.add("a queue of keys is written at a moving place, weights follow through .data")
def queue_of_keys() -> Case:
    return case(_Queue(copied=True), torch.randn(4, 8), torch.randn(4, 8), loss=_itself)


@MUTATION.add(
    "the same queue without the copy is written while backward needs it: plain raises", plain_raises=RuntimeError
)
def queue_written_while_saved() -> Case:
    return case(_Queue(copied=False), torch.randn(4, 8), torch.randn(4, 8), loss=_itself)


def _refill(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    loss.backward()
    weight = model.blocks[0].up.weight.detach()
    kept, memory = weight.clone(), weight.untyped_storage()
    size = memory.nbytes()
    memory.resize_(0)
    memory.resize_(size)
    weight.copy_(kept)
    return loss


@MUTATION.add("the memory of a weight is let go of and allocated again, as sharding does it", step=_refill)
def memory_of_a_weight_refilled() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


@MUTATION.add("an activation's raw storage is shown through `set_`, and its bits are cut")
def raw_storage_shown() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            bits = x.detach().clone().view(torch.int32)
            bits &= ~0xFF
            x = torch.sin(x * bits.view(torch.float32))
            row: Any = torch.empty(0)
            row.set_(x.detach().untyped_storage(), 0, (8,))
            x = torch.tanh(x + row)
            for block in self.blocks:
                x = block(x)
            return x

    return case(Net(_Dropped), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- structure


@STRUCTURE.add("a model that cannot be compared, is false, and forbids attributes that it does not know")
def odd_protocols() -> Case:
    class Net(Stack):
        __hash__ = nn.Module.__hash__

        def __eq__(self, other: object) -> bool:
            raise RuntimeError("models are not compared")

        def __bool__(self) -> bool:
            return False

        def __setattr__(self, name: str, value: Any) -> None:
            assert not hasattr(self, "blocks") or name in ("training", "__class__")
            super().__setattr__(name, value)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return super().__call__(*args, **kwargs) * 1.5

    return case(Net(_Dropped), torch.randn(4, 8))


@STRUCTURE.add("spatial transforms: sampling grids made by the net, pools with indices, fractional pools")
def sampling_grids() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.offset, self.value = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(4, 4, 1)
            self.norm, self.theta = nn.BatchNorm2d(4), nn.Linear(4, 6)

        def forward(self, x: torch.Tensor) -> Any:
            offset = self.offset(x).tanh() * 0.3
            theta = self.theta(x.mean((2, 3))).view(-1, 2, 3)
            grid = F.affine_grid(theta, list(x.shape), align_corners=False)
            out = torch.zeros_like(x)
            for k, (mode, padding) in enumerate((("bilinear", "zeros"), ("bicubic", "reflection"))):
                moved = grid + offset[:, 2 * k : 2 * k + 2].permute(0, 2, 3, 1)
                out = out + F.grid_sample(self.value(x), moved, mode, padding, align_corners=False)
            out = F.interpolate(F.max_pool2d(self.norm(out), 2), scale_factor=2, mode="bicubic")
            pooled, index = F.max_pool2d(out, 2, return_indices=True)
            return F.max_unpool2d(pooled, index, 2) + F.fractional_max_pool2d(out, 2, output_size=(4, 4)).mean()

    return case(Net(), torch.randn(2, 4, 8, 8))


@STRUCTURE.add("forward has several modes, and the model calls itself with each")
def modes_of_one_forward() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Stack(_Dropped), Stack(_Dropped)

        def forward(self, x: torch.Tensor, mode: str = "all") -> Any:
            if mode == "encode":
                return self.encoder(x)
            if mode == "decode":
                return self.decoder(x)
            return self(self(x, mode="encode"), mode="decode")

    return case(Net(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- autograd


def _adapted(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    for x in args[0].chunk(2):
        fast = dict(model.named_parameters())
        for _ in range(2):
            grads = torch.autograd.grad(loss_fn(functional_call(model, fast, (x,))), fast.values(), create_graph=True)
            fast = {n: p - 0.1 * g for (n, p), g in zip(fast.items(), grads, strict=True)}
        total = total + loss_fn(functional_call(model, fast, (x.flip(0),)))
    total.backward()
    return total


@AUTOGRAD.add("meta-learning: weights after two steps of gradients are called with, and differentiated", step=_adapted)
def adapted_weights() -> Case:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(12)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return F.dropout(torch.tanh(self.norm(h)), 0.3)

    return case(Stack(Normed, num=2), torch.randn(6, 8))


class _Coupled(torch.autograd.Function):
    """A reversible pair of residual branches: backward runs the branches again, with the generator wound back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, g: nn.Module) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        ctx.branches, ctx.state = (f, g), torch.get_rng_state()
        with torch.no_grad():
            a = a + f(b)
            b = b + g(a)
        ctx.out = (a, b)
        return torch.cat([a, b], -1)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (f, g), (a, b) = ctx.branches, ctx.out
        of_a, of_b = grads[0].chunk(2, -1)
        with torch.enable_grad():
            left = a.detach().requires_grad_()
            moved = g(left)
            moved.backward(of_b)
        assert left.grad is not None
        b, of_a = b - moved.detach(), of_a + left.grad
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.state)
            right = b.detach().requires_grad_()
            f(right).backward(of_a)
        assert right.grad is not None
        return torch.cat([of_a, of_b + right.grad], -1), None, None


@AUTOGRAD.add("reversible layers: a backward pass inside of backward, with dropout")
def reversible_layers() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp = nn.Linear(8, 8)
            self.pairs = nn.ModuleList(nn.ModuleList([_Dropped(4, 6), Block(4, 6)]) for _ in range(2))

        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            for f, g in self.pairs:
                x = torch.tanh(_Coupled.apply(x, f, g))
            return x

    return case(Net(), torch.randn(4, 8))


def _private(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    inputs: dict[nn.Module, torch.Tensor] = {}
    handles = []

    def note(module: nn.Module, args: Any, out: Any) -> None:
        inputs[module] = args[0].detach()

    def per_sample(module: Any, _: Any, out: Any) -> None:
        module.weight.sample = torch.einsum("ni,nj->nij", out[0], inputs.pop(module))
        module.bias.sample = out[0]

    for module in model.modules():
        if isinstance(module, nn.Linear):
            handles += [module.register_forward_hook(note), module.register_full_backward_hook(per_sample)]
    loss = loss_fn(model(*args))
    loss.backward()
    for handle in handles:
        handle.remove()
    weights = list(model.parameters())
    norm = torch.stack([p.sample.flatten(1).norm(2, 1) for p in weights], 1).norm(2, 1)
    for p in weights:
        p.grad = torch.einsum("n,n...->...", (0.1 / norm).clamp(max=1), p.sample) + torch.randn_like(p) * 0.01
        del p.sample
    return loss


@AUTOGRAD.add("private training: hooks make a gradient for each sample, clip and blur it", step=_private)
def gradients_for_each_sample() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _two_players(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    real, z = args
    judge, maker = model.judge, model.maker
    judge.requires_grad_(True)
    fake = maker(z).detach()
    share = torch.rand(len(real), 1, 1, 1)
    between = (share * real + (1 - share) * fake).requires_grad_()
    (slope,) = torch.autograd.grad(judge(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(2, 1) - 1).square().mean()
    judged = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean() + penalty
    judged.backward()
    judge.requires_grad_(False)
    made = F.softplus(-judge(maker(z))).mean()
    made.backward()
    judge.requires_grad_(True)
    return judged.detach() + made.detach()


@AUTOGRAD.add("two players: a gradient penalty for one, who is frozen while the other learns", step=_two_players)
def two_players() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            norm = nn.utils.parametrizations.spectral_norm
            self.maker = nn.Sequential(
                nn.ConvTranspose2d(4, 8, 4),
                nn.BatchNorm2d(8),
                nn.LeakyReLU(0.2, True),
                nn.ConvTranspose2d(8, 3, 4, 2, 1),
                nn.Tanh(),
            )
            self.judge = nn.Sequential(
                norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2, True), nn.Dropout2d(0.3), norm(nn.Conv2d(8, 1, 4))
            )

        def forward(self, z: torch.Tensor) -> Any:
            return self.judge(self.maker(z))

    return case(Net(), torch.randn(4, 3, 8, 8), torch.randn(4, 4, 1, 1))


# ---------------------------------------------------------------------------------------------- precision


@PRECISION.add("quantisation-aware training by torch's own observers, whose buffers grow in the first step")
def prepared_for_quantisation() -> Case:
    import torch.ao.quantization as quantization

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
        model: Any = nn.Sequential(quantization.QuantStub(), *layers, quantization.DeQuantStub()).train()
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.fuse_modules_qat(model, [["1", "2", "3"]], inplace=True)
        quantization.prepare_qat(model, inplace=True)
    return case(model, torch.randn(2, 3, 8, 8))


@PRECISION.add("a Fourier operator: complex weights on the low frequencies, the others zero")
def fourier_operator() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.convs = nn.ModuleList(nn.Conv1d(8, 8, 1) for _ in range(3))
            self.spectra = nn.ParameterList(nn.Parameter(torch.randn(8, 8, 5, dtype=torch.cfloat)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            for weight, conv in zip(self.spectra, self.convs, strict=True):
                spectrum = torch.fft.rfft(x)
                out = torch.zeros_like(spectrum)
                out[..., :5] = torch.einsum("bix,iox->box", spectrum[..., :5], weight)
                x = F.gelu(torch.fft.irfft(out, n=x.shape[-1]) + conv(x))
            return x

    return case(Net(), torch.randn(2, 8, 16))


# ---------------------------------------------------------------------------------------------- modes


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def _backward_elsewhere(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    with _elsewhere():
        loss.backward()
    return loss


@MODES.add(
    "backward runs under another default dtype, autocast and another default device than forward",
    step=_backward_elsewhere,
)
def backward_in_other_surroundings() -> Case:
    class Made(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(h) * torch.full((12,), 0.5) + torch.arange(12) * 0.1 + torch.tensor(2.5) * h
            return torch.sin(h * torch.eye(12)[0] + torch.linspace(0, 1, 12) + torch.as_tensor([1.0] * 12))

    return case(Stack(Made), torch.randn(4, 8))


@MODES.add("shapes are worked out on fake tensors inside forward, under their mode and outside of it", opaque=True)
def fake_tensors_inside() -> Case:
    from torch._subclasses.fake_tensor import FakeTensorMode

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = mode.from_tensor(x.detach())
                rows = torch.sin(fake @ torch.empty(8, 3)).t().shape[0]
            columns = torch.tanh(fake).t().shape[0]
            x = torch.sin(self.inp(x) * rows)
            for block in self.blocks:
                x = torch.tanh(block(x) * columns)
            return x

    return case(Net(_Dropped), torch.randn(4, 8))


class _Wrapped(torch.Tensor):
    """Wraps a plain tensor and turns each op into one on that."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        make: Any = torch.Tensor._make_wrapper_subclass  # type: ignore[attr-defined]
        return make(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, meta: Any, size: Any, stride: Any) -> Any:
        return _Wrapped(tensors["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = tree_map(lambda t: t.inner if isinstance(t, _Wrapped) else t, (args, kwargs or {}))
        out = func(*bare[0], **bare[1])
        return _Wrapped(out) if isinstance(out, torch.Tensor) else out


class _Doubling(TorchDispatchMode):
    """Changes what ops on wrapped tensors return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return _Wrapped(out.inner * 2) if _Wrapped in types and isinstance(out, _Wrapped) else out


@MODES.add("a mode around the model changes ops on a tensor subclass, and must see them", around=_Doubling)
def mode_that_sees_subclasses() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            wrapped: Any = torch.sin(_Wrapped(x.detach()))
            x = torch.sin(x * wrapped.inner)
            for block in self.blocks:
                x = block(x)
            return x

    return case(Net(_Dropped), torch.randn(4, 8))


@contextlib.contextmanager
def _filled() -> Iterator[None]:
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was)


@MODES.add("deterministic algorithms fill fresh memory with NaN, and the model reads it", around=_filled)
def fresh_memory_filled() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            half = torch.empty(4, 8)
            half[:, :4] = x[:, :4]
            x = torch.tanh(torch.nan_to_num(half, nan=0.5)) * x
            for block in self.blocks:
                x = torch.sin(block(x)).index_add(0, torch.tensor([0, 0, 1]), x[:3])
            return x

    return case(Net(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- shapes


def _graph(i: int, built: Any = None) -> Any:
    draw = torch.Generator().manual_seed(i)
    nodes, edges = 7 + 2 * i, 15 + 5 * i
    x = torch.randn(nodes, 8, generator=draw)
    return (x, torch.randint(0, nodes, (2, edges), generator=draw), torch.arange(nodes) * 3 // nodes), {}


@SHAPES.add(
    "graphs of another size in each step; edges dropped by a mask, softmax by scatter", inputs=_graph, num_steps=6
)
def graphs() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
            self.score, self.eps = nn.Parameter(torch.randn(16)), nn.Parameter(torch.zeros(3))

        def forward(self, x: torch.Tensor, edges: torch.Tensor, graph: torch.Tensor) -> Any:
            source, target = edges
            for k, layer in enumerate(self.layers):
                h = layer(x)
                e = F.leaky_relu(torch.cat([h[source], h[target]], -1) @ self.score, 0.2)
                low = torch.full((len(x),), -torch.inf)
                top = low.scatter_reduce(0, target, e.detach(), "amax", include_self=False)
                w = (e - top[target]).exp()
                total = torch.zeros(len(x)).scatter_add_(0, target, w)
                left = torch.rand(len(source)) > 0.2
                share = (w / total[target])[left]
                mixed = torch.zeros_like(h).index_add_(0, target[left], h[source[left]] * share[:, None])
                x = F.elu((1 + self.eps[k]) * h + mixed, inplace=True)
            mean = torch.zeros(3, 8).index_reduce(0, graph, x, "mean", include_self=False)
            return mean + torch.segment_reduce(x, "max", lengths=torch.bincount(graph, minlength=3))

    return case(Net(), *_graph(0)[0])


@SHAPES.add("the width of a layer is drawn in each step: slices of its weights, a norm for each width", num_steps=6)
def widths_drawn() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)
            self.norms = nn.ModuleDict({str(w): nn.BatchNorm1d(w) for w in (4, 8, 16)})

        def forward(self, x: torch.Tensor) -> Any:
            w = random.choice((4, 8, 16))
            h = F.relu(self.norms[str(w)](F.linear(x, self.a.weight[:w], self.a.bias[:w])))
            return F.linear(h, self.b.weight[:, :w], self.b.bias)

    return case(Net(), torch.randn(6, 8))


def _converted(model: Any, i: int) -> None:
    (model.double, model.float, model.bfloat16, model.float)[i - 1]()
    model.to(memory_format=(torch.channels_last if i % 2 else torch.contiguous_format))


def _as_converted(i: int, built: Any) -> Any:
    x = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(i))
    return (x.to((torch.float32, torch.float64, torch.float32, torch.bfloat16, torch.float32)[i]),), {}


@SHAPES.add(
    "the model is converted between steps: other dtypes, other memory formats",
    between=_converted,
    inputs=_as_converted,
    num_steps=5,
    python_state=True,
)
def model_converted() -> Case:
    layers = (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 4, 3), nn.Tanh())
    return case(nn.Sequential(*layers), torch.randn(2, 3, 8, 8))


# ---------------------------------------------------------------------------------------------- steps that differ


def _closure(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    def again() -> torch.Tensor:
        model.optimizer.zero_grad()
        loss = loss_fn(model(*args))
        loss.backward()
        return loss

    return model.optimizer.step(again).detach()


@DIFFERING.add(
    "forward and backward run in a closure of the optimizer, as often as its line search likes",
    step=_closure,
    update=False,
    python_state=True,
)
def closure_of_an_optimizer() -> Case:
    model: Any = Stack()
    model.optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, line_search_fn="strong_wolfe")
    return case(model, torch.randn(4, 8))


def _sharpness(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    weights, state = list(model.parameters()), torch.get_rng_state()
    loss = loss_fn(model(*args))
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        ascent = [p.grad * (0.05 / norm) for p in weights]
        torch._foreach_add_(weights, ascent)
    model.zero_grad()
    torch.set_rng_state(state)
    loss_fn(model(*args)).backward()
    with torch.no_grad():
        torch._foreach_sub_(weights, ascent)
    return loss


@DIFFERING.add("sharpness-aware steps: weights move there and back between two passes with one mask", step=_sharpness)
def sharpness() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


@DIFFERING.add("one path out of a supernet is drawn in each step, weighted by its architecture", num_steps=6)
def paths_of_a_supernet() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.edges = nn.ModuleList(
                nn.ModuleList([nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), _Dropped()])
                for _ in range(3)
            )
            self.alpha = nn.Parameter(torch.zeros(3, 3))

        def forward(self, x: torch.Tensor) -> Any:
            for ops, alpha in zip(self.edges, self.alpha, strict=True):
                share = F.gumbel_softmax(alpha, hard=True)
                k = int(share.argmax()) if random.random() < 0.7 else random.randrange(3)
                x = x + ops[k](x) * share[k]
            return x

    return case(Net(), torch.randn(4, 8))


def _rollout(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    state, hidden, seen = args[0], None, []
    with torch.no_grad():
        for _ in range(4):
            choice, value, hidden = model(state, hidden)
            action = choice.sample()
            seen.append((state, action, choice.log_prob(action), value))
            state = torch.tanh(state + F.one_hot(action, 3).float() @ model.world)
    total = torch.zeros(())
    for _ in range(2):
        hidden, losses = None, []
        for t, (state, action, before, value) in enumerate(seen):
            choice, now, hidden = model(state, hidden.detach() if t == 2 else hidden)
            ratio, gain = (choice.log_prob(action) - before).exp(), 1 - value
            bound = torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            losses.append(F.mse_loss(now, value + gain) - bound - 0.01 * choice.entropy().mean())
        loss = torch.stack(losses).sum()
        loss.backward()
        total = total + loss.detach()
    return total


@DIFFERING.add("reinforcement learning: a rollout without gradients, two epochs over it, states cut", step=_rollout)
def rollouts() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.policy, self.value = nn.GRUCell(4, 8), nn.Linear(8, 3), nn.Linear(8, 1)
            self.register_buffer("world", torch.randn(3, 4))

        def forward(self, state: torch.Tensor, hidden: Any = None) -> Any:
            hidden = self.cell(state, hidden)
            choice = torch.distributions.Categorical(logits=self.policy(hidden))
            return choice, self.value(hidden).squeeze(-1), hidden

    return case(Net(), torch.randn(5, 4))


# ---------------------------------------------------------------------------------------------- time and threads


def _stale(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    now = loss_fn(model(*args))
    if model.last is not None:
        model.last.backward()
    model.last = now
    return now.detach()


@TIME.add(
    "the graph of the step before is walked after this step's forward",
    step=_stale,
    update=False,
    python_state=True,
    num_steps=5,
    may_drop_nothing=True,
)
def backward_of_the_step_before() -> Case:
    model: Any = Stack(_Dropped)
    model.last = None
    return case(model, torch.randn(4, 8))


def _gathered(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    async def one(x: torch.Tensor) -> torch.Tensor:
        await asyncio.sleep(0)
        out = model(x)
        await asyncio.sleep(0)
        return loss_fn(out)

    async def both() -> list[torch.Tensor]:
        return await asyncio.gather(one(args[0]), one(args[0] * 2))

    loss = torch.stack(asyncio.run(both())).sum()
    loss.backward()
    return loss


@TIME.add("coroutines call the model in turns", step=_gathered)
def coroutines() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


def _loaded(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    rows = torch.utils.data.TensorDataset(args[0])
    total = torch.zeros(())
    for (x,) in torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=model.workers):
        loss = loss_fn(model(x))
        loss.backward()
        total = total + loss.detach()
        model.seen = float(np.float32(total))
    return total


@TIME.add(
    "a loader with a process of its own runs inside the step, the last batch is short",
    step=_loaded,
    observe=attributes("seen"),
    python_state=True,
    slow=True,
)
def loader_with_a_worker() -> Case:
    model: Any = Stack(_Dropped)
    model.workers, model.seen = 1, 0.0
    return case(model, torch.randn(10, 8))
