"""What a step changes in Python is put back: whatever user code can reach from the model."""

from __future__ import annotations

import argparse
import collections
import random
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import keepwise
from keepwise.trace.python_state import PythonState


class Counters:
    """An object of the user's own, with a dictionary of attributes."""

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


class Slotted:
    """One without."""

    __slots__ = ("count", "items")

    def __init__(self) -> None:
        self.count = 0
        self.items: list[int] = []


class Busy(nn.Module):
    """Changes everything that it can reach."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.count = 0
        self.list: list[Any] = [[1], {"x": [2]}]
        self.dict: dict[str, Any] = {"deep": {"deeper": [3]}}
        self.set = {1}
        self.queue = collections.deque([1], maxlen=3)
        self.bytes = bytearray(b"ab")
        self.array = np.zeros(3)
        self.own, self.slotted = Counters(), Slotted()
        self.pair = (Counters(), [0])
        self.python, self.numpy = random.Random(3), np.random.default_rng(4)
        self.plain = torch.zeros(4)
        self.seen = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.list[0].append(self.count)
        self.list[1]["x"].clear()
        self.dict["deep"]["deeper"].append(1)
        self.dict["new"] = self.count
        self.set.add(self.count + 1)
        self.queue.append(self.count)
        self.bytes.append(7)
        self.array[0] += 1
        for thing in (self.own, self.slotted, self.pair[0]):
            thing.count += 1
            thing.items.append(self.count)
        self.pair[1].append(1)
        self.python.random()
        self.numpy.random()
        self.plain.add_(1)
        self.late = self.count
        return torch.tanh(torch.tanh(self.a(x)) * 2)


def picture(m: Busy) -> dict[str, Any]:
    things = {k: v for k, v in vars(m).items() if not k.startswith("_")}
    objects = [m.own, m.slotted, m.pair[0]]
    return {
        "plain": repr(
            {k: v for k, v in things.items() if isinstance(v, (int, list, dict, set, collections.deque, bytearray))}
        ),
        "array": m.array.tolist(),
        "objects": [(o.count, list(o.items)) for o in objects],
        "tuple": list(m.pair[1]),
        "generators": (m.python.getstate(), repr(m.numpy.bit_generator.state)),
        "tensor": m.plain.tolist(),
        "names": sorted(things),
    }


def test_all_of_it_is_as_before() -> None:
    model, x = Busy(), torch.randn(4, 8)
    calls: list[int] = []
    total = 0

    def hook(*_: Any) -> None:
        nonlocal total
        total += 1
        calls.append(total)

    model.a.register_forward_hook(hook)
    ids = {name: id(value) for name, value in vars(model).items()}
    before = picture(model)
    plan = keepwise.fit(model, x, loss=lambda out: out.square().sum(), budget="max", planner="recompute_everything")
    assert picture(model) == before
    assert {name: id(value) for name, value in vars(model).items()} == ids
    assert (total, calls) == (0, [])
    assert [note for note in plan.notes if note.startswith("hooks of a ran in the recorded steps")]
    model(x).sum().backward()
    assert (total, model.count, model.own.count) == (1, 1, 1)
    assert plan.stats.num_dropped > 0


class Reading(nn.Module):
    """Moves an iterator on."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.noise: Iterator[float] = iter([0.5] * 100)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x)) * next(self.noise)


def test_iterators_are_named() -> None:
    plan = keepwise.fit(Reading(), torch.randn(4, 8), loss=lambda out: out.square().sum(), budget="max")
    assert any("noise" in note and "iterators cannot be put back" in note for note in plan.notes)


def test_other_peoples_objects_are_left_alone() -> None:
    """A queue that another thread fills meanwhile must not lose anything."""
    model = Busy()
    model.other = collections.Counter()  # a container: put back
    model.lazy = random.SystemRandom  # a class: nothing to put back
    progress = type("Progress", (), {"__module__": "tqdm.std"})()
    progress.n = 0
    model.progress = progress
    state = PythonState(model)
    progress.n = 5
    model.other["x"] += 1
    state.restore()
    assert progress.n == 5
    assert not model.other


def test_holders_of_attributes_are_put_back() -> None:
    model = nn.Linear(2, 2)
    model.seen = types.SimpleNamespace(num=0, losses=[])
    model.options = argparse.Namespace(warm=True)
    state = PythonState(model)
    model.seen.num += 1
    model.seen.losses.append(0.5)
    model.seen.late = 1
    model.options.warm = False
    state.restore()
    assert model.seen == types.SimpleNamespace(num=0, losses=[])
    assert model.options == argparse.Namespace(warm=True)


def test_shared_and_circular_things_are_visited_once() -> None:
    model = Busy()
    loop: list[Any] = [1]
    loop.append(loop)
    model.loop, model.again = loop, loop
    state = PythonState(model)
    loop.clear()
    state.restore()
    assert loop[0] == 1
    assert loop[1] is loop


def test_what_people_put_on_a_weight_is_put_back() -> None:
    class Summing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)
            self.weight: Any = self.linear.weight
            self.weight.main_grad, self.weight.uses = torch.zeros(8, 8), 0
            self.weight.register_hook(lambda grad: self.weight.main_grad.add_(grad))

        def forward(self, x: Tensor) -> Tensor:
            self.weight.uses += 1
            self.weight.last = x.detach()
            return torch.tanh(self.linear(x))

    model = Summing()
    keepwise.fit(model, torch.randn(4, 8), loss=lambda out: out.square().sum(), budget="max")
    assert model.weight.uses == 0
    assert not model.weight.main_grad.any()
    assert not hasattr(model.weight, "last")
