"""The roofline against counts by hand, and on a recorded step against torch's own sizes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from keepwise.cost import DEVICES, DeviceProfile, on_device, op_bytes, op_seconds
from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import plan_optimal
from keepwise.simulate import simulate
from keepwise.trace import trace_steps

DEVICE = DeviceProfile(
    name="round numbers",
    memory_bytes=1 << 30,
    half_flops=4e12,
    single_flops=1e12,
    memory_bandwidth=1e9,
    link_bandwidth=1e9,
    host_bandwidth=1e9,
    launch_seconds=1e-6,
    matrix_share=0.5,
    stream_share=0.8,
)


def recorded(dtype: torch.dtype = torch.float32, *, depth: int = 1, rows: int = 32) -> Step:
    torch.manual_seed(0)
    block = [nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 64)]
    model = nn.Sequential(*block * depth).to(dtype)
    x = torch.randn(rows, 64, dtype=dtype)
    return trace_steps(lambda: model(x).sum().backward(), model=model, inputs=x).recording.step


def the(step: Step, target: str) -> int:
    return next(op.index for op in step.ops if op.target == target)


@pytest.mark.parametrize(
    ("dtype", "size", "rate"), [(torch.float32, 4, 1e12), (torch.bfloat16, 2, 4e12), (torch.float64, 8, 0.5e12)]
)
def test_the_slower_of_arithmetic_and_traffic(dtype: torch.dtype, size: int, rate: float) -> None:
    step = recorded(dtype)
    tanh = step.ops[the(step, "aten.tanh.default")]
    assert op_bytes(step, tanh) == 2 * 32 * 256 * size
    assert op_seconds(step, tanh, DEVICE) == pytest.approx(1e-6 + 2 * 32 * 256 * size / 0.8e9)
    product = step.ops[the(step, "aten.addmm.default")]
    flops = 2 * 32 * 64 * 256
    assert product.flops == flops
    traffic = (256 + 32 * 64 + 64 * 256 + 32 * 256) * size
    assert op_bytes(step, product) == traffic
    assert op_seconds(step, product, DEVICE) == pytest.approx(1e-6 + max(flops / (rate / 2), traffic / 0.8e9))
    slow = DeviceProfile.from_json(DEVICE.to_json().replace(b'"single_flops": 1000000000000.0', b'"single_flops": 1e6'))
    if dtype is torch.float32:
        assert op_seconds(step, product, slow) == pytest.approx(1e-6 + flops / 0.5e6)


def test_views_and_what_is_expanded() -> None:
    step = recorded()
    view = step.ops[the(step, "aten.t.default")]
    assert op_bytes(step, view) == 0
    assert op_seconds(step, view, DEVICE) == 0.0
    expanded = next(v for v in step.values if 0 in v.stride and v.shape)
    reader = next(op for op in step.ops if expanded.id in op.inputs and not op.is_view)
    others = {step.values[v].view: step.values[v] for v in (*reader.inputs, *reader.outputs) if v != expanded.id}
    others.pop(expanded.view, None)
    whole = sum(torch.Size(v.shape).numel() * 4 for v in others.values())
    assert op_bytes(step, reader) < whole + torch.Size(expanded.shape).numel() * 4


def test_a_step_priced_for_another_machine_is_planned_there() -> None:
    step = recorded(depth=6, rows=1024)
    there = on_device(step, DEVICE)
    assert there.seconds == pytest.approx(sum(op_seconds(step, op, DEVICE) for op in step.ops))
    assert simulate(there).peak_bytes == simulate(step).peak_bytes
    assert [op.target for op in there.ops] == [op.target for op in step.ops]
    full = get_planner("full").plan(there, None)
    replayed = simulate(there, full)
    assert replayed.added_seconds == pytest.approx(
        sum(op_seconds(step, step.ops[o], DEVICE) for w in full.windows for o in w.ops)
    )
    peak = simulate(there).peak_bytes
    found = plan_optimal(there, int(0.9 * peak))
    assert found.schedule is not None
    assert simulate(there, found.schedule).peak_bytes <= 0.9 * peak


def test_a_faster_device_takes_less_time() -> None:
    step = recorded()
    seconds = [on_device(step, DEVICES[k]).seconds for k in ("t4", "a100", "b200")]
    assert seconds == sorted(seconds, reverse=True)
    assert len(set(seconds)) == 3
