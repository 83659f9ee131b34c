"""Situations that only go well because one mechanism of the runtime is there; each asserts that they do.

They are tests of their own (`test_scenarios`), and `test_planted_faults` takes the mechanism out and expects them to fail.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import keepwise
from keepwise.ir import Phase, Schedule, Step, Window
from keepwise.plan import get_planner

from .helpers import Chain, Outcome, SeenFunctions, batch, fit, graph_nodes, made, outcome, step, twice

# ---------------------------------------------------------------------- what the guard compares


class Factor(Chain):
    """The same ops with a number that changes."""

    factor = 1.5

    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(h * self.factor) * torch.sigmoid(h)


def changed_literal() -> None:
    model, x = made(Factor), batch(3, 4)
    plan = fit(model, x)
    for factor in (1.5, 0.25, 3.0):
        model.factor = factor
        twice(plan, lambda: step(model, x))
        assert plan.stats.num_dropped > 0


class Skipping(Chain):
    """Leaves out one of several equal layers."""

    skipped = 1

    def __init__(self) -> None:
        super().__init__(depth=4)

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skipped:
                x = x + self.act(layer(x))
        return x


def skipped_layer() -> None:
    """All saved tensors look alike whichever layer is left out."""
    model, x = made(Skipping), batch(3, 4)
    plan = fit(model, x)
    for i in (1, 2, 0, 3, 1):
        model.skipped = i
        twice(plan, lambda: step(model, x))


class Crossed(nn.Module):
    """The same ops in the same order, wired differently."""

    crossed = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.tanh(self.a(x)), torch.sin(self.b(x))
        h, c = (c, h) if self.crossed else (h, c)
        h = torch.exp(h * 0.5)
        return torch.tanh(h * 2.0) * c


def crossed_wires() -> None:
    model, x = made(Crossed), batch(3, 4)
    plan = fit(model, x)
    for crossed in (False, True, False):
        model.crossed = crossed
        twice(plan, lambda: step(model, x))


class Overwriting(nn.Module):
    """Writes in place through a view: of the recorded tensor, or of another one that replays make, too."""

    other = False

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h, c = torch.tanh(self.a(x)), torch.sin(self.b(x))
        h, c = h * 1.5, c * 2.5
        (h if self.other else c)[:, 0].add_(1.0)
        return torch.tanh(h) * torch.sigmoid(c)


def view_of_another_tensor_written() -> None:
    model, x = made(Overwriting), batch(3, 4)
    plan = fit(model, x)
    for other in (False, True, False):
        model.other = other
        twice(plan, lambda: step(model, x))


class Hidden(nn.Module):
    """Writes to what replays make through an alias that no op made."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * 1.5
        k, ones = h * 2, torch.ones(3, 4)
        (k.data if self.writes else ones).mul_(2.0)
        return torch.tanh(k) * torch.sigmoid(h)


def unknown_alias_written() -> None:
    model, x = made(Hidden), batch(3, 4)
    plan = fit(model, x)
    for writes in (False, True):
        model.writes = writes
        twice(plan, lambda: step(model, x))


class Extra(Chain):
    """An op more than recorded, which writes in place."""

    extra = False

    def act(self, h: Tensor) -> Tensor:
        k = h * 1.5
        if self.extra:
            k.clamp_(max=0.1)
        return torch.tanh(k) * torch.sigmoid(h)


def unknown_write_in_place() -> None:
    model, x = made(Extra), batch(3, 4)
    plan = fit(model, x)
    model.extra = True
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_unknown_ops > 0


class Remembering(nn.Module):
    """Reads its own intermediate result, or that of the call before."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.last: Tensor | None = None
        self.looks_back = self.keeps = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x)) * 1.5
        read = self.last if self.looks_back else h
        if self.keeps:
            self.last = h
        return torch.sin(torch.exp(read) * h)


def tensor_of_the_frame_before() -> None:
    """What it was called then must not be believed now, although the same op made it."""
    model, x = made(Remembering), batch(3, 4)
    plan = fit(model, x)

    def run(looks_back: bool) -> Outcome:
        model.zero_grad(set_to_none=True)
        with plan:
            model.looks_back, model.keeps = False, True
            value = model(x).square().mean()
            model.looks_back, model.keeps = looks_back, False
            value = value + model(x * 2).square().mean()
        value.backward()
        return outcome(model, value)

    for looks_back in (False, True):
        twice(plan, functools.partial(run, looks_back))


# ---------------------------------------------------------------------- what holds and what notices writes


def written_parameter() -> None:
    """As in plain autograd, with the parameter's name."""
    model, x = made(Chain), batch(3, 4)
    fit(model, x)
    value = model(x).square().mean()
    with torch.no_grad():
        model.layers[1].weight.mul_(2.0)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*layers\.1\.weight") as caught:
        value.backward()
    assert not isinstance(caught.value, keepwise.KeepwiseError)


