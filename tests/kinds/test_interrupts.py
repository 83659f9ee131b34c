"""An error or an interrupt by hand at any place of a step, ours included, and the next step is as if nothing had been.

An interrupt comes between any two lines; `sys.settrace` lets it come where we want. What Python itself cannot make one (the lines
that enter and leave a `with`) is left out.
"""

from __future__ import annotations

import contextlib
import linecache
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import keepwise

from .harness import seed_all
from .lifecycle import built, outcome, planned, same
from .program import mean_square

ROOT = str(Path(keepwise.__file__).parent)


class Pair:
    """A planned model beside a plain one, and what must be the same after any error."""

    def __init__(self, how: str) -> None:
        (self.plain, self.x), (self.model, _) = built(), built()
        self.plan = planned(self.model, self.x, how)
        for _ in range(2):
            same(outcome(self.plain, self.x), outcome(self.model, self.x))
        self.surroundings = surroundings()
        self.num_dropped = self.plan.stats.num_dropped

    def step(self) -> None:
        seed_all(2)
        self.model.zero_grad(set_to_none=True)
        mean_square(self.model(self.x)).backward()

    def recovers(self, where: Any) -> None:
        assert surroundings() == self.surroundings, where
        with torch.no_grad():  # statistics moved as far as forward came
            for mine, its in zip(self.model.buffers(), self.plain.buffers(), strict=True):
                mine.copy_(its)
        same(outcome(self.plain, self.x), outcome(self.model, self.x))
        assert self.plan.stats.num_dropped == self.num_dropped, where


def surroundings() -> dict[str, Any]:
    c: Any = torch._C
    return {
        "hooks": c._autograd._top_saved_tensors_default_hooks(False),
        "modes": c._len_torch_dispatch_stack(),
        "excluded": str(c._dispatch_tls_local_exclude_set()),
        "functions": c._is_torch_function_enabled(),
        "gradients": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
    }


@pytest.fixture(params=["everything", "min"])
def pair(request: Any) -> Iterator[Pair]:
    pair = Pair(request.param)
    yield pair
    pair.plan.remove()


# ---------------------------------------------------------------------------------------------- between our lines


class Interrupt:
    """Counts the lines of ours that run, and interrupts before one of them."""

    def __init__(self, at: int = 0) -> None:
        self.at, self.num_lines, self.where = at, 0, ""
        self.places: dict[tuple[str, int], list[int]] = {}

    def __enter__(self) -> Interrupt:
        self.before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: Any) -> None:
        sys.settrace(self.before)

    def _called(self, frame: Any, event: str, arg: Any) -> Any:
        code = frame.f_code
        ours = code.co_filename.startswith(ROOT) and code.co_name not in ("__enter__", "__exit__", "close")
        return self._line if ours else None

    def _line(self, frame: Any, event: str, arg: Any) -> Any:
        name, line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not linecache.getline(name, line).strip().startswith(("with ", "finally")):
            self.num_lines += 1
            if not self.at:
                self.places.setdefault((name, line), []).append(self.num_lines)
            elif self.num_lines == self.at:
                self.where = f"{name}:{line}"
                raise KeyboardInterrupt
        return self._line


@pytest.mark.parametrize("num_places", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_an_interrupt_by_hand_at_any_line_of_ours(pair: Pair, num_places: int) -> None:
    with Interrupt() as seen:
        pair.step()
    outcome(pair.plain, pair.x)
    rng = random.Random(num_places)
    moments = sorted(rng.choice(moments) for moments in seen.places.values())
    assert len(moments) > 200
    num_missed = 0
    picked = rng.sample(moments, min(num_places, len(moments)))
    for at in picked:
        with Interrupt(at) as interrupt, contextlib.suppress(KeyboardInterrupt):
            pair.step()
        num_missed += not interrupt.where  # some lines run the first time only
        pair.recovers(interrupt.where)
    assert num_missed < 0.1 * len(picked)


# ---------------------------------------------------------------------------------------------- in any operator


class Failing(TorchDispatchMode):
    """Lets one operator of a step fail, as an allocation may."""

    def __init__(self, error: BaseException | None, at: int) -> None:
        super().__init__()
        self.error, self.at, self.num_ops = error, at, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.num_ops == self.at and self.error is not None:
            raise self.error
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("make", [MemoryError, KeyboardInterrupt, lambda: torch.OutOfMemoryError("no memory")])
def test_an_error_in_any_operator_of_forward_and_backward(pair: Pair, make: Callable[[], BaseException]) -> None:
    with Failing(None, -1):  # steps under a mode are audited
        pair.step()
    meter = Failing(None, -1)
    with meter:
        pair.step()
    for _ in range(2):
        outcome(pair.plain, pair.x)
    assert meter.num_ops > 60
    for at in range(random.Random(meter.num_ops).randrange(7), meter.num_ops, 7):
        error = make()
        with Failing(error, at), pytest.raises(type(error)):
            pair.step()
        pair.recovers(at)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, MemoryError, RuntimeError])
def test_an_error_in_hooks_of_modules_and_gradients(pair: Pair, kind: type[BaseException]) -> None:
    def fail(*_: Any) -> None:
        raise kind("in a hook")

    model: Any = pair.model
    places: list[Callable[[], Any]] = [
        lambda: model.blocks[1].register_forward_pre_hook(fail),
        lambda: model.blocks[1].register_forward_hook(fail),
        lambda: model.blocks[1].register_full_backward_hook(fail),
        lambda: model.blocks[1].up.weight.register_hook(fail),
        lambda: model.blocks[1].up.weight.register_post_accumulate_grad_hook(fail),
    ]
    for place in places:
        handle = place()
        with pytest.raises(kind, match="in a hook"):
            pair.step()
        handle.remove()
        pair.recovers(place)
