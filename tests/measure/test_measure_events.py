import json
import os
import subprocess
import sys

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from keepwise import KeepwiseError, targets
from keepwise.measure import AllocatorEvent, allocator_peak, allocator_timeline, op_workspace, peak_of


def test_allocations_and_frees_in_order():
    def call():
        first = torch.empty(1000, dtype=torch.uint8)
        second = torch.empty(3000, dtype=torch.uint8)
        del first
        third = torch.empty(500, dtype=torch.uint8)
        del second
        return third

    events = allocator_timeline(call)
    assert [event.delta_bytes for event in events] == [1000, 3000, -1000, 500, -3000]
    assert [event.op for event in events] == ["aten::empty", "aten::empty", "", "aten::empty", ""]
    assert events[0].address == events[2].address
    assert events[1].address == events[4].address
    times = [event.time_ns for event in events]
    assert times == sorted(times)
    assert times[0] >= 0
    assert {event.device for event in events} == {"cpu"}
    assert peak_of(events) == 4000
    assert allocator_peak(call) == 4000


def test_backward_nodes_are_named():
    x = torch.ones(16, requires_grad=True)
    events = allocator_timeline(lambda: x.exp().sum().backward())
    nodes = [event.node for event in events]
    assert nodes[0] == ""
    assert "ExpBackward0" in nodes
    made = next(event for event in events if event.delta_bytes == 64 and event.node == "ExpBackward0")
    assert made.op == "aten::mul"


def test_the_same_level_as_in_the_profilers_own_trace(tmp_path):
    target = targets.build("gpt2-tiny")
    target.step()  # Gradients exist from now on and are added to in place: each step ends where it began.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = target.step()
    path = tmp_path / "trace.json"
    profile.export_chrome_trace(str(path))
    written = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("name") == "[memory]"]
    written.sort(key=lambda event: event["ts"])
    level = peak = 0
    for event in written:
        level += event["args"]["Bytes"]
        peak = max(peak, level)
    assert loss.nbytes == 4
    assert allocator_peak(target.step) == peak


def test_a_lead_makes_a_step_that_frees_old_gradients_balanced():
    target = targets.build("mlp-tiny")

    def step():
        target.model.zero_grad(set_to_none=True)
        target.step()

    gradients = sum(p.nbytes for p in target.model.parameters())
    step()
    assert sum(event.delta_bytes for event in allocator_timeline(step)) == gradients
    assert sum(event.delta_bytes for event in allocator_timeline(step, lead=1)) == 0
    assert allocator_peak(step, lead=1) <= allocator_peak(step) - gradients


def test_between_runs_once_after_the_leads():
    calls = []
    allocator_timeline(lambda: calls.append("call"), lead=2, between=lambda: calls.append("between"))
    assert calls == ["call", "call", "between", "call"]


def test_workspace_is_what_an_op_needs_beside_its_result():
    x = torch.ones(1024)
    assert op_workspace(lambda: x.exp()) == 0
    assert op_workspace(lambda: x.exp().exp()) == x.nbytes
    # The inverse has to factorise a copy of its argument: space beside the result.
    square = torch.eye(32)
    assert op_workspace(lambda: torch.linalg.inv(square)) > 0


def test_a_block_freed_that_was_there_before_is_no_negative_workspace():
    def call():
        held.clear()
        return torch.empty(10)

    held = [torch.empty(1000)]
    assert op_workspace(call) == 0


@given(st.lists(st.integers(-100, 100)))
def test_peak_is_the_largest_running_sum(deltas):
    events = [
        AllocatorEvent(delta_bytes=delta, address=i, time_ns=i, device="cpu", op="", node="")
        for i, delta in enumerate(deltas)
    ]
    assert peak_of(events) == max([0, *(sum(deltas[: i + 1]) for i in range(len(deltas)))])


def test_another_profiler_is_an_error_that_says_so():
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile, pytest.raises(KeepwiseError, match="another torch profiler is running"):
        allocator_timeline(lambda: None)


def test_the_profiler_is_stopped_when_the_call_raises():
    def call():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        allocator_timeline(call)
    assert allocator_peak(lambda: torch.empty(25, dtype=torch.uint8)) == 25


def test_nothing_is_printed_and_the_environment_is_as_before():
    code = (
        "import os, torch; from keepwise.measure import allocator_peak\n"
        "before = dict(os.environ); x = torch.ones(8)\n"
        "assert allocator_peak(lambda: x.exp()) == 32; assert dict(os.environ) == before"
    )
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