class Exposing(nn.Module):
    """Hands out an intermediate result without holding it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.edit = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        y = torch.tanh(h * 2)
        if self.edit:
            with torch.no_grad():
                h.mul_(2.0)
        return y


def written_after_it_was_dropped() -> None:
    """Plain autograd raises; a replay alone would quietly give the value before the write."""
    model, x = made(Exposing), batch(3, 4)
    plan = fit(model, x)
    twice(plan, lambda: step(model, x))
    model.edit = True
    for context in (plan.paused(), contextlib.nullcontext()):
        with context, pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(model, x)


def no_leak_without_backward() -> None:
    """A held tensor with a history closes a cycle that no collector sees, whether it is kept or captured for a replay."""
    for options in ({"planner": "boundaries:layers.2"}, {"planner": "selective"}):
        model, x = made(lambda: Chain(depth=5)), batch(3, 4)
        plan = fit(model, x, **options)
        counts = []
        for _ in range(3):
            value = model(x)
            assert plan.stats.num_dropped > 0
            assert plan.stats.num_saved > plan.stats.num_dropped
            del value
            gc.collect()
            counts.append(num_tensors())
        assert counts[0] == counts[1] == counts[2], counts


class Moving(nn.Module):
    """Moves a buffer and reads it where autograd saves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.centre.mul_(0.9).add_(x.mean(0) * 0.1)
        return torch.tanh(torch.tanh(self.a(x) + self.centre) * 2)


def buffer_moves_before_backward() -> None:
    model, x = made(Moving), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        model.centre.zero_()
        value = model(x).square().mean() + model(x * 2).square().mean()
        value.backward()
        return outcome(model, value)

    twice(plan, run)


def buffer_written_between_forward_and_backward() -> None:
    """Legal in plain PyTorch where autograd did not save it, and nobody watches then."""
    model, x = made(Moving), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        model.centre.zero_()
        value = model(x).square().mean()
        model.centre.mul_(2.0)
        value.backward()
        return outcome(model, value)

    twice(plan, run)
    assert plan.stats.num_replays


class Read(nn.Module):
    """Reads a small buffer twice; what is between may write it."""

    between: Literal["nothing", "an op", "no op"] = "nothing"

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("centre", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.tanh(self.a(x) + self.centre) * 2)
        if self.between == "an op":
            self.centre.data.mul_(3.0)
        elif self.between == "no op":
            self.centre.numpy()[:] *= 3.0
        return torch.tanh(torch.tanh(h + self.centre) * 2)


def _written_between_readers(how: Literal["an op", "no op"], *, recorded: bool) -> None:
    model, x = made(Read), batch(3, 4)
    model.between = how if recorded else "nothing"
    plan = fit(model, x)
    model.between = how

    def run() -> Outcome:
        model.centre.fill_(1.0)
        return step(model, x)

    twice(plan, run)
    assert plan.stats.num_replays


def leaf_written_between_its_readers() -> None:
    """By an op that the recording does not have, and that moves no version of the leaf's."""
    _written_between_readers("an op", recorded=False)


def leaf_written_by_no_op_between_its_readers() -> None:
    _written_between_readers("no op", recorded=True)
    _written_between_readers("no op", recorded=False)


class Staged(nn.Module):
    """Reads a large scratch tensor that is no buffer, and refills it later in the same forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.scratch = torch.zeros(200, 200, 4)
        self.again = False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x) + self.scratch[0, 0])
        y = torch.tanh(h * 2)
        if self.again:
            self.scratch.add_(1.0)
        return y


def captured_tensor_written_while_watched() -> None:
    model, x = made(Staged), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        model.scratch = torch.zeros(200, 200, 4)
        model.again = True
        return step(model, x)

    twice(plan, run)


def captured_tensor_written_in_another_pass() -> None:
    """The second forward overwrites what the first one's replay still reads."""
    model, x = made(Staged), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        model.scratch = torch.zeros(200, 200, 4)
        model.again = False
        first = model(x).square().mean()
        model.again = True
        value = first + model(x * 2).square().mean()
        value.backward()
        return outcome(model, value)

    twice(plan, run)


