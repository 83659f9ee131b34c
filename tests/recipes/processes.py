"""Programs in two processes that talk through gloo."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

_DRIVER = """
import os, pathlib, sys
os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[1]
for place in sys.argv[2:]:
    folder, os.environ["MASTER_PORT"] = place.split("=")
    os.chdir(folder)
    exec(compile(pathlib.Path("train.py").read_text(), "train.py", "exec"), {"__name__": "__main__"})
"""


def _free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(number)]
        for s in found:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in found]


def run_both(programs: dict[str, str], folder: Path) -> tuple[dict[str, list[Any]], list[str]]:
    """Run each program in the same two processes.

    Returns:
        By program, what it saved as `result-RANK.pt`; and what the two processes printed.
    """
    for name, code in programs.items():
        (folder / name).mkdir()
        (folder / name / "train.py").write_text(code)
    places = [f"{folder / name}={port}" for name, port in zip(programs, _free_ports(len(programs)), strict=True)]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "none",  # Lightning knows a process that torchrun started by it.
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", _DRIVER, str(rank), *places],
            env={**os.environ, **shared},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(said)
    results = {name: [torch.load(folder / name / f"result-{rank}.pt") for rank in range(2)] for name in programs}
    return results, said
