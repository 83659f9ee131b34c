"""How long an op takes, by signature, and what earlier processes found out about it on this machine.

Notes:
1. An op is timed on copies of its inputs, as a replay would run it: once in any case, then again until 20 ms were spent; the
   price is the median.
2. Other work on the machine makes an op look slower, never faster. So prices are kept on disk, and the smallest one that was
   ever seen counts. Where the first run is much faster than that, the op is timed anew.
3. A price is believed only where it was taken under the same conditions (`conditions`): device, threads, release of PyTorch,
   settings of the allocator. What cannot be read or written is no error: then every process times for itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import statistics
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch

WARM_SECONDS = 0.02
"""Time spent on timing one signature; one run at least."""
WARM_RUNS = 7
STALE = 0.7
"""A first run below this share of the known price shows that the price was taken on a busy machine."""
MAX_PRICES = 20_000
"""Signatures that are remembered in a file: the newest ones."""
FILE_VERSION = 1
VARIABLE = "KEEPWISE_CACHE_DIR"
"""Environment variable with the folder of the file; set but empty: nothing is kept on disk."""


class _File(msgspec.Struct, frozen=True, kw_only=True):
    kind: str = "keepwise.timings"
    version: int = FILE_VERSION
    conditions: dict[str, str]
    seconds: dict[str, float]
    """Digest of a signature -> seconds, oldest first."""


def cache_folder() -> Path | None:
    """Where prices are kept: `$KEEPWISE_CACHE_DIR`, else `keepwise` in the user's cache folder; None if nowhere."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return Path(named) if named else None
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path.home() / ".cache") / "keepwise"
    except RuntimeError:  # no home
        return None


def conditions(device: torch.device) -> dict[str, str]:
    """What the time of an op depends on, besides its signature."""
    found = {"torch": str(torch.__version__), "threads": str(torch.get_num_threads())}
    if device.type == "cuda":
        found["device"] = torch.cuda.get_device_name(device)
        found["tf32"] = torch.get_float32_matmul_precision()
    else:
        found["device"] = f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"
        found["mkldnn"] = str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
    found["deterministic"] = str(torch.are_deterministic_algorithms_enabled())
    for name, value in sorted(os.environ.items()):
        if name.startswith(("MALLOC_", "PYTORCH_CUDA_ALLOC", "GLIBC_TUNABLES", "LD_PRELOAD", "KMP_", "GOMP_", "OMP_")):
            found[name] = value
    return found


@functools.cache
def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


class Timings:
    """Prices of ops under given conditions; read from disk at the first question and written by `save`."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """Prepare; nothing is read yet.

        Args:
            device: the device that ops run on.
            folder: where the file is; None: nothing is read or written.
        """
        self.conditions = conditions(device)
        text = msgspec.json.encode(self.conditions)
        self.path = (
            folder / f"timings-{hashlib.blake2b(text, digest_size=8).hexdigest()}.json" if folder is not None else None
        )
        self.num_known = 0
        """Ops whose price was known already."""
        self._new: dict[str, float] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def _old(self) -> dict[str, float]:
        return self._read()

    def _read(self) -> dict[str, float]:
        if self.path is None:
            return {}
        try:
            found = msgspec.json.decode(self.path.read_bytes(), type=_File)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return {}
        if found.kind != "keepwise.timings" or found.version != FILE_VERSION or found.conditions != self.conditions:
            return {}
        return {key: s for key, s in found.seconds.items() if 0 <= s < 1e6}

    def price(self, signature: str, first: float, run: Callable[[], float]) -> float:
        """Seconds of an op.

        Args:
            signature: `trace.signature.signature_of` the call.
            first: seconds of a first run.
            run: runs it again and returns the seconds.
        """
        key = hashlib.blake2b(signature.encode(), digest_size=8).hexdigest()
        with self._lock:
            known = self._new.get(key, self._old.get(key))
        if known is not None and first >= STALE * known:
            self.num_known += 1
            return known
        seconds, spent = [first], first
        while spent < WARM_SECONDS and len(seconds) < WARM_RUNS:
            took = run()
            seconds.append(took)
            spent += took
        price = statistics.median(seconds)
        with self._lock:
            self._new[key] = price if known is None else min(price, known)
            return self._new[key]

    def save(self) -> None:
        """Add what is new to the file. Other processes may have written it meanwhile: the smaller price counts."""
        if self.path is None or not self._new:
            return
        with self._lock:
            merged = self._read()
            for key, s in self._new.items():
                merged[key] = min(s, merged.pop(key, s))
            kept = dict(list(merged.items())[-MAX_PRICES:])
            document = _File(conditions=self.conditions, seconds=kept)
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _replace(self.path, msgspec.json.encode(document))
            except OSError:
                return


def _replace(path: Path, data: bytes) -> None:
    """Write a file in one step: whoever reads it meanwhile sees the old one or the new one."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def timings_for(device: Any) -> Timings:
    """The prices of this machine."""
    return Timings(torch.device(device), cache_folder())
