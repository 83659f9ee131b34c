"""`keepwise env`: what a report of a problem should say about the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from typing import Any

import click

from keepwise._units import show_bytes
from keepwise.cli._common import DONE, Io, check_writable, reports

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
@click.option(
    "--profile",
    metavar="FILE",
    help="Measure this machine's device, and write its profile for plans made elsewhere (`fit --on`).",
)
@click.option("--force", is_flag=True, help="Overwrite the file.")
@reports
def command(io: Io, profile: str | None, force: bool) -> int:
    """Versions, devices, memory and threads."""
    check_writable(profile, force=force)
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
    if profile is not None:
        _write_profile(io, profile)
    return DONE


def _write_profile(io: Io, path: str) -> None:
    import msgspec
    import torch

    from keepwise.measure import measure_device

    with io.progress() as say:
        say("measuring products, copies and the smallest op")
        found = measure_device("cuda" if torch.cuda.is_available() else "cpu")
    io.data["profile"] = msgspec.to_builtins(found)
    io.out.print()
    io.out.print(
        f"{found.name}: products {found.single_flops / 1e9:,.0f} GFLOP/s in fp32 and {found.half_flops / 1e9:,.0f} in bf16, "
        f"copies {found.memory_bandwidth / 1e9:.1f} GB/s, the smallest op {found.launch_seconds * 1e6:.1f} us",
        soft_wrap=True,
    )
    io.write(path, found.to_json())


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