class Eager(nn.Sequential):
    """A block that begins by writing its input."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(4, 4), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4)
        )


class CopyingPlanner:
    """Replays the block from a copy of its input, as it was before the block wrote it."""

    def plan(self, step: Step, budget_bytes: int | None) -> Schedule:
        ops = [op for op in step.ops if op.phase == Phase.FORWARD and op.path.startswith("1")]
        write = next(op for op in ops if op.writes)
        made = {write.writes[0], *(step.values[op.outputs[0]].storage for op in ops if "tanh" in op.target)}
        reads = [r.first for save in step.saves if step.values[save.value].storage in made for r in save.reads]
        window = Window(
            id=0,
            start=min(reads),
            stop=max(reads),
            ops=tuple(op.index for op in ops if not op.is_view),
            retain=tuple(made),
            copies=(write.inputs[0],),
        )
        held = get_planner("none").plan(step, None).held
        return Schedule(held=tuple(s for s in held if s not in made), windows=(window,), planner="copying")


def input_of_a_block_is_written() -> None:
    model, x = made(Eager), batch(3, 4)
    plan = fit(model, x, planner=CopyingPlanner())
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_replays


def replay_twice_of_a_write() -> None:
    """A replay that writes what was captured by copy must not spoil it for the next one."""
    torch.manual_seed(0)
    model, x = Eager(), batch(3, 4)
    model[1][0] = nn.ELU(inplace=True)  # not the same when done twice
    plan = fit(model, x, planner=CopyingPlanner())

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        value = model(x).square().mean()
        value.backward(retain_graph=True)
        value.backward()
        return outcome(model, value)

    twice(plan, run)
    assert plan.stats.num_replays > 1


# ---------------------------------------------------------------------- lifetimes


def results_die_with_their_node() -> None:
    """When the second layer's gradient is made, what was replayed for those after it is gone."""
    model, x = made(lambda: Chain(64, depth=8)), batch(256, 64)
    plan = fit(model, x, planner="boundaries:layers.7")
    value = model(x).square().mean()
    before, seen = live_bytes(), []
    model.layers[1].weight.register_hook(lambda g: seen.append(live_bytes()))
    value.backward()
    assert plan.stats.num_replays
    grads = sum(p.nbytes for p in model.parameters())
    assert seen[0] - before <= grads + 6 * x.nbytes, (seen[0] - before - grads) / x.nbytes


def num_tensors() -> int:
    """Tensors that Python knows of."""
    return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())


def live_bytes() -> int:
    """Bytes of the storages of tensors that Python knows of."""
    gc.collect()
    storages = {
        t.untyped_storage()._cdata: t.untyped_storage().nbytes()
        for t in gc.get_objects()
        if type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided and not t.is_nested
    }
    return sum(storages.values())


def cells_are_emptied_under_retain_graph() -> None:
    """A retained graph holds what it held before its first backward: no results of replays."""
    model, x = made(Chain), batch(64, 4)
    fit(model, x)
    value = model(x).square().mean()
    before = live_bytes()
    value.backward(retain_graph=True)
    grads = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert live_bytes() <= before + grads


