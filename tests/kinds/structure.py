"""Structure: argument and result trees, shared modules, control flow that data or Python decides."""

from __future__ import annotations

import enum
from collections import OrderedDict, UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from .parts import Block, Counted, Stack, attributes, block_attributes, calls
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("structure")


class Stats(NamedTuple):
    mean: torch.Tensor
    length: int


@dataclass
class Output:
    hidden: torch.Tensor
    stats: Stats
    aux: torch.Tensor | None = None


class Mode(enum.Enum):
    SOFT = 1
    HARD = 2


class _Structured(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.cond = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, *, cond: dict[str, Any], scales: Any, mode: Mode, mask: Any = None) -> Output:
        h = self.lin(x) * (1 + scales[0]) + self.cond(cond["text"])[:, None, :] * scales[1][0]
        h = h.cumsum(1) if mode is Mode.SOFT else h.cumprod(1)
        if mask is not None:
            h = h * mask
        h = torch.tanh(h) + x
        return Output(hidden=h, stats=Stats(h.mean(), h.shape[1]))


@PROGRAMS.add(
    "keyword arguments, dicts, tuples, flags and None go in; a dataclass with a NamedTuple and None comes out",
    observe=attributes("types"),
    python_state=True,
)
def trees_in_and_out() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.proj, self.gate = nn.Linear(6, 6), nn.Linear(6, 2)
            self.blocks = nn.ModuleList([_Structured() for _ in range(3)])
            self.types: list[Any] = []

        def forward(self, x: torch.Tensor, text: torch.Tensor) -> Any:
            cond, g = {"text": self.proj(text), "name": "caption"}, self.gate(text)
            scales, total = (g[:, :1, None], [g[:, 1:, None].tanh(), None]), x.new_zeros(())
            for block in self.blocks:
                out = block(x, cond=cond, scales=scales, mode=Mode.SOFT, mask=None)
                self.types.append((type(out).__name__, type(out.stats).__name__, out.aux))
                x, total = out.hidden, total + out.stats.mean * out.stats.length
            return Output(hidden=x, stats=Stats(total, len(self.types)))

    return case(
        Net(),
        torch.randn(2, 4, 6),
        text=torch.randn(2, 6),
        loss=lambda o: o.hidden.square().mean() + 0.1 * o.stats.mean,
    )


@dataclass
class Batch:
    """Not known to pytree: tensors inside are found by attribute only."""

    x: torch.Tensor
    weight: torch.Tensor
    name: str = "batch"


class Bag(UserDict[str, Any]):
    """A mapping of the user's own."""


@PROGRAMS.add("tensors travel in dataclasses, own mappings, ordered dicts and closures")
def opaque_containers() -> Case:
    class Net(Stack):
        def forward(self, batch: Batch, extra: Bag) -> OrderedDict[str, Any]:  # type: ignore[override]
            x = torch.sin(self.inp(batch.x)) * batch.weight + extra["bias"]
            later = [lambda t, b=block: b(t) for block in self.blocks]
            for call in later:
                x = call(x)
            return OrderedDict(out=x, note=batch.name, parts=(x.sum(), None, [x.mean(), {"deep": x.amax()}]))

    batch = Batch(torch.randn(4, 8), torch.rand(4, 1, requires_grad=True))
    bag = Bag(bias=torch.randn(8, requires_grad=True))
    return case(Net(), batch, bag, loss=lambda o: o["out"].square().mean() + 0.1 * o["parts"][2][1]["deep"])


def _iterator_step(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(iter(args[0]), zip(args[0], args[1], strict=True)))
    loss.backward()
    return loss


@PROGRAMS.add("arguments are iterators: they can be read once", step=_iterator_step, observe=attributes("left"))
def iterators_as_arguments() -> Case:
    class Net(Stack):
        left: list[Any] = []  # noqa: RUF012

        def forward(self, items: Iterator[torch.Tensor], pairs: Any) -> torch.Tensor:  # type: ignore[override]
            x = self.inp(next(items))
            for item, (a, b) in zip(items, pairs, strict=False):
                x = torch.tanh(x * item) + self.blocks[0](a * b)
            self.left = list(items)
            return x

    xs = [torch.randn(4, 8) for _ in range(3)]
    return case(Net(), xs, [torch.randn(4, 8) for _ in range(3)])


