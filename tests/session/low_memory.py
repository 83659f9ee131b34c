"""Run in a process of its own: a training step under a hard limit on its address space. Prints one JSON object."""

from __future__ import annotations

import gc
import json
import resource
import sys

import psutil
import torch
from torch import nn

import keepwise
from keepwise.runtime.digest import strong_digest


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(torch.tanh(self.mix(self.norm(x))))


def make() -> tuple[nn.Sequential, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(32) for _ in range(12))), torch.randn(65536, 32)


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def train(model: nn.Module, x: torch.Tensor, steps: int = 2) -> list[int]:
    """Digests of the loss and of every parameter after each step."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: list[int] = []
    for _ in range(steps):
        loss = loss_of(model(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [strong_digest(loss), *(strong_digest(p) for p in model.parameters())]
    return found


def main(limit_mib: int) -> None:
    torch.set_num_threads(1)
    small = nn.Sequential(Block(32))
    keepwise.fit(small, torch.randn(8, 32), loss=loss_of, budget="min")  # what is imported and started once
    answer: dict[str, object] = {}
    model, x = make()
    answer["plain"] = train(model, x)  # without a limit
    del model, x
    gc.collect()

    model, x = make()
    limit = psutil.Process().memory_info().vms + limit_mib * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        train(model, x)
    except (MemoryError, RuntimeError) as error:
        answer["plain_error"] = str(error).splitlines()[0]
    model, x = make()
    gc.collect()
    plan = keepwise.fit(model, x, loss=loss_of, budget=f"{limit_mib * 2 // 3}MiB")
    proof = plan.proof
    answer |= {
        "plain_bytes": plan.plain_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "proved": proof is not None and proof.recomputed_identical,
        "num_proved": 0 if proof is None else proof.num_replays_compared,
        "planned": train(model, x),
        "dropped": plan.stats.num_dropped,
    }
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]))
