"""Mutation: whatever is written in place, before or after a tensor was saved."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Module, Stack, attributes
from .program import Case, Collection, Loss, case, mean_square

PROGRAMS = Collection("mutation")


@PROGRAMS.add("forward writes to its argument", same_inputs=True, ops=("aten.mul_", "aten.clamp_"))
def argument_written() -> Case:
    class Writing(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.9)
            x.clamp_(-1.5, 1.5)
            return super().forward(x)

    return case(Writing(), torch.randn(4, 8))


@PROGRAMS.add("a block writes to the activation it was given", ops=("aten.add_", "aten.relu_"))
def residual_added_in_place() -> Case:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x += self.down(F.relu(self.up(x + 1), inplace=True)) * 0.5  # x itself is not saved
            return x

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.inp(x)
            for block in self.blocks:
                x = block(x.clone())
            return x

    return case(Net(InPlace), torch.randn(4, 8))


@PROGRAMS.add("a product kept by a policy is overwritten right after", ops=("aten.elu_", "aten.masked_fill_"))
def product_overwritten() -> Case:
    class Overwriting(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            F.elu(h, inplace=True)
            z = torch.mm(torch.sigmoid(h), h.t()) @ h
            z.masked_fill_(z < -0.5, -0.5)
            return z.tanh()

    return case(Stack(Overwriting, 2), torch.randn(4, 8, requires_grad=True))


@PROGRAMS.add(
    "parts of a tensor are written through views", ops=("aten.slice", "aten.mul_", "aten.copy_", "aten.fill_")
)
def views_written() -> Case:
    class Views(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = h.sin()
            h[:, :3].mul_(0.5)
            h[:, 3] = h[:, 4].detach() + 1
            h.t()[5].fill_(0.25)
            h.view(-1)[::4] -= 0.1
            h.diagonal().zero_()
            return h * torch.sigmoid(h.detach()) + h.square()

    return case(Stack(Views), torch.randn(4, 8))


@PROGRAMS.add("advanced indexing writes: mask, list, scatter, index_add", ops=("index_put_", "scatter_", "index_add_"))
def indexed_writes() -> Case:
    class Indexed(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h = h.tanh()
            out = torch.zeros_like(h)
            out[h > 0.2] = h[h > 0.2] * 2
            out[[0, 2], [1, 3]] = h[0, :2]
            out.scatter_(1, torch.zeros(h.shape[0], 1, dtype=torch.long), h[:, 5:6])
            out.index_add_(0, torch.tensor([1, 1]), h[2:4])
            return out * h

    return case(Stack(Indexed), torch.randn(4, 8))


@PROGRAMS.add("the last op of a region writes in place", ops=("leaky_relu_", "hardtanh_", "aten.add_"))
def region_ends_in_place() -> Case:
    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.hardtanh_(self.a(x))
            z = self.b(y)
            z.add_(y, alpha=0.3)
            return F.leaky_relu_(z, 0.1)

    return case(Stack(Ending), torch.randn(4, 8))


@PROGRAMS.add("out= writes into tensors that are then saved", ops=(".out",))
def out_arguments() -> Case:
    class Out(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                scale, values = torch.empty_like(h), torch.empty(h.shape[0], 3)
                indices = torch.empty(h.shape[0], 3, dtype=torch.long)
                torch.sigmoid(h, out=scale)
                torch.mul(scale, 2.0, out=scale)
                torch.topk(h, 3, out=(values, indices))
            return h.sin() * scale + h.gather(1, indices).sum(1, keepdim=True) * values.mean()

    return case(Stack(Out), torch.randn(4, 8))


@PROGRAMS.add("a scratch tensor changes its size and storage", ops=("resize_",))
def resized_scratch() -> Case:
    class Scratch(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            scratch = torch.empty(0)
            with torch.no_grad():
                torch.cat([h, h * 2], 1, out=scratch)
                scratch.resize_(h.shape[0], h.shape[1])
                scratch.clamp_(-1, 1)
            return torch.tanh(h * scratch)

    return case(Stack(Scratch), torch.randn(4, 8))


@PROGRAMS.add("a scratch buffer lives in the module and is reused by every step", ops=("aten.copy_",))
def buffer_reused() -> Case:
    class Reused(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scratch", torch.zeros(4, 12), persistent=False)

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.scratch.copy_(h).abs_().sqrt_()
            return torch.sin(h * self.scratch)

    return case(Stack(Reused), torch.randn(4, 8))


@PROGRAMS.add("an edit through .data moves no version, before the value is saved", ops=("aten.clamp_",))
def data_edited_before_save() -> Case:
    class Data(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            h.data.clamp_(-0.5, 0.5)
            h = h.sin()
            h.data.mul_(1.1)
            return h * h.cos()

    return case(Stack(Data), torch.randn(4, 8))


@PROGRAMS.add(
    "an edit through .data after the value was saved: plain backward reads the edited one", ops=("aten.mul_",)
)
def data_edited_after_save() -> Case:
    class Data(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            y = h.sin()
            h.data.mul_(0.5)
            return y * 2

    return case(Stack(Data), torch.randn(4, 8))


@PROGRAMS.add("the tensor behind .data is exchanged", ops=("aten.mul",))
def data_exchanged() -> Case:
    class Exchange(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(12))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            self.gain.data = self.gain * 1.05
            h = h.tanh()
            h.data = h.data * 0.9
            return h.sin() * self.gain.clone()

    return case(Stack(Exchange), torch.randn(4, 8))


@PROGRAMS.add("NumPy writes through shared memory: no op is seen")
def numpy_view_written() -> Case:
    class Hidden(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            array = h.detach().numpy()
            array[:, ::2] *= 0.5
            return torch.tanh(h) * h.sin()

    return case(Stack(Hidden), torch.randn(4, 8))


@PROGRAMS.add("a constant is read from NumPy memory that the caller rewrites in each step", python_state=True)
def numpy_constant_rewritten() -> Case:
    import numpy as np

    class Constant(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.array = np.linspace(-1, 1, 8, dtype=np.float32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.array *= 1.1
            return super().forward(x * torch.from_numpy(self.array)).sin() * torch.from_numpy(self.array.copy())

    return case(Constant(), torch.randn(4, 8))


def _edit_then_backward(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args, **kwargs))
    if model.edit:
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(0.9)
    loss.backward()
    return loss


def _begin_to_edit(model: Any, i: int) -> None:
    model.edit = True


@PROGRAMS.add(
    "weights are edited between forward and backward: plain raises, a replay from the new weights would not",
    step=_edit_then_backward,
    between=_begin_to_edit,
    plain_raises=RuntimeError,
    update=False,
)
def weights_edited_before_backward() -> Case:
    model = Stack()
    model.edit = False  # type: ignore[assignment]
    return case(model, torch.randn(4, 8))


@PROGRAMS.add(
    "the same from the first step on",
    step=_edit_then_backward,
    plain_raises=RuntimeError,
    update=False,
    may_drop_nothing=True,
    num_steps=1,
)
def weights_edited_always() -> Case:
    model = Stack()
    model.edit = True  # type: ignore[assignment]
    return case(model, torch.randn(4, 8))


@PROGRAMS.add(
    "a saved activation is edited afterwards: plain raises, a replay would quietly return the value before the edit",
    between=lambda model, i: setattr(model, "dirty", i == 1),
    plain_raises=RuntimeError,
)
def saved_activation_edited() -> Case:
    class Late(Stack):
        dirty = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.exp(self.inp(x))  # saves its result
            y = torch.tanh(self.blocks[0](h))
            if self.dirty:
                h.mul_(2)
            return y

    return case(Late(), torch.randn(4, 8))


@PROGRAMS.add(
    "a saved tensor is overwritten, but the branch that saved it is never walked: plain allows it", ops=("aten.mul_",)
)
def overwritten_but_never_read() -> Case:
    class Unused(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.up(x)) + 1
            unused = h * h.detach().sigmoid() + h.square()
            h.mul_(0.5)
            h.add_(0.1)
            del unused
            return x + self.down(h.sin())

    return case(Stack(Unused), torch.randn(4, 8))


def _zero_hidden(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    out, hidden = model(*args, **kwargs)
    loss = loss_fn(out)
    if model.zero:
        with torch.no_grad():
            hidden.zero_()
    loss.backward()
    return loss


@PROGRAMS.add(
    "an activation that backward reads is zeroed by the caller after forward: plain raises",
    step=_zero_hidden,
    between=lambda model, i: setattr(model, "zero", i == 1),
    plain_raises=RuntimeError,
)
def hidden_state_zeroed() -> Case:
    class Returning(Stack):
        zero = False

        def forward(self, x: torch.Tensor) -> Any:
            h = torch.sigmoid(self.inp(x))
            return self.blocks[0](h), h

    return case(Returning(), torch.randn(4, 8))


def _edit_argument(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    batch: dict[str, Any] = {"x": args[0].clone(), "more": [args[1].clone(), None]}
    out = model(**batch)
    batch["x"].add_(1)  # nothing that autograd saved
    batch["more"].append(torch.zeros(1))
    loss = loss_fn(out)
    batch["more"].clear()
    batch.clear()
    loss.backward()
    return loss


@PROGRAMS.add(
    "the arguments are written and their containers emptied after the call, which plain allows", step=_edit_argument
)
def containers_changed_after_call() -> Case:
    class Adding(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor, more: list[torch.Tensor | None]) -> torch.Tensor:  # type: ignore[override]
            h = x + self.shift  # saves nothing; x may be written afterwards
            h = torch.tanh(h) + sum(m.sin() for m in more if m is not None)
            return super().forward(h)

    return case(Adding(), torch.randn(4, 8), torch.randn(4, 8))


def _refill_argument(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    staging, total = torch.empty_like(args[0]), torch.zeros(())
    losses = []
    for i in range(3):
        staging.copy_(args[0]).mul_(1 + i)
        losses.append(loss_fn(model(staging)))  # three graphs read one staging tensor
    for loss in losses:
        loss.backward()
        total = total + loss.detach()
    return total


@PROGRAMS.add("one staging tensor is refilled for each micro-batch before any backward runs", step=_refill_argument)
def staging_tensor_refilled() -> Case:
    class Shifted(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    return case(Shifted(), torch.randn(4, 8))


class _MovingMean(Block):
    """Reads a buffer and then moves it: the replay has to see the value that forward saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(h - self.mean)
        with torch.no_grad():
            self.mean.lerp_(h.mean(0), 0.3)
            self.seen.add_(1)
        return out * (1 + 0.1 * self.seen.item())