@PROGRAMS.add("the result is a generator: the model's code runs while the loss is computed", may_drop_nothing=True)
def lazy_result() -> Case:
    class Lazy(Stack):
        def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
            x = torch.sin(self.inp(x))
            for block in self.blocks:
                x = block(x)
                yield x

    return case(Lazy(), torch.randn(4, 8), loss=lambda parts: sum(p.square().mean() for p in parts))


@PROGRAMS.add(
    "packed sequences in and out, state carried over", heavy=True, observe=attributes("types"), python_state=True
)
def packed_sequences() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.types = nn.Linear(6, 6), []
            self.lstm, self.gru = nn.LSTM(6, 6, 2, dropout=0.3), nn.GRU(6, 6, bidirectional=True)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> Any:
            packed = pack_padded_sequence(self.inp(x), lengths, enforce_sorted=False)
            packed, (h, c) = self.lstm(packed)
            self.types.append(type(packed).__name__)
            packed, (h, _) = self.lstm(packed, (h.detach(), c.detach()))
            out, last = self.gru(packed)
            return pad_packed_sequence(out)[0], h, last

    loss = lambda o: o[0].square().mean() + o[1].sin().mean() + o[2].mean()  # noqa: E731
    return case(Net().train(), torch.randn(5, 3, 6), torch.tensor([5, 2, 4]), loss=loss)


@PROGRAMS.add(
    "tied weights and one block called three times; hooks on gradients fire once",
    observe=attributes("fired"),
    python_state=True,
    shows=lambda records: set(records[0].observed["fired"].values()) == {1},
)
def tied_weights_reused_block() -> Case:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.block, self.norm = nn.Embedding(11, 8), Block(), nn.LayerNorm(8)
            self.out = nn.Linear(8, 11, bias=False)
            self.out.weight = self.emb.weight
            self.fired = {name: 0 for name, _ in self.named_parameters()}
            for name, p in self.named_parameters():
                p.register_post_accumulate_grad_hook(lambda _p, n=name: self.fired.__setitem__(n, self.fired[n] + 1))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.emb(ids)
            for _ in range(3):
                x = self.norm(self.block(x))
            return self.out(x)

    ids = torch.randint(0, 11, (2, 5))
    return case(Tied(), ids, loss=lambda o: F.cross_entropy(o.flatten(0, 1), ids.flatten()))


@PROGRAMS.add("parts of one weight serve as several weights: slices, the transpose, a composed product")
def weights_as_views() -> Case:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8) / 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            top, low = self.w[:4], self.w[4:]
            h = torch.tanh(F.linear(x, torch.cat([low, top])))
            h = torch.sin(F.linear(h, self.w.t()))
            return x + h @ self.w + h[:, :4] @ (top @ low.t()) @ self.w[::2] * 0.1

    return case(Stack(Views), torch.randn(4, 8))


