"""Families of synthetic steps that resemble what people train."""

from __future__ import annotations

from collections.abc import Sequence

from keepwise.ir import Step
from tests.steps.builder import StepBuilder, Tensor, check_step


def chain(n: int, *, sizes: Sequence[int] | None = None, seconds: Sequence[float] | None = None) -> Step:
    """x_i = f_i(x_(i-1)) for i in 1..n; each f_i saves its input. Uniform (1 byte, 1 second) unless told."""
    sizes = sizes or [1] * (n + 1)
    seconds = seconds or [1.0] * n
    b = StepBuilder()
    x = b.input(sizes[0])
    x = b.one(x, size=sizes[0], seconds=0.0, target="aten.copy.default")
    for i in range(n):
        x = b.one(x, size=sizes[i + 1], save=[x], seconds=seconds[i], target="aten.tanh.default", path=f"layer.{i}")
    return check_step(b.build(x))


def gpt_like(
    blocks: int,
    *,
    width: int = 64,
    vocab: int = 256,
    dropout: bool = False,
    grads: str = "held",
    optimizer: bool = False,
) -> Step:
    """Pre-norm transformer: layer norm, attention, MLP with a GELU of several ops; `width` bytes a residual tensor."""
    w = width
    b = StepBuilder(grads=grads)
    tokens = b.input(max(w // 8, 1))
    wte = b.parameter(vocab, "wte.weight")
    x = b.one(tokens, wte, size=w, save=[tokens], seconds=0.1, target="aten.embedding.default", path="wte")
    for i in range(blocks):
        x = _gpt_block(b, x, w, f"h.{i}", dropout=dropout)
    ln, mean = b.op(
        x,
        b.parameter(4),
        sizes=(w, 4),
        save=[x],
        save_outputs=(1,),
        seconds=0.2,
        target="aten.native_layer_norm.default",
        path="ln_f",
    )
    logits = b.one(ln, wte, size=vocab, save=[ln], seconds=4.0, path="lm_head")
    flat = b.view(logits)
    log = b.one(flat, size=vocab, save_outputs=(0,), seconds=1.0, target="aten._log_softmax.default")
    loss = b.one(log, tokens, size=4, save=[log, tokens], seconds=0.1, target="aten.nll_loss_forward.default")
    del mean
    return check_step(b.build(loss, optimizer=optimizer))


def moe_like(blocks: int, experts: int, *, width: int = 64) -> Step:
    """Blocks of a norm, a router and experts, one after the other, that add to one tensor in place; `width` bytes a residual tensor."""
    b = StepBuilder()
    x = b.one(b.input(width), b.parameter(4), size=width, seconds=0.1)
    for _ in range(blocks):
        norm = b.one(x, b.parameter(4), size=width, save=[x], seconds=0.7, target="aten.mul.Tensor")
        normed = b.one(norm, b.parameter(4), size=width, save=[norm], seconds=0.5, target="aten.mul.Tensor")
        routes = b.one(normed, b.parameter(4), size=1, save=[normed], save_outputs=(0,), seconds=0.1)
        total = b.one(normed, size=width, seconds=0.1, target="aten.zeros_like.default")
        for e in range(experts):
            w = width * (e + 2) // (2 * experts)
            taken = b.one(normed, routes, size=w, save=[routes], seconds=0.1 * (e + 1), target="aten.index.Tensor")
            wide = b.one(taken, b.parameter(4), size=4 * w, save=[taken], seconds=3.0 + e)
            gate = b.one(wide, size=2 * w, save=[wide], seconds=0.2, target="aten.silu.default")
            hidden = b.one(gate, wide, size=2 * w, save=[gate, wide], seconds=0.2, target="aten.mul.Tensor")
            out = b.one(hidden, b.parameter(4), size=w, save=[hidden], seconds=1.5 + e)
            scaled = b.one(out, routes, size=w, save=[out, routes], seconds=0.1, target="aten.mul.Tensor")
            total = b.write(total, scaled, routes, seconds=0.1)
        x = b.one(x, total, size=width, seconds=0.2, target="aten.add.Tensor")
    return check_step(b.build(b.one(x, size=4, save=[x])))


def _gpt_block(b: StepBuilder, x: Tensor, w: int, path: str, *, dropout: bool) -> Tensor:
    def norm(y: Tensor, name: str) -> Tensor:
        out, _ = b.op(
            y,
            b.parameter(4),
            sizes=(w, 4),
            save=[y],
            save_outputs=(1,),
            seconds=0.2,
            target="aten.native_layer_norm.default",
            path=f"{path}.{name}",
        )
        return out

    def linear(y: Tensor, size: int, name: str, seconds: float) -> Tensor:
        return b.one(
            y,
            b.parameter(w * 2),
            size=size,
            save=[y],
            seconds=seconds,
            target="aten.addmm.default",
            path=f"{path}.{name}",
        )

    def maybe_dropout(y: Tensor, name: str) -> Tensor:
        if not dropout:
            return y
        out, _ = b.op(
            y,
            sizes=(w, w // 4),
            save_outputs=(1,),
            seconds=0.2,
            random="cpu",
            rng_bytes=50,
            target="aten.native_dropout.default",
            path=f"{path}.{name}",
        )
        return out

    qkv = linear(norm(x, "ln_1"), 3 * w, "attn.c_attn", 3.0)
    q, k, v = (b.view(qkv, path=f"{path}.attn") for _ in range(3))
    out, _ = b.op(
        q,
        k,
        v,
        sizes=(w, 8),
        save=[q, k, v],
        save_outputs=(0, 1),
        seconds=2.0,
        workspace=w,
        target="aten._scaled_dot_product_flash_attention_for_cpu.default",
        path=f"{path}.attn",
    )
    att = maybe_dropout(linear(b.view(out, path=f"{path}.attn"), w, "attn.c_proj", 1.0), "attn.drop")
    x = b.one(x, att, size=w, seconds=0.1, target="aten.add.Tensor", path=path)
    up = linear(norm(x, "ln_2"), 4 * w, "mlp.c_fc", 4.0)
    p = f"{path}.mlp.act"
    cube = b.one(up, size=4 * w, save=[up], seconds=0.8, target="aten.pow.Tensor_Scalar", path=p)
    inner = b.one(up, cube, size=4 * w, seconds=0.3, target="aten.add.Tensor", path=p)
    tanh = b.one(inner, size=4 * w, save_outputs=(0,), seconds=0.6, target="aten.tanh.default", path=p)
    act = b.one(up, tanh, size=4 * w, save=[up, tanh], seconds=0.3, target="aten.mul.Tensor", path=p)
    down = maybe_dropout(linear(act, w, "mlp.c_proj", 4.0), "mlp.drop")
    return b.one(x, down, size=w, seconds=0.1, target="aten.add.Tensor", path=path)


def unet_like(depth: int, *, width: int = 64) -> Step:
    """Encoder and decoder with one long skip a level; convolution, batch norm that moves a buffer, in-place ReLU."""
    b = StepBuilder()
    size = width << depth

    def double(x: Tensor, size: int, path: str) -> Tensor:
        for i in range(2):
            p = f"{path}.{i}"
            y = b.one(x, b.parameter(16), size=size, save=[x], seconds=4.0, target="aten.convolution.default", path=p)
            y = b.batch_norm(y, b.buffer(4), size=size, seconds=0.5, path=p)
            x = b.write(y, save_result=True, seconds=0.2, path=p)
        return x

    x = double(b.input(size), size, "stem")
    skips = []
    for level in range(depth):
        skips.append((x, size))
        size //= 2
        x = b.one(x, size=size, save=[x], seconds=0.3, target="aten.max_pool2d.default", path=f"down.{level}")
        x = double(x, size, f"down.{level}")
    for level in reversed(range(depth)):
        skip, size = skips.pop()
        x = b.one(x, size=size, seconds=0.3, target="aten.upsample_nearest2d.default", path=f"up.{level}")
        x = b.one(skip, x, size=2 * size, seconds=0.3, target="aten.cat.default", path=f"up.{level}")
        x = double(x, size, f"up.{level}")
    return check_step(b.build(b.one(x, size=4, save=[x], seconds=0.1, target="aten.mse_loss.default")))


def in_place_stream(blocks: int, *, width: int = 8) -> Step:
    """A residual stream that is updated in place: every block's input is an earlier version of one storage."""
    b = StepBuilder()
    x = b.one(b.input(width), size=width, seconds=0.1, target="aten.embedding.default")
    for i in range(blocks):
        p = f"h.{i}"
        y = b.one(x, size=width, save_outputs=(0,), seconds=1.0, target="aten.sigmoid.default", path=p)
        z = b.one(y, b.parameter(8), size=width, save=[y], seconds=3.0, path=p)
        x = b.write(x, z, target="aten.add_.Tensor", seconds=0.1, path=p)
    return check_step(b.build(b.one(x, size=4, save=[x], seconds=0.1, target="aten.sum.default")))


def accumulated(micro_batches: int, blocks: int, *, width: int = 8) -> Step:
    """Gradient accumulation: forward and backward of every micro-batch in turn, on the same weights."""
    b = StepBuilder()
    weights = [b.parameter(width) for _ in range(blocks)]

    def forward() -> Tensor:
        x = b.one(b.input(width), size=width, seconds=0.1, target="aten.copy.default")
        for i, w in enumerate(weights):
            y = b.one(x, w, size=2 * width, save=[x, w], seconds=3.0, path=f"layer.{i}")
            x = b.one(y, size=width, save=[y], seconds=1.0, target="aten.glu.default", path=f"layer.{i}")
        return b.one(x, size=4, save=[x], seconds=0.1, target="aten.sum.default")

    for _ in range(micro_batches - 1):
        b.backward(forward())
    return check_step(b.build(forward(), optimizer=True))


def read_twice(blocks: int, *, width: int = 8) -> Step:
    """Two backward passes through one graph (`retain_graph=True`): every save is read twice."""
    b = StepBuilder(grads="fresh")
    x = b.one(b.input(width), size=width, seconds=0.1, target="aten.copy.default")
    for i in range(blocks):
        y = b.one(x, b.parameter(8), size=2 * width, save=[x], seconds=3.0, path=f"layer.{i}")
        x = b.one(y, size=width, save_outputs=(0,), save=[y], seconds=1.0, target="aten.glu.default", path=f"layer.{i}")
    b.backward(x, retain=True)
    return check_step(b.build(x))
