"""Autograd: every way to call backward, and every hook that may sit on the way."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .parts import Block, Counted, Stack, attributes, block_attributes, calls
from .program import Case, Collection, Loss, case

PROGRAMS = Collection("autograd")


class Silu(Block):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.silu(h) * h.sigmoid()


# ---------------------------------------------------------------------------------------------- several backward passes


def _backward_twice(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    return loss


@PROGRAMS.add("the graph is walked twice", step=_backward_twice)
def backward_twice() -> Case:
    return case(Stack(Silu), torch.randn(4, 8))


def _backward_three_losses(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out = model(*args, **kwargs)
    losses = [out.square().mean(), out.sin().sum() * 0.1, out.abs().amax()]
    for loss in losses[:-1]:
        loss.backward(retain_graph=True)
    losses[-1].backward()
    return torch.stack([loss.detach() for loss in losses]).sum()


@PROGRAMS.add("three losses over one graph, one after the other", step=_backward_three_losses)
def three_losses() -> Case:
    return case(Stack(Silu), torch.randn(4, 8))


def _backward_too_often(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    if model.again:
        loss.backward()
    return loss


@PROGRAMS.add(
    "a second backward without retain_graph: plain raises",
    step=_backward_too_often,
    between=lambda model, i: setattr(model, "again", i == 1),
    plain_raises=RuntimeError,
)
def backward_too_often() -> Case:
    model = Stack(Silu)
    model.again = False  # type: ignore[assignment]
    return case(model, torch.randn(4, 8))


class _Sides(Block):
    def forward(self, x: torch.Tensor) -> Any:
        h = F.silu(self.up(x))
        return x + self.down(h), h.sin(), h.exp()


class _TwoTasks(Stack):
    norms: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        x, side = self.inp(x), torch.zeros(())
        for block in self.blocks:
            x, s, _unused = block(x)
            side = side + s.mean()
        return x, side


def _grad_norm(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out, side = model(*args, **kwargs)
    shared = [model.inp.weight]
    (g1,) = torch.autograd.grad(out.square().mean(), shared, retain_graph=True)
    (g2,) = torch.autograd.grad(side, shared, retain_graph=True)
    loss = out.square().mean() + (g1.norm() / (g2.norm() + 1e-9)).detach() * side
    loss.backward()
    model.norms = (g1, g2)
    return loss


@PROGRAMS.add("autograd.grad over one graph for each task, then backward", step=_grad_norm, observe=attributes("norms"))
def balanced_tasks() -> Case:
    return case(_TwoTasks(_Sides), torch.randn(4, 8))


def _partial(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out, side = model(*args, **kwargs)
    torch.autograd.backward(side, inputs=[model.blocks[0].up.weight, model.inp.bias], retain_graph=True)
    torch.autograd.backward([out, side], [torch.full_like(out, 0.1), torch.tensor(0.3)], inputs=[model.inp.weight])
    return out.sum() + side


@PROGRAMS.add("only some inputs, only some outputs, several roots with their own gradients", step=_partial)
def partial_backward() -> Case:
    return case(_TwoTasks(_Sides), torch.randn(4, 8))


def _row_by_row(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out = model(*args, **kwargs).sum(0)
    rows = [torch.autograd.grad(out[k], args[0], retain_graph=True)[0] for k in range(3)]
    (all_rows,) = torch.autograd.grad(
        out, args[0], torch.eye(8)[:3].unsqueeze(1).expand(3, 1, 8)[:, 0], retain_graph=True, is_grads_batched=True
    )
    model.rows = torch.stack(rows)
    model.batched = all_rows
    loss = loss_fn(out)
    loss.backward()
    return loss


@PROGRAMS.add(
    "a Jacobian, row by row and batched with vmap over backward",
    step=_row_by_row,
    observe=attributes("rows", "batched"),
)
def jacobian_rows() -> Case:
    return case(Stack(Silu), torch.randn(4, 8, requires_grad=True))


# ---------------------------------------------------------------------------------------------- higher order


@PROGRAMS.add("forces: the gradient of an energy is part of the output", ops=("softplus_backward",))
def forces() -> Case:
    class Potential(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.out = nn.Linear(3, 8), nn.Linear(8, 1)
            self.blocks = nn.ModuleList([Block() for _ in range(2)])

        def forward(self, pos: torch.Tensor) -> Any:
            pos = pos.detach().requires_grad_()
            x = F.softplus(self.inp(pos))
            for block in self.blocks:
                x = block(x)
            energy = self.out(x).sum()
            (grad,) = torch.autograd.grad(energy, pos, create_graph=True)
            return energy, -grad

    target = torch.randn(5, 3)
    return case(Potential(), torch.randn(5, 3), loss=lambda o: 1e-3 * o[0].square() + (o[1] - target).square().mean())


def _penalty(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    x = args[0].detach().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = loss_fn(out) + (grad.norm(dim=-1) - 1).square().mean()
    loss.backward()
    return loss


@PROGRAMS.add("gradient penalty: double backward through the model", step=_penalty)
def gradient_penalty() -> Case:
    return case(Stack(Silu), torch.randn(4, 8))


def _hessian_vector(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    params = list(model.parameters())
    loss = loss_fn(model(*args, **kwargs))
    grads = torch.autograd.grad(loss, params, create_graph=True)
    product = torch.stack([g.sum() for g in grads]).sum()
    second = torch.autograd.grad(product, params, create_graph=True, allow_unused=True)
    third = sum(h.square().sum() for h in second if h is not None)
    (loss + 1e-3 * third).backward()
    return loss


@PROGRAMS.add("third order: a Hessian-vector product that is differentiated again", step=_hessian_vector)
def third_order() -> Case:
    return case(Stack(num=2), torch.randn(4, 8))


def _create_graph_backward(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt()
    norm.backward()
    return norm


@PROGRAMS.add("only the norm of the gradients is trained on", step=_create_graph_backward)
def gradient_norm_only() -> Case:
    return case(Stack(Silu, 2), torch.randn(4, 8))


@PROGRAMS.add("an inner loop of gradient steps inside forward, differentiated by the outer one")
def inner_loop() -> Case:
    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.rate = nn.Parameter(torch.randn(8, 8) / 3), nn.Parameter(torch.tensor(0.1))
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            fast = self.start
            for _ in range(2):
                inner = (torch.tanh(self.blocks[0](x) @ fast) - y).square().mean()
                (g,) = torch.autograd.grad(inner, fast, create_graph=True)
                fast = fast - self.rate * g
            return torch.tanh(x @ fast) - y

    return case(Meta(), torch.randn(4, 8), torch.randn(4, 8))


@PROGRAMS.add("an equilibrium: forward solves without a graph, a hook solves again in backward")
def equilibrium() -> Case:
    class Equilibrium(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.inp = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(6):
                    z = torch.tanh(0.3 * self.f(z) + x)
            z = torch.tanh(0.3 * self.f(z) + x)
            z0 = z.detach().requires_grad_()
            f0 = torch.tanh(0.3 * self.f(z0) + x)

            def solve(grad: torch.Tensor) -> torch.Tensor:
                g = grad
                for _ in range(4):
                    g = grad + torch.autograd.grad(f0, z0, g, retain_graph=True)[0]
                return g

            z.register_hook(solve)
            return z

    return case(Equilibrium(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- torch.func


def _per_sample(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    from torch.func import functional_call, grad, vmap

    params = {n: p.detach() for n, p in model.named_parameters()}

    def one(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    each = vmap(grad(one), in_dims=(None, 0, 0))(params, *args)
    for name, p in model.named_parameters():
        p.grad = each[name].sum(0)
    return torch.stack([g.square().sum() for g in each.values()]).sum()


@PROGRAMS.add(
    "per-sample gradients: torch refuses saved-tensor hooks there",
    step=_per_sample,
    clear_error="torch.func",
    may_drop_nothing=True,
    opaque=True,
)
def func_per_sample_gradients() -> Case:
    return case(Stack(num=2), torch.randn(4, 8), torch.tensor([0, 3, 1, 2]))


@PROGRAMS.add("torch.func.grad inside forward", may_drop_nothing=True, opaque=True)
def func_grad_inside_forward() -> Case:
    class Inside(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.func.grad(lambda t: t.sin().square().sum())(x.detach())
            return super().forward(x * scale)

    return case(Inside(), torch.randn(4, 8))


@PROGRAMS.add("torch.func.vjp and jvp inside one block of several", may_drop_nothing=True, opaque=True)
def func_vjp_and_jvp_inside() -> Case:
    class Tangent(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            inner = h.detach()
            pull: Any = torch.func.vjp(torch.tanh, inner)[1]
            push: Any = torch.func.jvp(torch.sin, (inner,), (torch.ones_like(inner),))[1]
            return torch.tanh(h) + 0.1 * pull(torch.ones_like(inner))[0] * push

    return case(Stack(Tangent, 2), torch.randn(4, 8))


@PROGRAMS.add("vmap inside forward, and functional_call with other weights")
def vmap_and_functional_call() -> Case:
    class Vmapped(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.func.vmap(lambda row: torch.sin(row) * row.sum())(self.inp(x))
            other = {n: p * 0.9 for n, p in self.blocks[0].named_parameters()}
            return torch.func.functional_call(self.blocks[0], other, (x,)) + self.blocks[1](x)

    return case(Vmapped(num=2), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- custom Functions


class FusedNorm(torch.autograd.Function):
    """Saves an intermediate that is neither input nor output, and reads `saved_tensors` twice."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        n = x * rstd
        s = torch.sigmoid(n * w)
        ctx.save_for_backward(x, w, rstd, n, s)
        return n * w * s

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        if not ctx.needs_input_grad[0] and len(ctx.saved_tensors) == 0:
            return None, None
        assert len(ctx.saved_tensors) == 5
        _x, w, rstd, n, s = ctx.saved_tensors
        gz = g * (s + n * w * s * (1 - s))
        gn = gz * w
        return rstd * (gn - n * (gn * n).mean(-1, keepdim=True)), (gz * n).sum(0)