class _Lora(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.low, self.high = nn.Parameter(torch.randn(2, 8) * 0.3), nn.Parameter(torch.randn(8, 2) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.low.t()) @ self.high.t()


@PROGRAMS.add(
    "no input of a block needs a gradient; only adapters inside learn",
    observe=lambda m: {"with": sorted(n for n, p in m.named_parameters() if p.grad is not None)},
    shows=lambda records: len(records[0].observed["with"]) == 12,
)
def adapters_on_frozen_base() -> Case:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.o, self.norm = _Lora(), _Lora(), nn.LayerNorm(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.o(torch.tanh(self.q(self.norm(x))))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(13, 8), nn.Linear(8, 13)
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            for name, p in self.named_parameters():
                p.requires_grad_(name.endswith((".low", ".high")))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.emb(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    ids = torch.randint(0, 13, (2, 6))
    return case(Net(), ids, loss=lambda o: F.cross_entropy(o.flatten(0, 1), ids.flatten()))


@PROGRAMS.add("results that nobody uses, and a branch that is cut off")
def unused_outputs() -> Case:
    class Many(Block):
        def forward(self, x: torch.Tensor) -> Any:
            h = F.silu(self.up(x))
            return x + self.down(h), h.sin(), h.exp(), self.down(h.detach().cos())

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x, side = self.inp(x), torch.zeros(())
            for block in self.blocks:
                x, s, _unused, cut = block(x)
                side = side + s.mean() + 0 * cut.detach().mean()
            return x, side, x.exp()

    return case(Net(Many), torch.randn(4, 8), loss=lambda o: o[0].square().mean() + o[1])


@PROGRAMS.add(
    "the number of layers depends on the data and changes from step to step",
    observe=attributes("depth"),
    inputs=lambda i, built: ((built.args[0] * (1, 6, 0.2, 3)[i],), {}),
    num_steps=4,
    ops=("local_scalar_dense",),
    shows=lambda records: len({r.observed["depth"] for r in records}) > 1,
)
def early_exit() -> Case:
    class Exit(Stack):
        depth = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, self.depth = torch.tanh(self.inp(x)), 0
            for block in self.blocks:
                self.depth += 1
                x = block(x)
                if x.abs().mean().item() > 0.62:
                    break
            return x

    return case(Exit(num=5), torch.randn(4, 8))


@PROGRAMS.add(
    "a loop goes on until a tensor is small enough",
    observe=attributes("rounds"),
    inputs=lambda i, built: ((built.args[0] * (1, 8, 0.2, 4)[i],), {}),
    num_steps=4,
    shows=lambda records: len({r.observed["rounds"] for r in records}) > 1,
)
def data_dependent_loop() -> Case:
    class Halving(Stack):
        rounds = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x, self.rounds = self.inp(x), 0
            while x.detach().norm() > 2 and self.rounds < 9:
                x = x - 0.3 * torch.tanh(self.blocks[0](x))
                x = x * 0.8
                self.rounds += 1
            return self.blocks[1](x)

    return case(Halving(), torch.randn(4, 8))


@PROGRAMS.add(
    "samples take different layers: gathered, run and put back",
    ops=("nonzero", "index"),
    inputs=lambda i, built: ((built.args[0].roll(i, 1),), {}),
)
def rows_choose_their_layer() -> Case:
    class Routed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            out, choice = torch.zeros_like(x), (x.detach().sum(-1) > 0).long() + (x.detach()[:, 0] > 0.5).long()
            for k, block in enumerate(self.blocks):
                rows = (choice == k).nonzero().flatten()
                if rows.numel():
                    out[rows] = block(x[rows])
            return out + x

    return case(Routed(), torch.randn(8, 8))


class _Experts(nn.Module):
    def __init__(self, num: int = 4, top: int = 2) -> None:
        super().__init__()
        self.num, self.top = num, top
        self.norm, self.router = nn.LayerNorm(8), nn.Linear(8, num, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)) for _ in range(num)])
        self.register_buffer("bias", torch.zeros(num))
        self.register_buffer("load", torch.zeros(num, dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).flatten(0, 1)
        p = self.router(h).sigmoid()
        chosen = (p.detach() + self.bias).topk(self.top, -1).indices
        weight = p.gather(1, chosen)
        weight, out = weight / weight.sum(-1, keepdim=True), torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            token, slot = (chosen == e).nonzero(as_tuple=True)
            if token.numel():
                out = out.index_add(0, token, expert(h[token]) * weight[token, slot, None])
        with torch.no_grad():
            now = torch.bincount(chosen.flatten(), minlength=self.num)
            self.load += now
            self.bias -= 0.2 * (now.float() - now.float().mean()).sign()
        return x + out.view_as(x)


@PROGRAMS.add(
    "experts are chosen by a bias that forward moves: a second run would choose others", ops=("topk", "bincount")
)
def mixture_of_experts() -> Case:
    return case(Stack(_Experts, 2), torch.randn(2, 6, 8))


@PROGRAMS.add(
    "a module calls itself: a tree of cells",
    inputs=lambda i, built: (
        ((built.args[0], (0, (1, 2))), ((built.args[0], ((3, (0, 1)), 2))), (built.args[0], 3))[i],
        {},
    ),
)
def recursion_over_a_tree() -> Case:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.join = nn.Linear(8, 8), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor, node: Any) -> torch.Tensor:
            if isinstance(node, int):
                return torch.tanh(self.leaf(x[node]))
            left, right = (self(x, child) for child in node)
            return torch.sigmoid(self.join(torch.cat([left, right], -1))) * left + right

    return case(Tree(), torch.randn(4, 3, 8), (0, (1, 2)))


