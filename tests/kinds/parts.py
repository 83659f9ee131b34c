"""Small modules that many programs are built from."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn


class Module(nn.Module):
    """A module whose buffers and submodules a type checker takes as anything."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class Block(Module):
    """A residual block; what happens between its two products is what a program is about."""

    def __init__(self, dim: int = 8, wide: int = 12) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, wide), nn.Linear(wide, dim)

    def mix(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(h)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(self.mix(self.up(x)))


class Counted(Block):
    """A block that counts its calls."""

    def __init__(self, dim: int = 8, wide: int = 12) -> None:
        super().__init__(dim, wide)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class Stack(Module):
    """An input layer and blocks one after the other."""

    def __init__(self, make: Callable[[], nn.Module] = Block, num: int = 3, dim: int = 8) -> None:
        super().__init__()
        self.inp = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(make() for _ in range(num))

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return x


def calls(model: nn.Module) -> dict[str, Any]:
    """Observe: how often each counted block ran."""
    return {"calls": [m.calls for m in model.modules() if isinstance(m, Counted)]}


def attributes(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Observe: these attributes of the model itself."""

    def observe(model: nn.Module) -> dict[str, Any]:
        inner = getattr(model, "module", model)
        return {name: getattr(inner, name) for name in names}

    return observe


def block_attributes(*names: str) -> Callable[[nn.Module], dict[str, Any]]:
    """Observe: these attributes of each of the model's blocks."""

    def observe(model: Any) -> dict[str, Any]:
        return {name: [getattr(block, name) for block in model.blocks] for name in names}

    return observe


def in_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns or raises in a thread of its own."""
    out: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            out.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return out[0]