@PROGRAMS.add("a Function reads its saved tensors twice and ends the region")
def function_reads_twice() -> Case:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.w = nn.Linear(8, 8), nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return FusedNorm.apply(self.lin(x), self.w)

    return case(Stack(Fused), torch.randn(4, 8))


class Gate(torch.autograd.Function):
    """Keeps tensors as attributes of ctx, where no hook sees them."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.s, ctx.b = torch.sigmoid(a), b.clone()
        return ctx.s * b

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        return g * ctx.b * ctx.s * (1 - ctx.s), g * ctx.s


@PROGRAMS.add("a Function keeps tensors on ctx", ops=("sigmoid",))
def function_keeps_on_ctx() -> Case:
    class Gated(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return Gate.apply(h, h.tanh())

    return case(Stack(Gated), torch.randn(4, 8))


class RoundThrough(torch.autograd.Function):
    """New style, with a non-differentiable output, no materialised gradients and a Python number on ctx."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: float) -> Any:  # type: ignore[override]
        return (x * scale).round() / scale, (x > 0).long()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.scale = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, output[0])

    @staticmethod
    def backward(ctx: Any, g: Any, _index: Any) -> Any:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return None if g is None else g * torch.sigmoid(x - y) * ctx.scale, None


class InPlaceScale(torch.autograd.Function):
    """Writes its input and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(x.clone(), w)
        x.mul_(w)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w, (g * x).sum(0)


@PROGRAMS.add("Functions with dirty inputs, extra outputs, numbers on ctx, once_differentiable", ops=("round",))
def function_forms() -> Case:
    class Forms(Block):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.rand(12) + 0.5)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = InPlaceScale.apply(h * 1.5, self.w)
            y, positive = RoundThrough.apply(h, 8.0)
            return y * positive + h.sin()

    return case(Stack(Forms), torch.randn(4, 8))


class Reversible(torch.autograd.Function):
    """Rebuilds its own graph in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module, *params: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.module = module
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            out = torch.cat([a, b + module(a)], -1)
        ctx.save_for_backward(out.detach())
        return out

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:  # type: ignore[override]
        (out,) = ctx.saved_tensors
        a = out[:, :4].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(a)
        params = list(ctx.module.parameters())
        ga, gb = g.chunk(2, -1)
        grads = torch.autograd.grad(y, [a, *params], gb)
        return torch.cat([ga + grads[0], gb], -1), None, *grads[1:]


