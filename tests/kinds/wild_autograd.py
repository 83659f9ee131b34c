"""More of autograd and of modes: what a hostile model does."""

from __future__ import annotations

import contextlib
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .parts import Block, Counted, Module, Stack, attributes, calls
from .program import Case, Collection, Loss, case, mean_square

AUTOGRAD = Collection("autograd", is_wild=True)
MODES = Collection("modes", is_wild=True)
COLLECTIONS = (AUTOGRAD, MODES)


class _Dropped(Counted):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(h), 0.3)


@AUTOGRAD.add(
    "checkpoint of both kinds inside, with keyword arguments, dropout and another checkpoint in it",
    observe=calls,
    python_state=True,
    at_most=frozenset({"calls"}),
)
def checkpoints_mixed() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(_Dropped)

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)

            def two(y: torch.Tensor, *, scale: float) -> torch.Tensor:
                return checkpoint(self.blocks[0], y, use_reentrant=False) * scale

            x = checkpoint(two, x, scale=2.0, use_reentrant=False)
            x = checkpoint_sequential([self.blocks[1], self.blocks[2]], 2, x, use_reentrant=False)
            return checkpoint(self.blocks[0], x, use_reentrant=True)

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add("checkpoint inside without restoring generators, and early stop switched off")
def checkpoint_options() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            from torch.utils.checkpoint import set_checkpoint_early_stop

            with set_checkpoint_early_stop(False):
                x = checkpoint(self.blocks[0], x, use_reentrant=False, preserve_rng_state=False)
            x = checkpoint(self.blocks[1], x, use_reentrant=False, determinism_check="none")
            return self.blocks[2](x)

    return case(Net(), torch.randn(4, 8))


