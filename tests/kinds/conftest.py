"""One thread, and the global state of torch as it was; no process group stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.groups import leave_group


@pytest.fixture(autouse=True, scope="module")
def group_ends() -> Iterator[None]:
    yield
    if dist.is_initialized():
        leave_group()


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.set_rng_state(state)
