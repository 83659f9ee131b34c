"""After `trace_steps` everything is as before: objects by identity, contents bit for bit."""

from __future__ import annotations

import collections
import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keepwise.runtime.digest import strong_digest
from keepwise.trace import trace_steps
from tests.trace.models import build, plain_step


class Busy(nn.Module):
    """Changes everything that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.calls = 0
        self.history: list[Any] = ["made"]
        self.queue: collections.deque[Any] = collections.deque([1, 2], maxlen=3)
        self.table: dict[str, Any] = {"a": 1}
        self.names = {"x"}
        self.last: Tensor | None = None
        self.own = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), np.random.default_rng(1)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x)
        self.queue.append(x)
        self.table["b"] = self.calls
        self.names.add(str(self.calls))
        y = self.norm(self.lin(x)) * random.random() * np.random.rand() * self.python.random() * self.numpy.random()
        y = y * torch.rand(8, generator=self.own) * torch.rand(8)
        self.last = y
        self.extra = y
        with torch.no_grad():
            self.lin.weight.mul_(0.5)
            x.add_(1.0)
        self.norm.requires_grad_(not self.norm.weight.requires_grad)
        if self.fails:
            raise RuntimeError("as asked")
        return y


def _state(model: Busy, x: Tensor) -> dict[str, Any]:
    return {
        "tensors": {n: t.detach().clone() for n, t in model.state_dict().items()},
        "objects": {n: id(t) for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "grads": {n: (id(p.grad), None if p.grad is None else p.grad.clone()) for n, p in model.named_parameters()},
        "flags": {n: p.requires_grad for n, p in model.named_parameters()},
        "versions": {n: t._version for n, t in [*model.named_parameters(), *model.named_buffers()]},
        "x": (x.clone(), x._version),
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": [np.array(part) for part in np.random.get_state()[1:]],
        "own": (model.own.get_state(), model.python.getstate(), copy.deepcopy(model.numpy.bit_generator.state)),
        "attributes": (model.calls, list(model.history), list(model.queue), dict(model.table), set(model.names)),
        "last": model.last,
        "names": sorted(model.__dict__),
    }


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("had_gradients", [False, True])
def test_everything_is_put_back(fails: bool, had_gradients: bool) -> None:
    torch.manual_seed(0)
    model, x = Busy(), torch.randn(4, 8)
    if had_gradients:
        for p in model.parameters():
            p.grad = torch.randn_like(p)
    model.fails = fails
    before = _state(model, x)
    if fails:
        with pytest.raises(RuntimeError, match="as asked"):
            trace_steps(plain_step(model, x), model=model, inputs=x)
    else:
        trace_steps(plain_step(model, x), model=model, inputs=x)
    after = _state(model, x)
    assert {key for key in before if not _same(before[key], after[key])} == set()


def test_the_first_step_is_the_plain_one() -> None:
    model, x = build("noisy")
    torch.manual_seed(7)
    loss = plain_step(model, x)()
    plain = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    torch.manual_seed(7)
    traced = trace_steps(plain_step(model, x), model=model, inputs=x)
    assert torch.equal(traced.first.result, loss)
    assert plain.keys() == traced.gradients.keys()
    assert all(strong_digest(g) == traced.gradients[n] for n, g in plain.items())


def test_an_optimizer_is_put_back_objects_and_bytes() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    plain = plain_step(model, x)

    def run() -> None:
        plain()
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5

    run()
    model.zero_grad()
    state = {id(p): {k: (id(v), v.clone()) for k, v in s.items()} for p, s in optimizer.state.items()}
    parameters = [p.detach().clone() for p in model.parameters()]
    trace_steps(run, model=model, inputs=x, optimizer=optimizer)
    assert all(torch.equal(a, b) for a, b in zip(parameters, model.parameters(), strict=True))
    now = {id(p): {k: (id(v), v) for k, v in s.items()} for p, s in optimizer.state.items()}
    assert _same(state, now)
    assert optimizer.param_groups[0]["lr"] == 0.05


def test_arguments_keep_their_gradients() -> None:
    model, _ = build("mlp")
    x = torch.randn(4, 32, requires_grad=True)
    x.grad = grad = torch.ones(4, 32)
    trace_steps(plain_step(model, x), model=model, inputs=x)
    assert x.grad is grad
    assert torch.equal(grad, torch.ones(4, 32))