@PROGRAMS.add(
    "a counter in forward sets a temperature, and auxiliary losses are collected in a list",
    observe=lambda m: {"steps": [b.steps for b in m.blocks], "aux": len(m.aux)},
    python_state=True,
)
def counter_and_auxiliary_losses() -> Case:
    class Counting(nn.Module):
        def __init__(self, aux: list[torch.Tensor]) -> None:
            super().__init__()
            self.gate, self.val, self.steps, self.aux = nn.Linear(8, 8), nn.Linear(8, 8), 0, aux

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            p = torch.softmax(self.gate(x) * (1 + 0.5 * self.steps), -1)
            self.aux.append((p * p.clamp_min(1e-9).log()).sum(-1).mean())
            return x + p * self.val(x)

    aux: list[torch.Tensor] = []

    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(lambda: Counting(aux))
            self.aux = aux

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.aux.clear()
            return super().forward(x)

    loss = lambda o: o.square().mean() + 0.1 * torch.stack(aux).sum()  # noqa: E731
    return case(Net(), torch.randn(4, 8, requires_grad=True), loss=loss)


@PROGRAMS.add(
    "a list inside the model grows by one activation each call and is read by the next call",
    observe=block_attributes("length"),
    python_state=True,
)
def history_across_steps() -> Case:
    class Remembering(Block):
        length = 0

        def __init__(self) -> None:
            super().__init__()
            self.history: list[torch.Tensor] = []

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            self.history.append(h.detach())
            self.length = len(self.history)
            return torch.tanh(h + torch.stack(self.history).mean(0)) * h.sin()

    return case(Stack(Remembering), torch.randn(4, 8))


@PROGRAMS.add(
    "attention appends to a cache object while training",
    observe=lambda m: {"length": [k.shape[1] for k, _ in m.cache.values()]},
    ops=("aten.cat",),
)
def cache_object() -> Case:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, cache: dict[int, Any]) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            if id(self) in cache:
                k, v = torch.cat([cache[id(self)][0], k], 1), torch.cat([cache[id(self)][1], v], 1)
            cache[id(self)] = (k, v)
            return x + self.out(F.scaled_dot_product_attention(q, k, v))

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cache: dict[int, Any] = {}
            y = x
            for part in x.split(3, 1):
                y = part
                for block in self.blocks:
                    y = block(y, self.cache)
            return y

    return case(Net(Attending, 2), torch.randn(2, 6, 8))


@PROGRAMS.add(
    "the user's hook keeps every activation, and the loss reads them", observe=lambda m: {"n": len(m.features)}
)
def user_keeps_activations() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.features: list[torch.Tensor] = []
            blocks: Any = self.blocks
            for block in blocks:
                block.up.register_forward_hook(lambda _m, _i, out: self.features.append(out))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.features.clear()
            return super().forward(x)

    model = Net()
    return case(
        model,
        torch.randn(4, 8),
        loss=lambda o: o.square().mean() + 1e-3 * sum(t.square().mean() for t in model.features),
    )


@PROGRAMS.add("long skips across the whole net, and a middle that is in no list", ops=("convolution", "aten.cat"))
def long_skips() -> Case:
    class Res(nn.Module):
        def __init__(self, i: int, o: int) -> None:
            super().__init__()
            self.norm, self.conv = nn.GroupNorm(1, i), nn.Conv2d(i, o, 3, padding=1)
            self.skip = nn.Conv2d(i, o, 1) if i != o else nn.Identity()

        def forward(self, x: torch.Tensor, emb: torch.Tensor) -> torch.Tensor:
            h = self.conv(F.silu(self.norm(x))) + emb[:, : self.conv.out_channels, None, None]
            return h.tanh() + self.skip(x)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.time, self.stem, self.mid = nn.Linear(1, 8), nn.Conv2d(1, 2, 3, padding=1), Res(8, 8)
            self.down = nn.ModuleList([Res(2, 2), Res(2, 4), Res(4, 8)])
            self.up = nn.ModuleList([Res(16, 4), Res(8, 2), Res(4, 2)])

        def forward(self, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            emb, h, skips = self.time(t[:, None]), self.stem(x), []
            for layer in self.down:
                h = layer(h, emb)
                skips.append(h)
                h = F.avg_pool2d(h, 2)
            h = self.mid(h, emb)
            for layer in self.up:
                h = layer(torch.cat([F.interpolate(h, scale_factor=2), skips.pop()], 1), emb)
            return h

    return case(Net(), torch.randn(2, 1, 8, 8), torch.rand(2))


@PROGRAMS.add("one small module called in a loop: a solver without any list of blocks", ops=("aten.addmm",))
def unrolled_solver() -> Case:
    class Field(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 4)

        def forward(self, t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(torch.cat([y, t.expand(y.shape[0], 1)], -1))))

    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = Field()

        def forward(self, y: torch.Tensor) -> torch.Tensor:
            step = 1 / 6
            for i in range(6):
                t = torch.tensor(i * step)
                k1 = self.f(t, y)
                k2 = self.f(t + step / 2, y + step / 2 * k1)
                y = y + step * k2
            return y

    return case(Solver(), torch.randn(4, 4))


