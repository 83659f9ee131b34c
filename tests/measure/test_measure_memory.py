import ctypes
import functools
import os
import subprocess
import sys
import time

import psutil
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import keepwise.measure
from keepwise._errors import UsageError
from keepwise.measure import PeakTracker, ResidentRise, allocator_peak, measure, measure_device
from keepwise.measure.static import holdings

MIB = 1 << 20


@pytest.mark.parametrize("sampled", [False, True])
def test_resident_rise_is_what_was_written_to(sampled):
    with ResidentRise(sampled=sampled) as rise:
        block = torch.zeros(64 * MIB, dtype=torch.uint8).fill_(1)
        time.sleep(0.02)
        del block
    assert 63 * MIB < rise.bytes < 72 * MIB


def test_memory_that_the_c_library_keeps_does_not_hide_the_rise():
    def many():
        return [
            torch.ones(25_000) for _ in range(640)
        ]  # 100 kB each: below the size that the C library maps by itself.

    many()
    with ResidentRise() as rise:
        many()
    assert rise.bytes > 55 * MIB


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="needs the GNU C library")
def test_holes_in_the_heap_do_not_count():
    code = """
import sys, torch
from keepwise.measure import ResidentRise, map_large_blocks

def step():  # 100 blocks of 1 MiB; every second one goes, and 33 of 1.5 MiB fit in none of the holes.
    blocks = [torch.ones(1 << 18) for _ in range(100)]
    del blocks[::2]
    blocks += [torch.ones(3 << 17) for _ in range(33)]

if sys.argv[1] == "mapped":
    assert map_large_blocks()
del (large := [torch.ones(7 << 20)])[:]  # Freed: a threshold that can grow is above 1.5 MiB from now on.
step()
with ResidentRise() as rise:
    step()
print(rise.bytes >> 20)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}

    def run(how):
        command = [sys.executable, "-c", code, how]
        return int(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout)

    assert 98 <= run("mapped") <= 104
    assert run("heap") >= 140


class Wide(nn.Module):
    """Depth blocks whose inner tensor is much larger than what goes between them."""

    def __init__(self, recompute):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8), nn.BatchNorm1d(8)) for _ in range(6)
        )
        self.recompute = recompute

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return x.square().mean()


def step_of(model, x, optimizer=None):
    def step():
        if optimizer is not None:
            optimizer.zero_grad()
        model(x).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def test_the_peak_is_the_static_tensors_and_the_rise():
    model, x = Wide(recompute=False), torch.randn(128, 8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    step = step_of(model, x, optimizer)
    found = measure(step, warmup=1, steps=1)
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    assert found.static_bytes == 3 * parameters + buffers + x.nbytes
    assert found.peak_bytes == found.static_bytes + allocator_peak(step, lead=1)
    assert sum(found.by_category.values()) == found.peak_bytes
    assert found.by_category["parameter"] == found.by_category["optimizer state"] == parameters
    assert found.by_category["buffer"] == buffers
    assert found.by_category["input"] == x.nbytes
    # Two tensors of 512 a row are kept in each block, one for tanh and the other for the second product: the same one.
    inner = 6 * 128 * 512 * 4
    assert inner <= found.by_category["activation"] < 1.5 * inner
    assert found.reserved_bytes is None
    assert found.resident_bytes is not None


def test_checkpointing_lowers_activations_and_nothing_else():
    x = torch.randn(128, 8)
    plain = measure(step_of(Wide(recompute=False), x), warmup=1, steps=1)
    saved = measure(step_of(Wide(recompute=True), x), warmup=1, steps=1)
    assert saved.by_category["activation"] < 0.5 * plain.by_category["activation"]
    assert saved.peak_bytes < plain.peak_bytes
    for category in ("parameter", "gradient", "buffer", "input"):
        assert saved.by_category[category] == plain.by_category[category]


def test_gradients_that_appear_in_backward_are_gradients():
    model, x = nn.Linear(1000, 1000, bias=False), torch.randn(1, 1000)

    def step():
        model.zero_grad(set_to_none=True)
        model(x).sum().backward()

    found = measure(step, warmup=0, steps=1)
    assert found.by_category["gradient"] == model.weight.nbytes


GLOBAL_MODEL = nn.Linear(3, 3)


def test_what_a_step_holds_is_found_wherever_it_is():
    model, x = nn.Linear(2, 2), torch.ones(5)
    optimizer = torch.optim.Adam(model.parameters())

    class Trainer:
        def __init__(self):
            self.parts = {"model": model, "batch": [x]}
            self.optimizer = optimizer

        def step(self):
            pass

    def inner():
        return model, x, optimizer

    def outer():
        return inner()

    def with_default(m=model, *, other=(x, optimizer)):
        pass

    for step in (
        inner,
        outer,
        with_default,
        Trainer().step,
        functools.partial(print, [model], y={"x": (x, optimizer)}),
    ):
        found = holdings(step, None, None)
        assert found.models == [model]
        assert found.optimizers == [optimizer]
        assert [id(t) for t in found.tensors] == [id(x)]
    assert holdings(lambda: GLOBAL_MODEL, None, None).models == [GLOBAL_MODEL]
    assert holdings(print, model, optimizer).models == [model]


def test_shared_storage_counts_once_under_its_first_role():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    model.register_buffer("view", model[0].weight.detach()[1:])
    storages = holdings(print, model, None).storages("cpu")
    assert list(storages.values()) == [("parameter", 64)]
    assert holdings(print, model, None).storages("meta") == {}


def test_tensors_made_of_tensors_count_by_their_parts():
    sparse = torch.eye(10).to_sparse()
    found = holdings(lambda: sparse, None, None).storages("cpu")
    assert sorted(size for _, size in found.values()) == [10 * 4, 2 * 10 * 8]


def test_tokens_per_second_and_samples():
    x = torch.ones(4)
    found = measure(lambda: x + 1, steps=3, tokens=100)
    assert len(found.step_seconds.samples) == 3
    assert found.tokens_per_second == 100 / found.step_seconds.median
    assert measure(lambda: x + 1, steps=1).tokens_per_second is None


def test_no_step_to_time_is_an_error():
    with pytest.raises(UsageError, match="steps=0"):
        measure(lambda: None, steps=0)


def test_the_room_can_be_called_by_its_name_after_its_modules_were_imported():
    code = (
        "import keepwise.measure.events, keepwise, torch\n"
        "x = torch.ones(4); print(keepwise.measure(lambda: x + 1, steps=1).by_category['input'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "16\n"
    assert sorted(keepwise.measure.__all__) == keepwise.measure.__all__


def test_no_mark_where_the_allocator_keeps_none():
    with PeakTracker("cpu") as peak:
        torch.empty(10)
    assert not peak.supported
    assert peak.bytes is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_mark_of_a_cuda_device():
    before = torch.cuda.memory_allocated()
    with PeakTracker("cuda") as peak:
        torch.empty(MIB, dtype=torch.uint8, device="cuda")
    assert peak.bytes is not None
    assert peak.bytes >= before + MIB


def test_the_device_of_this_machine() -> None:
    found = measure_device("cpu")
    assert found.memory_bytes == psutil.virtual_memory().total
    # Any processor of the last twenty years, and none of the next twenty.
    assert 1e8 < found.single_flops < 1e15
    assert 1e8 < found.memory_bandwidth < 1e14
    assert 1e-8 < found.launch_seconds < 1e-2
    assert type(found).from_json(found.to_json()) == found
