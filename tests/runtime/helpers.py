"""Plain and planned, side by side, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import keepwise

Outcome = dict[str, Any]
Loss = Callable[[Any], Tensor]


def mean_square(out: Tensor) -> Tensor:
    return out.square().mean()


def fit(model: nn.Module, *args: Any, loss: Loss = mean_square, **options: Any) -> keepwise.Plan:
    """The stress plan: whatever has a recipe is dropped. Without the proof, which would refuse what a planted fault breaks."""
    options = {"planner": "recompute_everything", "budget": "max", "verify": False, **options}
    plan = keepwise.fit(model, args, loss=loss, **options) if args else keepwise.fit(model, **options)
    assert plan.dropped_bytes or options["planner"] != "recompute_everything"
    return plan


def outcome(model: nn.Module, *more: Tensor) -> Outcome:
    """All that a step left behind, copied."""
    found: Outcome = {f"more {i}": t.detach().clone() for i, t in enumerate(more)}
    found |= {f"grad {n}": None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    found |= {f"tensor {n}": t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    found["generator"] = torch.get_rng_state()
    return found


def step(model: nn.Module, *args: Any, loss: Loss = mean_square) -> Outcome:
    """One whole step from cleared gradients."""
    model.zero_grad(set_to_none=True)
    value = loss(model(*args))
    value.backward()
    return outcome(model, value)


def differences(want: Outcome, got: Outcome) -> list[str]:
    """Names of what differs in any bit."""
    return [
        name
        for name in want.keys() | got.keys()
        if not same_bits(want.get(name), got.get(name)) or (name in want) != (name in got)
    ]


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype or a.stride() != b.stride():
        return False
    return torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))


def twice(plan: keepwise.Plan, run: Callable[[], Outcome], *, seed: int = 5) -> None:
    """`run` planned, then plain, from one generator state; it must put its model's own state where it wants it."""
    torch.manual_seed(seed)
    got = run()
    torch.manual_seed(seed)
    with plan.paused():
        want = run()
    found = differences(want, got)
    assert not found, f"differs: {found}"


@contextlib.contextmanager
def within(plan: keepwise.Plan | None) -> Any:
    if plan is None:
        yield
        return
    with plan:
        yield


class Chain(nn.Module):
    """Linear layers with an activation between that is made of several ops."""

    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def act(self, h: Tensor) -> Tensor:
        return torch.tanh(h * 1.5) * torch.sigmoid(h)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.act(layer(x))
        return x


def made(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def batch(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def graph_nodes(value: Tensor) -> Iterator[Any]:
    """The nodes of the graph behind a tensor, each once, in a fixed order."""
    seen: set[Any] = set()
    stack: list[Any] = [value.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        stack.extend(n for n, _ in node.next_functions)


class SeenFunctions(TorchFunctionMode):
    """Names of the functions that a mode of the user's sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))