@PROGRAMS.add("very deep and narrow: what is kept for a layer must be smaller than the layer", heavy=True)
def deep_and_narrow() -> Case:
    class Thin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.lin = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.1 * torch.tanh(self.lin(self.norm(x)))

    return case(Stack(Thin, 30, dim=4), torch.randn(4, 4))


@PROGRAMS.add("an embedding and its optimizer outweigh every activation", may_drop_nothing=True, ops=("embedding",))
def parameters_dominate() -> Case:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.users, self.items, self.block = nn.Embedding(600, 8), nn.Embedding(600, 8), Block()

        def forward(self, u: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
            return self.block(self.users(u) * self.items(i)).sum(-1)

    return case(Towers(), torch.randint(0, 600, (6,)), torch.randint(0, 600, (6,)))


@PROGRAMS.add("tensors without elements, with one element, and zero-dimensional ones")
def empty_and_scalar_tensors() -> Case:
    class Odd(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            nothing = h[:0].sin()
            scalar = h.mean().exp()
            return torch.cat([nothing, h.tanh() * scalar]) + nothing.sum() + h[:1].sigmoid()

    return case(Stack(Odd), torch.randn(3, 8))


@PROGRAMS.add("the loss itself is the output, and it is a dict", observe=calls, python_state=True)
def loss_in_the_output() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor, labels: Any = None) -> dict[str, Any]:
            logits = super().forward(x)
            return {"logits": logits, "loss": F.cross_entropy(logits, labels), "hidden": None}

    return case(Net(Counted), torch.randn(4, 8), labels=torch.tensor([1, 3, 0, 7]), loss=lambda o: o["loss"])


@PROGRAMS.add(
    "a Hugging Face causal model with adapters, labels and padding as keywords",
    observe=lambda m: {"adapters": sum(p.grad is not None for n, p in m.named_parameters() if "lora_" in n)},
    slow=True,
)
def llama_with_adapters() -> Case:
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = LlamaConfig(
        vocab_size=31,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=16,
        use_cache=False,
        attention_dropout=0.1,
    )
    lora = LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    model: Any = get_peft_model(LlamaForCausalLM(sizes), lora)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    ids = torch.randint(0, 31, (2, 6))
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    return case(model.train(), input_ids=ids, attention_mask=mask, labels=ids, loss=lambda out: out.loss)


@PROGRAMS.add(
    "kernels leave gaps in their notes for backward: a recurrent layer, and alignments of texts of several lengths",
    ops=("mkldnn_rnn_layer", "_ctc_loss"),
)
def notes_with_gaps() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into = nn.Linear(6, 8)
            self.layers = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True, dropout=0.2)
            self.head = nn.Linear(16, 5)

        def forward(self, x: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
            hidden, (last, _) = self.layers(torch.tanh(self.into(x)))
            scores = self.head(hidden + last[:2].transpose(0, 1).flatten(1)[:, None]).log_softmax(2)
            lengths = torch.tensor([9, 8, 7]), torch.tensor([4, 2, 1])
            return F.ctc_loss(scores.transpose(0, 1), texts, *lengths)

    return case(Net(), torch.randn(3, 9, 6), torch.randint(1, 5, (3, 4)))
