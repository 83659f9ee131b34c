"""Planning needs no more memory than the plan: the plain step does not fit under a hard limit, `fit` and the planned step do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("low_memory.py")
LIMIT_MIB = 300
"""Address space (`ulimit -v`) above what the interpreter, the libraries and the weights take."""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS")
def test_a_step_that_does_not_fit_is_planned_proved_and_trained_under_the_limit() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(LIMIT_MIB)],
        # One arena, and tensors that go back to the system when they are freed: else pools of the C library count too.
        env={**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert "allocate" in found["plain_error"]
    assert found["plain_bytes"] > LIMIT_MIB * 2**20 > found["peak_bytes"]
    assert found["proved"]
    assert found["num_proved"] > 0
    assert found["dropped"] > 0
    assert found["planned"] == found["plain"]
