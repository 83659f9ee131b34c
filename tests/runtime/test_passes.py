"""Gradients that PyTorch computes in another way where a dispatch mode is on are those of the plain step under a plan, bit for bit."""

from __future__ import annotations

import contextlib
import sys
import types
import unittest
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import keepwise
from keepwise.ir import Phase
from keepwise.runtime.passes import BY_MODE
from keepwise.session.status import Status
from keepwise.trace import record

SEEDS = range(8)
BATCHES = 5


class Nothing(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self, f: Callable[[Model, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(6, 4) * 0.3)
        self.v = nn.Parameter(torch.tensor(0.3))
        self.f = f
        self.now = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


def products(m: Model, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ m.p)
    return (h + 1)[:, :2].prod(1).square().mean() + h.sin().sum()


def products_later(m: Model, x: torch.Tensor) -> torch.Tensor:
    """Not in the step that is recorded."""
    h = torch.tanh(x @ m.p)
    loss = h.sin().square().sum()
    return loss + (h + 1)[:, :2].prod(1).square().mean() if m.now else loss


def filled(m: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ m.p).masked_fill(x[:, :4] > 0.2, m.v).sin().square().mean()


def cumulated(m: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ m.p).cumprod(1).sin().square().mean()


def largest(m: Model, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ m.p)
    return (h / h.abs().max()).sin().square().mean()


def penalized(m: Model, x: torch.Tensor) -> torch.Tensor:
    x = x.requires_grad_()
    h = torch.tanh(x @ m.p)
    (g,) = torch.autograd.grad((h + 1).prod(1).sum(), x, create_graph=True)
    return g.square().sum() + h.sin().sum()


def with_a_backward_inside(m: Model, x: torch.Tensor) -> torch.Tensor:
    h = torch.tanh(x @ m.p)
    (g,) = torch.autograd.grad((h + 1).prod(1).sum(), m.p, retain_graph=True)
    return (h.sin() @ g.T).tanh().square().mean() + (h * 2).sin().sum()


MODELS = (products, products_later, filled, cumulated, largest, penalized, with_a_backward_inside)


def trained(f: Any, seed: int, *, planned: bool, hooked: bool = False) -> tuple[list[torch.Tensor], Any]:
    """Gradients of some steps, all under `with plan:` if planned."""
    torch.manual_seed(seed)
    model, xs = Model(f), [torch.randn(12, 6) for _ in range(BATCHES)]
    current = [xs[0]]

    def step() -> torch.Tensor:
        loss = model(current[0])
        loss.backward(retain_graph=hooked)
        if hooked:
            loss.backward()
        return loss

    plan = None
    if planned:
        plan = keepwise.fit(model, step=step, planner="recompute_everything", budget="max")
    found: list[torch.Tensor] = []
    for i, x in enumerate(xs):
        model.zero_grad()
        current[0], model.now = x.clone(), i
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a step differs
            with plan or contextlib.nullcontext():
                step()
        found += [torch.zeros(()) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return found, plan


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("f", MODELS)
def test_gradients_are_those_of_a_step_without_a_mode(f: Any, twice: bool) -> None:
    dropped = 0
    for seed in SEEDS:
        plain, _ = trained(f, seed, planned=False, hooked=twice)
        found, plan = trained(f, seed, planned=True, hooked=twice)
        assert all(map(torch.equal, plain, found)), seed
        dropped += plan.dropped_bytes
    assert dropped > 0


def test_a_mode_alone_changes_such_gradients() -> None:
    """Else the test above shows nothing."""
    different = 0
    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = Model(products), torch.randn(12, 6)
        (plain,) = torch.autograd.grad(model(x), [model.p])
        loss = model(x)
        with Nothing():
            (under,) = torch.autograd.grad(loss, [model.p])
        different += not torch.equal(plain, under)
    assert different > 0


def test_what_a_gradient_hook_writes_is_not_taken_for_what_it_was() -> None:
    """Forward goes on with a tensor that a hook wrote while we did not look."""

    def f(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ m.p)
        side = h.detach() * 2
        h.register_hook(lambda g: side.mul_(0.5))
        torch.autograd.grad((h + 1).prod(1).sum(), m.p, retain_graph=True)
        return (side * m.v).sin().square().mean() + h.sin().sum()

    for seed in SEEDS:
        plain, _ = trained(f, seed, planned=False)
        found, _ = trained(f, seed, planned=True)
        assert all(map(torch.equal, plain, found)), seed


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
def test_a_recording_inside_of_such_a_step_sees_its_backward() -> None:
    torch.manual_seed(0)
    model, x = Model(products), torch.randn(12, 6)

    def step() -> None:
        model(x).backward()

    plan = keepwise.fit(model, step=step, planner="recompute_everything", budget="max")
    with plan:
        recorded = record(step, model=None, inputs=(x,), spill=False, device="cpu").step
    assert any(op.phase == Phase.BACKWARD for op in recorded.ops)


@pytest.mark.parametrize("name", ["svdvals", "eigvalsh", "eigvals"])
@pytest.mark.parametrize("as_step", [False, True])
def test_values_without_vectors_are_never_planned(name: str, as_step: bool) -> None:
    def f(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ m.p)
        with torch.no_grad():
            top = getattr(torch.linalg, name)(h.T @ h).abs()[0]
        return ((h / top).sin() * h).square().mean()

    for seed in SEEDS:
        torch.manual_seed(seed)
        model, x = Model(f), torch.randn(12, 6)
        how: dict[str, Any] = (
            {"step": lambda model=model, x=x: model(x).backward()} if as_step else {"args": x, "loss": lambda y: y}
        )
        plan = keepwise.fit(model, planner="recompute_everything", budget="max", **how)
        assert plan.status is Status.INERT
        assert "svdvals" in str(plan)
        plan.remove()


def test_a_factorization_whose_vectors_are_used_is_planned() -> None:
    def f(m: Model, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ m.p)
        with torch.no_grad():
            _, s, vh = torch.linalg.svd(h, full_matrices=False)
        return ((h @ vh / s[0]).sin() * h).square().mean()

    torch.manual_seed(0)
    plan = keepwise.fit(Model(f), torch.randn(12, 6), loss=lambda y: y, planner="recompute_everything", budget="max")
    assert plan.dropped_bytes > 0


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    if a.layout is not torch.strided or b.layout is not torch.strided:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_these_are_all_such_ops_in_the_operator_database(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in: Any = types.ModuleType("expecttest")  # what the database imports besides, and does not need
    stand_in.TestCase = unittest.TestCase
    monkeypatch.setitem(sys.modules, "expecttest", stand_in)
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

    different, num_samples = set(), 0
    for op in op_db:
        if not op.supports_autograd or torch.float32 not in op.dtypes:
            continue
        try:
            samples = [
                s for _, s in zip(range(6), op.sample_inputs("cpu", torch.float32, requires_grad=True), strict=False)
            ]
        except Exception:
            continue
        for sample in samples:
            leaves = [
                t
                for t in tree_leaves((sample.input, sample.args, sample.kwargs))
                if isinstance(t, torch.Tensor) and t.requires_grad and t.is_leaf
            ]

            def gradients(mode: Any, op: Any = op, sample: Any = sample, leaves: Any = leaves) -> list[Any] | None:
                torch.manual_seed(0)
                out = [
                    t
                    for t in tree_leaves(op(sample.input, *sample.args, **sample.kwargs))
                    if isinstance(t, torch.Tensor) and t.requires_grad and t.layout is torch.strided
                ]
                given = [torch.ones_like(t) * 0.3 for t in out]
                with mode:
                    return list(torch.autograd.grad(out, leaves, given, allow_unused=True)) if out else None

            try:
                plain, again = gradients(contextlib.nullcontext()), gradients(contextlib.nullcontext())
                if plain is None or again is None or not all(map(_same, plain, again)):
                    continue
                under = gradients(Nothing())
            except Exception:
                continue
            num_samples += 1
            if under is None or not all(map(_same, plain, under)):
                different.add(op.name)
    assert num_samples > 1000
    known = {str(op).split(".")[1].rstrip("_") for op in BY_MODE}
    assert different <= known, different - known
    assert different