def _interleaved(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    outs = [model(*args), model(args[0] * 2)]
    losses = [loss_fn(o) for o in outs]
    weights = list(model.parameters())
    grads = torch.autograd.grad(losses[0], weights, retain_graph=True, allow_unused=True)
    losses[1].backward(retain_graph=True)
    penalty = sum(g.square().sum() for g in torch.autograd.grad(losses[0], weights[:2], create_graph=True))
    (penalty + losses[1] * 0.5).backward()
    for p, g in zip(weights, grads, strict=True):
        if g is not None and p.grad is not None:
            p.grad.add_(g, alpha=0.1)
    return losses[0].detach() + penalty.detach()


@AUTOGRAD.add("two graphs, three walks, one of them of second order", step=_interleaved)
def walks_interleaved() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _hessian_diagonal(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    x = args[0].detach().requires_grad_()
    out = model(x)
    (first,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    laplacian = x.new_zeros(())
    for i in range(3):
        (second,) = torch.autograd.grad(first[:, i].sum(), x, create_graph=True)
        laplacian = laplacian + second[:, i].square().mean()
    (laplacian + out.mean()).backward()
    return laplacian


@AUTOGRAD.add("a physics-informed loss: derivatives of derivatives of the output", step=_hessian_diagonal)
def laplacian_of_the_output() -> Case:
    return case(Stack(num=2), torch.randn(4, 8))


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, flag: Any) -> Any:
        s = torch.sigmoid(x)
        ctx.save_for_backward(x, s, None)
        ctx.numbers = (flag, x.detach().abs().mean())
        ctx.mark_non_differentiable(s_int := (s > 0.5).long())
        ctx.set_materialize_grads(False)
        return x * s, s_int

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        x, s, nothing = ctx.saved_tensors
        again = ctx.saved_tensors[1]
        assert nothing is None
        flag, mean = ctx.numbers
        return (g * (s + x * again * (1 - s)) * (1 + mean * 0) if flag else None), None


@AUTOGRAD.add("a Function saves None, a result of its own and an intermediate, keeps a tensor on ctx, reads twice")
def function_saves_everything() -> Case:
    class Swished(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            y, positive = _Swish.apply(h, True)
            return y * (1 + positive) + torch.tanh(y)

    return case(Stack(Swished), torch.randn(4, 8))


class _Newer(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, y: torch.Tensor) -> Any:
        return x * y.exp(), x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[0])
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        x, y, out = ctx.saved_tensors
        return g * y.exp() + h * x.cos(), g * out


@AUTOGRAD.add("a Function with setup_context that saves its own output, twice differentiable, in a gradient penalty")
def function_with_setup_context() -> Case:
    class Newer(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            a, b = _Newer.apply(h, torch.tanh(h))
            return torch.tanh(a) * b

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = x.detach().requires_grad_()
            out = super().forward(x)
            (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            return out + g

    return case(Net(Newer, num=2), torch.randn(4, 8))


@AUTOGRAD.add("the user's hooks around half of the model, inside, nested and pushed by hand")
def hooks_stacked() -> Case:
    log: list[int] = []
    half = torch.autograd.graph.saved_tensors_hooks(lambda t: (log.append(1), t.clone())[1], lambda t: t)
    twice = torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda box: box[0])

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            with half:
                x = self.blocks[0](x)
                with twice, torch.autograd.graph.save_on_cpu():
                    x = self.blocks[1](x)
            return self.blocks[2](x)

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add(
    "gradient hooks change, replace and accumulate; tensor pre-hooks on nodes; each once", observe=attributes("seen")
)
def hooks_of_every_kind() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[float] = []
            for p in self.parameters():
                p.register_post_accumulate_grad_hook(lambda q: self.seen.append(float(q.grad.sum())))

        def forward(self, x: torch.Tensor) -> Any:
            self.seen.clear()
            x = self.inp(x)
            for block in self.blocks:
                x = torch.tanh(block(x))
                x.register_hook(lambda g: g.clamp(-1, 1) * 1.5)
                assert x.grad_fn is not None
                x.grad_fn.register_hook(lambda gi, go: self.seen.append(float(go[0].sum())))
                x.grad_fn.register_prehook(lambda go: (go[0] * 0.5,))
                x.retain_grad()
            torch.autograd.graph.register_multi_grad_hook((x,), lambda gs: self.seen.append(len(gs)))
            return x

    return case(Net(), torch.randn(4, 8), loss=mean_square)


def _failing_replay(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    model.fail = True
    with contextlib.suppress(KeyboardInterrupt):
        loss.backward(retain_graph=True)
    model.fail = False
    model.zero_grad(set_to_none=True)
    loss.backward()
    return loss


@AUTOGRAD.add(
    "a hook interrupts backward with Ctrl-C between two replays; then the same graph goes through", step=_failing_replay
)
def interrupt_between_replays() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.fail = False

        def hook(self, g: torch.Tensor) -> None:
            if self.fail:
                raise KeyboardInterrupt

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                x = block(x)
                if k == 1:
                    x.register_hook(self.hook)
            return x

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add("functional_call with weights made in forward, and parameters stacked for an ensemble")
def functional_weights() -> Case:
    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0]))

        def forward(self, x: torch.Tensor) -> Any:
            total = x
            for k in range(3):
                weights = {n: p * torch.tanh(self.scale[k]) for n, p in self.block.named_parameters()}
                total = total + torch.func.functional_call(self.block, weights, (total,))
            return total

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add("forward-mode derivatives inside forward", opaque=True)
def forward_mode_inside() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            import torch.autograd.forward_ad as fwd

            x = self.inp(x)
            with fwd.dual_level():
                dual = fwd.make_dual(x, torch.ones_like(x))
                out, slope = fwd.unpack_dual(self.blocks[0](dual))
            return self.blocks[1](torch.tanh(out + slope))

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add(
    "vmap over the model's own block, and a Jacobian of a block inside forward", may_drop_nothing=True, opaque=True
)
def transforms_inside() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = torch.tanh(self.inp(x))
            x = torch.vmap(self.blocks[0])(x)
            jacobian = torch.func.jacrev(self.blocks[1])(x[0])
            return self.blocks[2](x @ jacobian)

    return case(Net(), torch.randn(4, 8))


@AUTOGRAD.add(
    "a leaf is made inside forward, its gradient read after a backward inside forward",
    observe=attributes("inner"),
    python_state=True,
)
def backward_inside_forward() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.zeros(())

        def forward(self, x: torch.Tensor) -> Any:
            probe = x.detach().clone().requires_grad_()
            with torch.enable_grad():
                self.blocks[0](torch.tanh(probe)).square().mean().backward(inputs=[probe])
            assert probe.grad is not None
            self.inner = probe.grad.sum()
            return super().forward(x - 0.1 * probe.grad)

    return case(Net(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- modes


class _Scaling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 1.25 if func is torch.tanh else out


class _Shifting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out + 0.125 if func is torch.ops.aten.tanh.default else out


@MODES.add("the model opens function and dispatch modes of its own inside forward")
def modes_inside_forward() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            with _Scaling():
                x = self.blocks[0](x)
            with _Shifting():
                x = self.blocks[1](x)
            with torch.device("cpu"), _Scaling(), _Shifting():
                return self.blocks[2](x)

    return case(Net(), torch.randn(4, 8))


@MODES.add("parts run under inference_mode and no_grad, and their results are used with gradients")
def inference_parts() -> Case:
    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            with torch.inference_mode():
                statistics = self.blocks[0](self.inp(x)).mean(0)
            with torch.no_grad():
                target = self.blocks[1](x)
            y = self.blocks[2](self.inp(x) + statistics.clone())
            return torch.tanh(y) * target + y.detach()

    return case(Net(), torch.randn(4, 8))


def _generate(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    model.eval()
    with torch.inference_mode():
        sample = model(args[0] * 0.5)
    model.train()
    with torch.no_grad():
        reward = model(args[0]).mean()
    (loss * (1 + reward + sample.mean())).backward()
    return loss


@MODES.add("a reward from generation under inference_mode between forward and backward, with dropout", step=_generate)
def reward_between() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


@contextlib.contextmanager
def _sdpa_and_autocast() -> Any:
    with sdpa_kernel([SDPBackend.MATH]), torch.autocast("cpu", torch.bfloat16):
        yield


@MODES.add("attention forms chosen around the step, under autocast, and another inside", around=_sdpa_and_autocast)
def sdpa_forms_nested() -> Case:
    class Attention(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            q = h.view(1, 2, 4, 6)
            a = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH], set_priority=True):
                b = F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)
            return (a * b).reshape(4, 12).to(h.dtype)

    return case(Stack(Attention), torch.randn(4, 8))


@MODES.add("threads, precision and determinism switched inside forward, and switched back")
def switches_inside() -> Case:
    class Switching(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            before = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("medium")
            was = torch.are_deterministic_algorithms_enabled()
            torch.use_deterministic_algorithms(True, warn_only=True)
            try:
                with torch.backends.mkldnn.flags(enabled=False):
                    return torch.tanh(h @ h.t()) @ h + torch.empty_like(h).fill_(0.5)
            finally:
                torch.use_deterministic_algorithms(was)
                torch.set_float32_matmul_precision(before)

    return case(Stack(Switching), torch.randn(4, 8))


class _Fused(torch.autograd.Function):
    """Adds the gradient of a weight to an attribute of it, found at the saved tensor, and asks whose it is."""

    names: ClassVar[dict[torch.Tensor, str]] = {}

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, table: Any) -> torch.Tensor:
        _Fused.names[weight] = "weight"
        ctx.save_for_backward(x, weight, table)
        return x @ weight.t() * table

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, table = ctx.saved_tensors
        assert _Fused.names[weight] == "weight"
        assert type(weight) is nn.Parameter
        sums: Any = weight
        sums.main_grad.add_((grads[0] * table).t() @ x)
        return grads[0] * table @ weight * table.factor, None, None


@AUTOGRAD.add(
    "a Function finds a saved weight by what it is, and by what people put on it",
    observe=lambda model: {"sums": [layer.weight.main_grad for layer in model.layers]},
    python_state=True,
)
def saved_weight_is_itself() -> Case:
    class Layer(Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8) / 3)
            self.weight.main_grad = torch.zeros(8, 8)  # type: ignore[attr-defined]
            self.register_buffer("table", torch.rand(8))
            self.table.factor = 0.5

        def forward(self, x: torch.Tensor) -> Any:
            return torch.tanh(_Fused.apply(x, self.weight, self.table))

    class Net(Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.layers = nn.Linear(8, 8), nn.ModuleList(Layer() for _ in range(3))

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for layer in self.layers:
                x = layer(x)
            return x

    return case(Net(), torch.randn(4, 8))
