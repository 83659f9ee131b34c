"""Modules and leaves beside the model, found from the function that makes the steps, and put back after `fit`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import keepwise
from keepwise.trace.reach import reached

GLOBAL_HEAD = nn.Linear(4, 2)
GLOBAL_LEAF = torch.ones((), requires_grad=True)


class Trainer:
    """Holds a critic as trainers do: in a dict, in an attribute."""

    def __init__(self, model: nn.Module, critic: nn.Module) -> None:
        self.model, self.parts = model, {"critic": [critic]}

    def step(self, x: Tensor, *, head: nn.Module | None = None) -> Tensor:
        out = self.parts["critic"][0](self.model(x))
        return out if head is None else head(out)


def _by_globals(model: nn.Module, x: Tensor) -> Tensor:
    def inner() -> Tensor:
        return GLOBAL_HEAD(model(x)) * GLOBAL_LEAF

    return inner()


def test_what_a_function_reaches() -> None:
    model, head = nn.Linear(3, 4), nn.Linear(4, 1)
    critic: Any = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    leaf = torch.zeros(2, requires_grad=True)
    trainer = Trainer(model, critic)
    roots: list[tuple[Any, list[nn.Module], list[Tensor]]] = [
        (functools.partial(trainer.step, torch.ones(1), head=head), [critic, head], []),
        (lambda: critic(model(torch.ones(3))) + leaf.sum(), [critic], [leaf]),
        (lambda: critic[0](leaf * critic[0].weight), [critic], [leaf]),
        (functools.partial(_by_globals, model), [GLOBAL_HEAD], [GLOBAL_LEAF]),
        ((None, None), [], []),
    ]
    for root, modules, leaves in roots:
        found = reached(root, model)
        assert {id(m) for m in found[0]} == {id(m) for m in modules}
        assert {id(t) for t in found[1]} == {id(t) for t in leaves}
        assert not found.training


class Head(nn.Module):
    """A loss with weights, statistics and a counter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.norm, self.calls = nn.Linear(8, 2), nn.BatchNorm1d(8), 0

    def forward(self, h: Tensor) -> Tensor:
        self.calls += 1
        return self.out(self.norm(h)).square().mean() * self.calls


def _as_loss(model: nn.Module, head: Head, scale: Tensor, x: Tensor) -> dict[str, Any]:
    return {"args": (x,), "loss": lambda out: head(out) * scale}


def _as_step(model: nn.Module, head: Head, scale: Tensor, x: Tensor) -> dict[str, Any]:
    return {"step": lambda: (head(model(x)) * scale).backward()}


@pytest.mark.parametrize("form", [_as_loss, _as_step])
@pytest.mark.parametrize("has_gradients", [False, True])
def test_fit_and_verify_leave_a_head_in_the_loss_as_it_was(
    form: Callable[..., dict[str, Any]], has_gradients: bool
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    head, scale, x = Head(), torch.ones((), requires_grad=True), torch.randn(6, 8)
    if has_gradients:
        (head(model(x)) * scale).backward()
    state, calls = copy.deepcopy(head.state_dict()), head.calls
    before = [None if t.grad is None else (t.grad, t.grad.clone()) for t in (*head.parameters(), scale)]
    given = form(model, head, scale, x)
    plan = keepwise.fit(model, **given, planner="recompute_everything", budget="max")
    keepwise.verify(model, **given, plan=plan)
    assert head.calls == calls
    assert all(torch.equal(v, state[k]) for k, v in head.state_dict().items())
    for t, was in zip((*head.parameters(), scale), before, strict=True):
        if was is None:
            assert t.grad is None
        else:
            assert t.grad is was[0]
            assert torch.equal(was[0], was[1])
