"""More of steps that differ, threads and failures: what a hostile training loop does."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import threading
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from .parts import Block, Module, Stack, attributes
from .program import Case, Collection, Loss, case, mean_square

DIFFERING = Collection("differing_steps", is_wild=True)
TIME = Collection("time_threads", is_wild=True)
COLLECTIONS = (DIFFERING, TIME)


class _Dropped(Block):
    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.tanh(h), 0.3, self.training)


def _groups(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    optimizer, k = model.optimizer, model.steps
    model.steps += 1
    if k == 1:
        optimizer.add_param_group({"params": list(model.blocks[2].parameters()), "lr": 0.2})
    if k == 2:
        optimizer.param_groups[0]["lr"] *= 0.5
    optimizer.zero_grad(set_to_none=k % 2 == 0)
    loss = loss_fn(model(*args))
    loss.backward()
    optimizer.step()
    return loss.detach()


@DIFFERING.add("groups are added to the optimizer and its rates changed", step=_groups, update=False, python_state=True)
def optimizer_groups_changed() -> Case:
    model: Any = Stack()
    model.optimizer = torch.optim.Adam([*model.inp.parameters(), *model.blocks[:2].parameters()], lr=0.05)
    model.steps = 0
    return case(model, torch.randn(4, 8))


def _replace(model: Any, i: int) -> None:
    torch.manual_seed(100 + i)
    if i == 1:
        model.blocks[1] = Block(8, 16)
    elif i == 2:
        model.blocks[1] = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    elif i == 3:
        del model.blocks[0]
    else:
        model.inp.weight = nn.Parameter(model.inp.weight.detach() * 1.1)
        model.blocks.append(Block())


@DIFFERING.add(
    "modules are replaced by others, taken out and appended between steps",
    between=_replace,
    num_steps=6,
    python_state=True,
)
def modules_replaced() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _prune(model: Any, i: int) -> None:
    if i == 1:
        prune.l1_unstructured(model.blocks[0].up, "weight", amount=0.3)
    elif i == 2:
        prune.remove(model.blocks[0].up, "weight")
        nn.utils.parametrizations.weight_norm(model.blocks[1].down)
    else:
        model.blocks[2].up.register_forward_hook(lambda m, a, out: out * 2)


@DIFFERING.add(
    "weights are pruned, made plain again and normed; a hook arrives", between=_prune, num_steps=5, python_state=True
)
def weights_pruned() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _average(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    teacher = copy.deepcopy(model)
    loss = loss_fn(model(*args))
    with torch.no_grad():
        for p, q in zip(teacher.parameters(), model.parameters(), strict=True):
            p.mul_(0.9).add_(q, alpha=0.1)
        target = teacher(*args)
    other = loss_fn(teacher(*args) - model(*args).detach())
    other.backward()
    (loss + (model(*args) - target).square().mean()).backward()
    grad = next(teacher.parameters()).grad
    assert grad is not None
    return loss.detach() + grad.sum()


@DIFFERING.add("a deepcopy in every step, trained and used as a teacher", step=_average, same_inputs=True)
def teacher_copied_each_step() -> Case:
    return case(Stack(), torch.randn(4, 8))


def _reloaded(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    state = {n: t.clone() for n, t in model.state_dict().items()}
    loss_fn(model(*args)).backward()
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    model.load_state_dict(state, assign=model.steps % 2 == 1)
    for p in model.parameters():
        p.requires_grad_(True)
    model.steps += 1
    loss = loss_fn(model(*args))
    loss.backward()
    return loss.detach()


@DIFFERING.add(
    "state is loaded between two forwards, copied or assigned", step=_reloaded, python_state=True, update=False
)
def state_loaded_between() -> Case:
    model: Any = Stack(_Dropped)
    model.steps = 0
    return case(model, torch.randn(4, 8))


@DIFFERING.add(
    "the activation is an attribute that a schedule exchanges",
    between=lambda m, i: setattr(m, "act", (torch.sin, F.gelu, torch.tanh)[i % 3]),
    num_steps=5,
    python_state=True,
)
def activation_exchanged() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.act: Any = torch.tanh

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for block in self.blocks:
                x = x + block.down(self.act(block.up(x)))
            return x

    return case(Net(), torch.randn(4, 8))


@DIFFERING.add(
    "numbers from a closure, a global list and an environment that changes",
    between=lambda m, i: _STATE.__setitem__(0, 0.5 * i),
    num_steps=4,
    python_state=True,
)
def numbers_from_outside() -> Case:
    _STATE[0] = 0.3

    class Net(Stack):
        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for block in self.blocks:
                x = F.celu(block(x), 0.1 + _STATE[0]) + F.hardtanh(x, -_STATE[0] - 0.1, 1.0 + _STATE[0]) ** (
                    2 + int(_STATE[0])
                )
            return torch.add(x, x.sin(), alpha=_STATE[0] + 1) + torch.full_like(x, _STATE[0])

    return case(Net(), torch.randn(4, 8))


_STATE: list[float] = [0.3]


@DIFFERING.add(
    "gradient recording is switched for one argument and for buffers turned into leaves",
    inputs=lambda i, built: ((built.args[0].detach().clone().requires_grad_(i % 2 == 1),), {}),
    num_steps=5,
)
def argument_asks_now_and_then() -> Case:
    return case(Stack(), torch.randn(4, 8))


# ---------------------------------------------------------------------------------------------- time and threads


def _two_models(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    a, b = model.a(*args), model.b(*args)
    loss = loss_fn(a * b.detach()) + loss_fn(b * a.detach())
    results: list[BaseException] = []

    def walk(part: torch.Tensor) -> None:
        try:
            part.backward()
        except BaseException as error:
            results.append(error)

    threads = [threading.Thread(target=walk, args=(loss_fn(m(*args)),)) for m in (model.a, model.b)]
    loss.backward()
    for thread in threads:
        thread.start()
        thread.join()
    if results:
        raise results[0]
    return loss.detach()


@TIME.add("two halves of a model, walked in three threads", step=_two_models)
def halves_in_threads() -> Case:
    class Pair(Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Stack(_Dropped), Stack(_Dropped)

        def forward(self, x: torch.Tensor) -> Any:
            return self.a(x) + self.b(x)

    return case(Pair(), torch.randn(4, 8))


class _Out(RuntimeError):
    pass


def _raise_anywhere(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    for error in (KeyboardInterrupt, torch.OutOfMemoryError, _Out, StopIteration, GeneratorExit, SystemExit):
        for where in range(4):
            model.error, model.where = error, where
            state = torch.get_rng_state()
            with contextlib.suppress(BaseException):
                loss_fn(model(*args)).backward()
            torch.set_rng_state(state)
    model.error = None
    model.zero_grad(set_to_none=True)
    loss = loss_fn(model(*args))
    loss.backward()
    return loss


@TIME.add(
    "each kind of error is raised at each place of forward and backward, then a clean step follows",
    step=_raise_anywhere,
)
def errors_everywhere() -> Case:
    class Net(Stack):
        def __init__(self) -> None:
            super().__init__(_Dropped)
            self.error: Any = None
            self.where = 0

        def forward(self, x: torch.Tensor) -> Any:
            x = self.inp(x)
            for k, block in enumerate(self.blocks):
                x = block(x)
                if self.error is not None and self.where == k and k != 1:
                    raise self.error
                if self.error is not None and self.where in (1, 3):
                    error = self.error

                    def hook(g: torch.Tensor, error: Any = error) -> None:
                        raise error

                    if k == self.where - 1 or (self.where == 1 and k == 1):
                        x.register_hook(hook)
            return x

    return case(Net(), torch.randn(4, 8))


def _abandoned(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    alive = []
    for _ in range(5):
        out = model(*args)
        alive.append(weakref.ref(out))
        del out
    assert not any(ref() is not None for ref in alive)
    kept = [model(*args) for _ in range(3)]
    loss_fn(kept[1]).backward(retain_graph=True)
    loss = sum(loss_fn(out) for out in kept[1:])
    assert isinstance(loss, torch.Tensor)
    del kept
    loss.backward()
    return loss


@TIME.add("results are abandoned, the graph of the second of three is walked first and again", step=_abandoned)
def graphs_abandoned() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


def _pickled(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))
    other = pickle.loads(pickle.dumps(model))
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    third = torch.load(stream, weights_only=False)
    assert type(other) is type(third)
    (loss_fn(other(*args)) + loss_fn(third(*args))).backward()
    loss.backward()
    total = sum(p.grad.sum() for p in [*other.parameters(), *third.parameters()] if p.grad is not None)
    return loss.detach() + total


@TIME.add("the model is pickled and saved between forward and backward, and the copies are trained", step=_pickled)
def pickled_in_the_middle() -> Case:
    return case(Stack(Block), torch.randn(4, 8))


def _nested_steps(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    loss = loss_fn(model(*args))

    def hook(g: torch.Tensor) -> None:
        with torch.enable_grad():
            loss_fn(model(args[0] * 0.5)).backward()

    assert loss.grad_fn is not None
    handle = loss.register_hook(hook)
    loss.backward()
    handle.remove()
    return loss


@TIME.add("a whole training step runs inside a gradient hook of another", step=_nested_steps)
def step_inside_a_hook() -> Case:
    return case(Stack(_Dropped), torch.randn(4, 8))


def _accumulated(model: Any, args: Any, kwargs: Any, loss_fn: Loss) -> torch.Tensor:
    total = torch.zeros(())
    outs = [model(args[0] * (1 + k)) for k in range(3)]
    for k in (1, 0, 2):
        loss = loss_fn(outs[k])
        loss.backward()
        total = total + loss.detach()
        model.seen = model.seen + float(total)
    return total


@TIME.add(
    "three forwards first, their backwards in another order",
    step=_accumulated,
    observe=attributes("seen"),
    python_state=True,
)
def forwards_first() -> Case:
    model: Any = Stack(_Dropped)
    model.seen = 0.0
    return case(model, torch.randn(4, 8), loss=mean_square)