@PROGRAMS.add("a Function that runs autograd inside its backward", observe=calls, python_state=True)
def function_rebuilds_in_backward() -> Case:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Counted(4, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Reversible.apply(x, self.inner, *self.inner.parameters()).flip(-1).sin()

    return case(Stack(Half), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- saved-tensor hooks


def _hooks_around(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    def pack(t: torch.Tensor) -> Any:
        model.packed += 1
        return t.detach().numpy().copy(order="K")  # other strides would change last bits

    def unpack(a: Any) -> torch.Tensor:
        model.unpacked += 1
        return torch.from_numpy(a)

    with saved_tensors_hooks(pack, unpack):
        loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add(
    "the user's own hooks around the model: what is kept passes through them, what is dropped does not",
    step=_hooks_around,
    observe=attributes("packed", "unpacked"),
    not_compared=frozenset({"packed", "unpacked"}),
    python_state=True,
    shows=lambda records: records[0].observed["packed"] > 0,
)
def user_hooks_around() -> Case:
    model: Any = Stack(Silu)
    model.packed = model.unpacked = 0
    return case(model, torch.randn(4, 8))


class _PackedBlock(Block):
    packed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def pack(t: torch.Tensor) -> Any:
            self.packed += 1
            return t.shape, t.detach().double()

        with saved_tensors_hooks(pack, lambda pair: pair[1].float()):
            h = torch.tanh(self.up(x)).sin()
        return x + self.down(h)


@PROGRAMS.add(
    "the user's own hooks inside a block win there",
    observe=block_attributes("packed"),
    python_state=True,
    ops=("_to_copy",),
)
def user_hooks_inside() -> Case:
    return case(Stack(_PackedBlock), torch.randn(4, 8))


@PROGRAMS.add("torch's save_on_cpu around and inside", around=lambda: save_on_cpu(pin_memory=False))
def save_on_cpu_around_and_inside() -> Case:
    class Saving(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with save_on_cpu(pin_memory=False):
                return torch.tanh(h) * h.cos()

    return case(Stack(Saving), torch.randn(4, 8))


@PROGRAMS.add("a lossy store of the user's: 8 bits of what was saved", may_drop_nothing=True)
def lossy_hooks_inside() -> Case:
    class Lossy(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with saved_tensors_hooks(lambda t: (t.half(), t.dtype), lambda pair: pair[0].to(pair[1])):
                return torch.tanh(h) * h.sigmoid()

    return case(Stack(Lossy), torch.randn(4, 8))


@PROGRAMS.add("hooks are forbidden for a while inside forward", may_drop_nothing=True, clear_error="hooks", opaque=True)
def hooks_disabled_inside() -> Case:
    class Forbidding(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.inp(x))
            with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
                x = x.sin() * 2
            return self.blocks[1](x)

    return case(Forbidding(), torch.randn(4, 8))


def _in_mutation_mode(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    with allow_mutation_on_saved_tensors():
        loss = loss_fn(model(*args, **kwargs))
        loss.backward()
    return loss


@PROGRAMS.add(
    "torch's own mode that allows writing saved tensors", step=_in_mutation_mode, may_drop_nothing=True, opaque=True
)
def allow_mutation() -> Case:
    class Mutating(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            y = torch.exp(h * 0.5)
            z = y.sin()
            y.mul_(0.5)
            return z + y

    return case(Stack(Mutating), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- anomaly mode and gradient hooks


def _anomaly(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    with torch.autograd.set_detect_anomaly(True):
        loss = loss_fn(model(*args, **kwargs))
        loss.backward()
    return loss


@PROGRAMS.add("anomaly mode is on", step=_anomaly)
def anomaly_mode() -> Case:
    return case(Stack(Silu), torch.randn(4, 8))


@PROGRAMS.add(
    "anomaly mode finds a NaN in backward, as plain does",
    step=_anomaly,
    inputs=lambda i, built: ((built.args[0] if i != 1 else torch.zeros(4, 8),), {}),
    plain_raises=RuntimeError,
)
def anomaly_mode_finds_nan() -> Case:
    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sqrt((x @ self.w).square().sum(-1))  # derivative 0/0 at zero

    return case(Zero(), torch.randn(4, 8))


@PROGRAMS.add(
    "hooks on activations and weights, retained gradients and module backward hooks, each once",
    observe=attributes("log"),
    python_state=True,
    shows=lambda records: len(records[0].observed["log"]) > 10,
)
def gradient_hooks() -> Case:
    class Hooked(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.log: list[Any] = []
            blocks: Any = self.blocks
            blocks[0].up.weight.register_hook(lambda g: self.log.append("w") or g * 2)
            blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: self.log.append(p.grad.clone()))
            for block in self.blocks:
                block.register_full_backward_hook(lambda _m, gi, go: self.log.append(float(go[0].sum())))
                block.register_full_backward_pre_hook(lambda _m, go: self.log.append("pre"))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            x.register_hook(lambda g: self.log.append(float(g.norm())))
            for block in self.blocks:
                x = block(x)
                x.register_hook(lambda g: g.clamp(-0.1, 0.1))
            x.retain_grad()
            self.last = x
            torch.autograd.graph.register_multi_grad_hook([self.inp.weight, x], lambda gs: self.log.append(len(gs)))
            x.grad_fn.register_hook(lambda gi, go: self.log.append("node"))  # type: ignore[union-attr]
            x.grad_fn.register_prehook(lambda go: self.log.append("node pre"))  # type: ignore[union-attr]
            return x.tanh()

    return case(Hooked(), torch.randn(4, 8))


def _in_backward(model: Any) -> Any:
    model.updates = {}
    for name, p in model.named_parameters():
        optimizer = torch.optim.SGD([p], lr=0.05, momentum=0.9)
        model.updates[name] = 0

        def update(param: torch.Tensor, name: str = name, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()
            model.updates[name] += 1

        p.register_post_accumulate_grad_hook(update)
    return model


@PROGRAMS.add(
    "the optimizer runs inside backward: weights change while earlier layers still wait for their replay",
    observe=attributes("updates"),
    python_state=True,
    update=False,
    shows=lambda records: set(records[0].observed["updates"].values()) == {1},
)
def optimizer_in_backward() -> Case:
    return case(_in_backward(Stack(Silu)), torch.randn(4, 8, requires_grad=True))


@PROGRAMS.add(
    "the same with a weight that two layers share and a block that runs twice",
    observe=attributes("updates"),
    python_state=True,
    update=False,
)
def optimizer_in_backward_shared() -> Case:
    class Twice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return torch.sin(self.blocks[0](x))

    return case(_in_backward(Twice(Silu, 2)), torch.randn(4, 8, requires_grad=True))


# ---------------------------------------------------------------------------------------------- checkpoints inside


class _Checkpointed(nn.Module):
    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([Counted() for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = F.dropout(checkpoint(inner, x, use_reentrant=self.reentrant), 0.2, training=True)  # type: ignore[operator]
        return x


@PROGRAMS.add(
    "the author checkpoints inside already",
    observe=calls,
    python_state=True,
    at_most=frozenset({"calls"}),
    shows=lambda records: records[0].observed["calls"] == [2] * 4,
)
def checkpoint_inside() -> Case:
    return case(Stack(_Checkpointed, 2), torch.randn(4, 8))


@PROGRAMS.add(
    "the same with the older, reentrant form",
    observe=calls,
    python_state=True,
    at_most=frozenset({"calls"}),
)
def reentrant_checkpoint_inside() -> Case:
    class Older(_Checkpointed):
        reentrant = True

    return case(Stack(Older, 2), torch.randn(4, 8, requires_grad=True))


@PROGRAMS.add(
    "nested checkpoints, a sequential one and a selective one",
    observe=calls,
    python_state=True,
    at_most=frozenset({"calls"}),
)
def nested_and_selective_checkpoints() -> Case:
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    keep = [torch.ops.aten.addmm.default]

    class Nested(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, b, c = self.blocks
            x = self.inp(x)
            x = checkpoint(lambda t: checkpoint(a, t, use_reentrant=False).sin(), x, use_reentrant=False)  # type: ignore
            x = checkpoint_sequential([b, nn.Tanh(), a], 2, x, use_reentrant=False)
            contexts = lambda: create_selective_checkpoint_contexts(keep)  # noqa: E731
            return checkpoint(c, x, use_reentrant=False, context_fn=contexts)  # type: ignore[return-value]

    return case(Nested(Counted), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- looking into the graph


def _look_then_backward(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out = model(*args, **kwargs)
    model.peeked = out.grad_fn._saved_result.clone()
    model.names = []
    node, seen = out.grad_fn, set()
    while node is not None and node not in seen:
        seen.add(node)
        model.names.append(node.name())
        node = next((n for n, _ in node.next_functions if n is not None), None)
    loss = loss_fn(out)
    loss.backward()
    return loss


@PROGRAMS.add(
    "saved tensors are read by the user, outside backward, and the graph is walked",
    step=_look_then_backward,
    observe=attributes("peeked", "names"),
)
def graph_looked_into() -> Case:
    class Ends(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(super().forward(x))

    return case(Ends(Silu), torch.randn(4, 8))


def _forward_without_backward(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    model(*args, **kwargs)  # a forward with gradients on whose graph dies at once
    model.kept = model(*args, **kwargs).sum().detach()
    loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


@PROGRAMS.add("forwards whose backward never runs", step=_forward_without_backward, observe=attributes("kept"))
def forward_without_backward() -> Case:
    return case(Stack(Silu), torch.randn(4, 8))


@PROGRAMS.add("the graph is cut in the middle, and a part of the batch has no gradient")
def detached_in_the_middle() -> Case:
    class Cut(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.sin(self.inp(x))
            target = self.blocks[0](x).detach()
            y = self.blocks[1](x.detach()) * target + torch.where(x > 0, x, x.detach() * 0.5)
            with torch.no_grad():
                gain = self.blocks[2](y).sigmoid()
            return y.exp() * gain

    return case(Cut(), torch.randn(4, 8))
