"""Devices: tensors that move inside forward. What needs an accelerator runs where there is one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from .parts import Block, Stack
from .program import Case, Collection, case

PROGRAMS = Collection("devices")


@PROGRAMS.add("`.to(device)` that may or may not copy", ops=("_to_copy",))
def moved_inside_forward() -> Case:
    class Moving(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.linspace(0, 1, 12, dtype=torch.float64))

        def mix(self, h: torch.Tensor) -> torch.Tensor:
            same = h.to("cpu")
            copied = h.to(torch.device("cpu"), copy=True)
            return torch.tanh(same) * self.table.to(h.device, h.dtype) + copied.sin().cpu()

    return case(Stack(Moving), torch.randn(4, 8))


@PROGRAMS.add("shapes are worked out on the meta device inside forward", ops=("aten.tanh",))
def meta_tensors_inside() -> Case:
    class Shaping(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            shape = (torch.empty(h.shape, device="meta") @ torch.empty(12, 5, device="meta")).shape
            return torch.tanh(h) * h.new_full(shape, 0.5).sum() / shape.numel()

    return case(Stack(Shaping), torch.randn(4, 8))


@PROGRAMS.add("weights arrive from a store at each call and leave again (layer streaming)", ops=("aten.clone",))
def weights_streamed() -> Case:
    class Streamed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.store = nn.Parameter(torch.randn(8, 8) / 3)
            self.bias = nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w = self.store.clone().to(x.device, non_blocking=True)
            return x + torch.tanh(F.linear(x, w, self.bias))

    return case(Stack(Streamed), torch.randn(4, 8))


@PROGRAMS.add("constants are made from lists and arrays in each forward", ops=("lift_fresh",))
def constants_made_inside() -> Case:
    class Constants(Block):
        def mix(self, h: torch.Tensor) -> torch.Tensor:
            import numpy as np

            scale = torch.tensor([0.1 * k for k in range(12)])
            shift = torch.as_tensor(np.arange(12, dtype=np.float32) / 7)
            index = torch.tensor([3, 1, 2]).to(h.device)
            return torch.sin(h * scale + shift) + h[:, index].sum(1, keepdim=True).tanh()

    return case(Stack(Constants), torch.randn(4, 8))


if torch.cuda.is_available():

    @PROGRAMS.add("the model lives on the accelerator and draws there", ops=("native_dropout",))
    def on_the_accelerator() -> Case:
        class Dropping(Block):
            def mix(self, h: torch.Tensor) -> torch.Tensor:
                return F.dropout(F.gelu(h), 0.3, training=True) * h.sin()

        return case(Stack(Dropping).cuda(), torch.randn(4, 8, device="cuda"))

    @PROGRAMS.add("a part of forward runs on the host", ops=("_to_copy",))
    def host_part_inside() -> Case:
        class Host(Block):
            def mix(self, h: torch.Tensor) -> torch.Tensor:
                on_host = torch.tanh(h.cpu()) * torch.rand(h.shape)
                return on_host.to(h.device, non_blocking=True) * h.sin()

        return case(Stack(Host).cuda(), torch.randn(4, 8, device="cuda"))

    @PROGRAMS.add("attention of the accelerator with dropout", ops=("attention",))
    def accelerator_attention() -> Case:
        class Attention(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
                y: Any = F.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
                return x + self.out(y.transpose(1, 2).flatten(2))

        return case(Stack(Attention, 2, dim=32).cuda().half(), torch.randn(2, 8, 32, device="cuda").half())
