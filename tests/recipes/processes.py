"""Programs in two processes that talk through gloo."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]

TIME_LIMIT = 300.0  # seconds
GRACE = 20.0  # seconds that a process has when the other one has failed

_DRIVER = """
import faulthandler, os, pathlib, signal, sys
faulthandler.register(signal.SIGUSR1, all_threads=True)
os.environ["RANK"] = os.environ["LOCAL_RANK"] = sys.argv[1]
for place in sys.argv[2:]:
    folder, os.environ["MASTER_PORT"] = place.split("=")
    os.chdir(folder)
    exec(compile(pathlib.Path("train.py").read_text(), "train.py", "exec"), {"__name__": "__main__"})
sys.stdout.flush()
os._exit(0)  # A thread of a group that waits for the interpreter's lock at its end would terminate the process.
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
    outputs = [folder / f"rank-{rank}.txt" for rank in range(2)]
    with contextlib.ExitStack() as stack:
        workers = []
        for rank, path in enumerate(outputs):
            worker = subprocess.Popen(
                [sys.executable, "-c", _DRIVER, str(rank), *places],
                env={**os.environ, **shared},
                stdout=stack.enter_context(path.open("w")),
                stderr=subprocess.STDOUT,
            )
            stack.callback(worker.wait)
            stack.callback(worker.kill)
            workers.append(worker)
        codes = _wait(workers)
    said = [path.read_text() for path in outputs]
    assert codes == [0, 0], f"exit codes {codes}\n" + "\n".join(said)
    results = {name: [torch.load(folder / name / f"result-{rank}.pt") for rank in range(2)] for name in programs}
    return results, said


def _wait(workers: list[subprocess.Popen[bytes]]) -> list[int | None]:
    """The exit codes; None for a process that did not end, whose threads have written where they stand."""
    end = time.monotonic() + TIME_LIMIT
    while None in (codes := [worker.poll() for worker in workers]) and time.monotonic() < end:
        if any(codes):
            end = min(end, time.monotonic() + GRACE)
        time.sleep(0.05)
    for worker in workers:
        if worker.poll() is None:
            worker.send_signal(signal.SIGUSR1)
    if None in codes:
        time.sleep(1)
    return codes
