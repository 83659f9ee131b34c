"""`keepwise env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import click

from keepwise._units import show_bytes
from keepwise.cli._common import DONE, Io, reports

PACKAGES = (
    "torch",
    "highspy",
    "numpy",
    "msgspec",
    "psutil",
    "click",
    "rich",
    "jinja2",
    "transformers",
    "peft",
    "accelerate",
    "lightning",
)
VARIABLES = (
    "KEEPWISE",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
)


@click.command("env")
@reports
def command(io: Io) -> int:
    """Versions, devices, memory and threads."""
    with io.progress() as say:
        say("loading torch")
        found = environment()
    io.data = {"command": "env", **found}
    devices = [f"{d['name']}: {show_bytes(d['bytes'])}" for d in found["devices"]]
    rows = {
        "keepwise": found["keepwise"],
        "python": f"{found['python']}, {found['system']}",
        "processor": f"{found['cpus']} CPUs, torch uses {found['threads']} threads, {found['capability']}",
        "memory": f"{show_bytes(found['memory_bytes'])}, {show_bytes(found['available_bytes'])} available",
        "devices": "; ".join(devices) or "cpu only",
        **{name: version or "not installed" for name, version in found["packages"].items()},
        **found["variables"],
    }
    width = max(map(len, rows))
    for name, value in rows.items():
        io.out.print(f"{name:<{width}}  {value}", soft_wrap=True)
    return DONE


def environment() -> dict[str, Any]:
    """The same as data; bytes are bytes."""
    import psutil
    import torch

    import keepwise

    memory = psutil.virtual_memory()
    devices: list[dict[str, Any]] = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices.append({"name": f"cuda:{i} {properties.name}", "bytes": properties.total_memory})
    return {
        "keepwise": keepwise.__version__,
        "python": platform.python_version(),
        "executable": sys.executable,
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "memory_bytes": memory.total,
        "available_bytes": memory.available,
        "devices": devices,
        "packages": {name: _version(name) for name in PACKAGES},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