@PROGRAMS.add(
    "a buffer is read, then moved; a second run of forward would move it twice",
    ops=("lerp",),
    shows=lambda records: int(records[-1].tensors["blocks.0.seen"]) == 3,
)
def moving_mean() -> Case:
    return case(Stack(_MovingMean), torch.randn(4, 8))


@PROGRAMS.add(
    "batch statistics move without a version, with and without momentum",
    ops=("native_batch_norm",),
    shows=lambda records: int(records[-1].tensors["blocks.0.norm.num_batches_tracked"]) == 3,
)
def batch_norm_statistics() -> Case:
    moments = iter([0.1, None, 0.01])

    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm = nn.BatchNorm2d(4, momentum=next(moments))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c2(F.relu(self.norm(self.c1(x)), inplace=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inp, self.blocks = nn.Conv2d(3, 4, 3, padding=1), nn.Sequential(Conv(), Conv(), Conv())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(self.inp(x)).mean((2, 3))

    return case(Net().train(), torch.randn(3, 3, 6, 6))


@PROGRAMS.add(
    "the other norms with state: instance, sync-free group, batch norm of sequences", ops=("native_batch_norm",)
)
def other_norms_with_state() -> Case:
    class Norms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(8, 8)
            self.instance = nn.InstanceNorm1d(6, affine=True, track_running_stats=True)
            self.batch, self.group = nn.BatchNorm1d(6), nn.GroupNorm(2, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            return x + torch.tanh(self.group(self.batch(self.instance(h))))

    return case(Stack(Norms).train(), torch.randn(3, 6, 8))


def _hooked(model: Any) -> Any:
    def before(module: Any, args: Any) -> None:
        with torch.no_grad():
            module.gain.mul_(0.97)

    def after(module: Any, args: Any, out: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            module.peak.copy_(torch.maximum(module.peak, out.detach().abs().amax()))
        return out * (1 + 0.01 * module.peak.clone())

    def backward(module: Any, grad_in: Any, grad_out: Any) -> None:
        with torch.no_grad():
            module.norms.add_(grad_out[0].norm())
            module.gain.mul_(1.01)

    for block in model.blocks:
        block.register_forward_pre_hook(before)
        block.register_forward_hook(after)
        block.register_full_backward_hook(backward)
    return model


@PROGRAMS.add("hooks edit buffers before, after and in backward; each once")
def buffers_edited_by_hooks() -> Case:
    class Hooked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("gain", torch.ones(12))
            self.register_buffer("peak", torch.zeros(()))
            self.register_buffer("norms", torch.zeros(()))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return torch.sin(h + self.gain).square()

    return case(_hooked(Stack(Hooked)), torch.randn(4, 8))


@PROGRAMS.add("power iteration moves vectors in forward, and weights are composed", ops=("mv",))
def spectral_and_weight_norm() -> Case:
    from torch.nn.utils import parametrizations

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = parametrizations.spectral_norm(nn.Linear(8, 8))
            self.b = parametrizations.weight_norm(nn.Linear(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.b(torch.tanh(self.a(x)))

    return case(Stack(Normed).train(), torch.randn(4, 8))


@PROGRAMS.add("lists of tensors are written at once", ops=("_foreach",))
def foreach_writes() -> Case:
    class Many(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            parts = [h.sin(), h.cos(), h * 2]
            torch._foreach_mul_(parts, [0.5, 2.0, 1.5])  # pyright: ignore[reportPrivateImportUsage]
            torch._foreach_add_(parts, 0.1)  # pyright: ignore[reportPrivateImportUsage]
            return parts[0] * parts[1].exp() + parts[2].sin()

    return case(Stack(Many), torch.randn(4, 8))


@PROGRAMS.add("weights are clipped at the start of forward, which plain allows", ops=("clamp_",))
def weights_clipped_first() -> Case:
    class Clipping(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for p in self.parameters():
                    p.clamp_(-0.3, 0.3)
            return super().forward(x)

    return case(Clipping(), torch.randn(4, 8))


@PROGRAMS.add(
    "keys and values are written into a cache that lives in the module",
    observe=attributes("filled"),
    python_state=True,
    ops=("aten.copy_",),
)
def cache_written_in_place() -> Case:
    class Caching(Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out, self.filled = nn.Linear(8, 24), nn.Linear(8, 8), 0
            self.register_buffer("keys", torch.zeros(2, 32, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            n = x.shape[1]
            with torch.no_grad():
                self.keys[:, self.filled : self.filled + n] = k
            self.filled += n
            past = self.keys[:, : self.filled - n].clone()
            scores = q @ torch.cat([past, k], 1).transpose(1, 2) / 3
            return x + self.out(scores.softmax(-1) @ torch.cat([past, v], 1))

    return case(Caching(), torch.randn(2, 4, 8))


@PROGRAMS.add("one noise tensor is filled again in each block and each step", ops=("normal_",))
def noise_tensor_refilled() -> Case:
    noise = torch.zeros(4, 12)

    class Noisy(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            return torch.sin(h + noise.normal_()) * (1 + h)

    return case(Stack(Noisy), torch.randn(4, 8))


@PROGRAMS.add("a view of the input of a region is written inside it", ops=("aten.mul_", "aten.slice"))
def view_of_the_input_written() -> Case:
    class Head(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0
            left, right = x[:, :4], x[:, 4:]
            left.mul_(right.detach().sigmoid())
            return x + self.down(self.up(x).cos())

    return case(Stack(Head), torch.randn(4, 8))


@PROGRAMS.add("set_ and swaps of storages of tensors without gradient", ops=("aten.set_",))
def storage_set() -> Case:
    class Setting(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            bank = torch.empty(0)
            bank.set_(h.detach().abs().sqrt())  # pyright: ignore[reportArgumentType]
            return torch.tanh(h) * bank

    return case(Stack(Setting), torch.randn(4, 8), loss=mean_square)