class Branching(Chain):
    """Two outputs that share most of the graph."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.exp(super().forward(x) * 0.1)
        return torch.tanh(h * 2) * h, torch.sin(h * 3) * h


def branching_loss(out: tuple[Tensor, Tensor]) -> Tensor:
    return out[0].square().mean() + out[1].square().mean()


def cells_without_a_reader_in_this_pass() -> None:
    """A pass over one of two outputs replays what only the other one reads, and lets go of it when it ends."""
    model, x = made(Branching), batch(64, 4)
    plan = fit(model, x, loss=branching_loss)
    outputs = model(x)
    before = live_bytes()
    torch.autograd.grad(outputs[0].square().mean(), list(model.parameters()), retain_graph=True)
    assert plan.stats.num_replays
    assert live_bytes() <= before

    def run() -> Outcome:
        first, second = model(x)
        one = torch.autograd.grad(first.square().mean(), list(model.parameters()), retain_graph=True)
        two = torch.autograd.grad(second.square().mean(), list(model.parameters()))
        return outcome(model, *one, *two)

    twice(plan, run)


def _fail(saved: object) -> Tensor:
    raise ZeroDivisionError


def failed_replay_leaves_nothing() -> None:
    """A replay that ends in an error gives up what it had made so far."""
    model, x = made(Chain), batch(64, 4)
    plan = fit(model, x, planner="boundaries:layers.2")
    value = model(x).square().mean()
    with torch.no_grad():
        model.layers[1].weight.mul_(1.0)
    before = live_bytes()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()
    model.zero_grad(set_to_none=True)
    assert plan.stats.num_replays == 0
    assert live_bytes() <= before


def unpacked_outside_of_backward() -> None:
    """Somebody reads the graph: the value is right, and nothing of it stays."""
    model, x = made(Chain), batch(64, 4)
    plan = fit(model, x)
    value = model(x)
    with plan.paused():
        want = model(x)
    before = live_bytes()
    for got, expected in zip(_saved(value), _saved(want), strict=True):
        assert torch.equal(got, expected)
    del got, expected
    assert live_bytes() <= before


def graph_read_with_gradients_on() -> None:
    """A replay for somebody who looks into the graph is not written into another one."""
    model, x = made(Ambient), batch(2, 16, 20, 20)
    fit(model, x)
    value = model(x)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, _fail):
        assert all(not t.requires_grad or t.grad_fn is not None for t in _saved(value))
    assert not packed


def graph_read_under_a_function_mode() -> None:
    """A replay for somebody who looks into the graph is not seen by the mode that is on then."""
    model, x = made(Chain), batch(64, 4)
    plan = fit(model, x)
    names = []
    for paused in (False, True):
        with plan.paused() if paused else contextlib.nullcontext():
            value = model(x)
        with SeenFunctions() as seen:
            for t in _saved(value):
                assert t is not None
        names.append(seen.names)
    assert names[0] == names[1]


def _saved(value: Tensor) -> Iterator[Tensor]:
    """The saved results of every tanh in the graph."""
    return (node._saved_result for node in graph_nodes(value) if node.name() == "TanhBackward0")


# ---------------------------------------------------------------------- where replays run


def under_autocast() -> None:
    """Recorded ops lie below autocast: replayed under it, they would be cast."""
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        value = model(x).square().mean()
        with torch.autocast("cpu", torch.bfloat16):
            value.backward()
        return outcome(model, value)

    twice(plan, run)
    assert plan.stats.num_replays


def with_gradients_on() -> None:
    """A backward that builds a graph of its own must not write the replay into it."""
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)

    def run() -> Outcome:
        value = model(x).square().mean()
        grads = torch.autograd.grad(value, list(model.parameters()), create_graph=True)
        penalty = torch.stack([g.square().sum() for g in grads]).sum()
        more = torch.autograd.grad(penalty, list(model.parameters()))
        return outcome(model, value, *grads, *more)

    twice(plan, run)


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        return func(*args, **(kwargs or {}))


class _Squaring(torch.autograd.Function):
    """Saves a tensor where modes for functions are on, as they are not inside of a function of PyTorch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        y = torch.sin(x)
        ctx.save_for_backward(y)
        return y * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (y,) = ctx.saved_tensors
        return grad * y * 2


class Everything(nn.Module):
    """Ops of every effect: in place, views, random numbers, buffers, copies, a function of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("count", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu_(self.norm(self.conv(x)))
        self.count.add_(1.0)
        h = self.drop(_Squaring.apply(h)).transpose(1, 2) + self.count
        h[:, 0].mul_(2.0)
        return torch.tanh(nn.functional.rrelu(self.out(h), training=True))


def modes_see_what_they_see_plainly() -> None:
    """Neither captures nor replays reach the user's modes."""
    model, x = made(Everything), batch(2, 2, 6)
    plan = fit(model, x)
    seen: dict[bool, tuple[list[str], list[str], list[str]]] = {}
    for paused in (False, True):
        with plan.paused() if paused else contextlib.nullcontext():
            for _ in range(2):  # what comes first may differ from what comes later
                functions, forward, backward = SeenFunctions(), _Seen(), _Seen()
                with functions, forward:
                    value = model(x).square().mean()
                with functions, backward:
                    value.backward()
                seen[paused] = functions.names, forward.ops, backward.ops
                model.zero_grad(set_to_none=True)
    assert plan.stats.num_dropped
    for planned, plain in zip(seen[False], seen[True], strict=True):
        # Autograd detaches what it saves and what comes back, with hooks at other moments than without.
        assert [n for n in planned if "detach" not in n] == [n for n in plain if "detach" not in n]


# ---------------------------------------------------------------------- random numbers


class Drawing(Chain):
    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(nn.functional.dropout(h * 1.5, 0.5)) * torch.sigmoid(h)


def dropout() -> None:
    model, x = made(Drawing), batch(3, 4)
    plan = fit(model, x)
    for seed in (1, 2):
        twice(plan, lambda: step(model, x), seed=seed)


class Fused(Chain):
    """An op that draws from the default generator and takes none as an argument."""

    def act(self, h: Tensor) -> Tensor:
        kept, _ = torch.native_dropout(h * 1.5, 0.5, True)
        return torch.tanh(kept) * torch.sigmoid(h)


def draws_without_generator_argument() -> None:
    model, x = made(Fused), batch(3, 4)
    plan = fit(model, x)
    for seed in (1, 2):
        twice(plan, lambda: step(model, x), seed=seed)


class Noisy(Chain):
    """RReLU saves its noise before it is drawn."""

    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(nn.functional.rrelu(h * 1.5, training=True)) * torch.sigmoid(h)


def saved_before_it_is_written() -> None:
    model, x = made(Noisy), batch(3, 4)
    plan = fit(model, x)
    plan.audit()
    for seed in (1, 2):
        twice(plan, lambda: step(model, x), seed=seed)
        twice(plan, lambda: step(model, x), seed=seed)


class Ambient(nn.Module):
    """A convolution whose last bits depend on a setting of the process."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))


def forward_under_other_settings() -> None:
    model, x = made(Ambient), batch(2, 16, 20, 20)
    plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        torch._C._set_mkldnn_enabled(False)
        try:
            value = model(x).square().mean()
        finally:
            torch._C._set_mkldnn_enabled(True)
        value.backward()
        return outcome(model, value)

    twice(plan, run)


class Constants(nn.Module):
    """Makes constants without saying of which type."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        third = torch.zeros(3, 4) + 1 / 3
        return torch.tanh(self.a(x)) * torch.tanh(third)


def forward_with_another_default_dtype() -> None:
    with default_dtype(torch.float64):
        model, x = made(Constants), batch(3, 4).double()
        plan = fit(model, x)

    def run() -> Outcome:
        model.zero_grad(set_to_none=True)
        with default_dtype(torch.float64):
            value = model(x).square().mean()
        value.backward()
        return outcome(model, value)

    twice(plan, run)


class Mixed(nn.Module):
    """A part of forward runs under another setting than the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        with default_dtype(torch.float64):
            third = torch.zeros(3, 4) + 1 / 3
        return torch.tanh(h.double() * torch.tanh(third))


def part_of_forward_under_another_setting() -> None:
    model, x = made(Mixed), batch(3, 4)
    plan = fit(model, x, planner="sqrt")
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_replays


def settings_are_put_back_whole() -> None:
    """Kernels that are not deterministic shall give a warning, not an error, after a replay as before it."""
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    value = model(x).square().mean()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        value.backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)
    assert plan.stats.num_replays


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Transforming(nn.Module):
    """`torch.func` inside of a model, where it allows no hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.sin(self.a(x)))
        h = h * torch.func.grad(lambda y: y.sin().sum())(h)
        return torch.tanh(torch.sin(self.b(h)))


def transforms_inside() -> None:
    model, x = made(Transforming), batch(3, 4)
    plan = fit(model, x)
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped


class Doubling(TorchDispatchMode):
    """Changes what an op returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 1.25 if func is torch.ops.aten.tanh.default else result


def mode_that_changes_results() -> None:
    """A replay runs without the mode: never silently other gradients."""
    model, x = made(Chain), batch(3, 4)
    fit(model, x)
    with Doubling():
        value = model(x).square().mean()
    with pytest.raises(keepwise.MismatchError, match="Doubling"):
        value.backward()


class Evading(Chain):
    """In some steps the mode finds nothing to change."""

    evades = False

    def act(self, h: Tensor) -> Tensor:
        return (torch.cos if self.evades else torch.tanh)(h * 1.5) * torch.sigmoid(h)


def mode_that_changes_results_later() -> None:
    """That a step went well under a mode says nothing about the next one, which drops something else."""
    model, x = made(Evading), batch(3, 4)
    plan = fit(model, x)
    for evades in (True, False):
        model.evades = evades
        with Doubling():
            value = model(x).square().mean()
        with contextlib.nullcontext() if evades else pytest.raises(keepwise.MismatchError, match="Doubling"):
            value.backward()
        assert plan.stats.num_dropped


SCENARIOS = [
    value
    for value in list(globals().values())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and not isinstance(value, type)
    and value.__name__ not in ("num_tensors", "live_bytes", "default_dtype", "branching_loss")
    and not value.__name__.startswith("_")
]
