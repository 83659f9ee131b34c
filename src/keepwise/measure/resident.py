"""Resident memory of this process: how high it rose during a call.

Notes:
1. Linux keeps the high-water mark (`VmHWM`) itself and lets a process reset it by writing 5 to `/proc/self/clear_refs`; the
   mark is then exact to some hundred KiB (the kernel counts pages in batches). Where that is not allowed, a thread looks at
   the resident set every millisecond, which misses peaks that are shorter.
2. Memory that the C library keeps after `free` is part of the resident set before the call; what the call takes out of it
   would not be seen. It is handed back to the system first (`malloc_trim`).
3. The GNU C library takes a block from the system by itself only above a threshold, which grows up to 32 MiB as larger blocks
   are freed; below it, blocks come from one heap, whose holes stay resident. GPT-2 (6 blocks of width 768, 4 x 512): 1,069 MiB
   by the allocator; resident 1,069 with a threshold that stays low, some 1,500 with one that has grown. The first is what
   a step needs, the last what this library makes of it. `map_large_blocks` keeps the threshold low from then on; holes that
   the heap has already stay, so that it has to be called before the first step, as benchmarks do. The environment variable
   `MALLOC_MMAP_THRESHOLD_=131072` does the same.
"""

from __future__ import annotations

import ctypes
import gc
import threading
from types import TracebackType
from typing import Self

import psutil

_CLEAR_REFS = "/proc/self/clear_refs"
_STATUS = "/proc/self/status"
_SAMPLE_SECONDS = 0.001

_MMAP_THRESHOLD = -3
"""The option of `mallopt` (malloc.h)."""
_THRESHOLD_BYTES = 128 << 10
"""The threshold that the GNU C library begins with."""


def resident_bytes() -> int:
    """The resident set of this process now, in bytes."""
    return psutil.Process().memory_info().rss


def release_free_memory() -> None:
    """Collect garbage and hand memory that the C library keeps back to the system, where it can (note 2)."""
    gc.collect()
    # Other C libraries have no such function, and no such cache of large blocks.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def map_large_blocks() -> bool:
    """Take each large block from the system by itself, for the rest of this process (note 3).

    Returns whether that is so: False where the C library has no such setting.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, _THRESHOLD_BYTES) == 1


class ResidentRise:
    """`with ResidentRise() as rise: ...`, then `rise.bytes`: the highest resident set less the one before, in bytes."""

    def __init__(self, *, sampled: bool = False) -> None:
        """`sampled`: do not use the kernel's mark (note 1)."""
        self.bytes = 0
        self.exact = not sampled
        """Whether the kernel's mark was used, not samples."""
        self._before = 0
        self._sampler: _Sampler | None = None

    def __enter__(self) -> Self:
        """Hand free memory back and take the level before."""
        release_free_memory()
        self.exact = self.exact and _reset_mark()
        if not self.exact:
            self._sampler = _Sampler()
            self._sampler.start()
        self._before = resident_bytes()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take the mark."""
        highest = resident_bytes()
        if self._sampler is not None:
            highest = max(highest, self._sampler.finish())
        else:
            highest = max(highest, _mark())
        self.bytes = max(0, highest - self._before)


def _reset_mark() -> bool:
    """Set the kernel's mark to the present level; False where the kernel does not let us."""
    try:
        with open(_CLEAR_REFS, "w", encoding="ascii") as file:
            file.write("5")
        return _mark() > 0
    except OSError:
        return False


def _mark() -> int:
    """The kernel's high-water mark in bytes; 0 where there is none."""
    with open(_STATUS, encoding="ascii", errors="replace") as file:
        for line in file:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


class _Sampler(threading.Thread):
    """Looks at the resident set until it is told to finish."""

    def __init__(self) -> None:
        super().__init__(name="keepwise-resident", daemon=True)
        self._highest = 0
        self._done = threading.Event()

    def run(self) -> None:
        """Sample until done."""
        process = psutil.Process()
        while not self._done.wait(_SAMPLE_SECONDS):
            self._highest = max(self._highest, process.memory_info().rss)

    def finish(self) -> int:
        """Stop, and return the highest sample in bytes."""
        self._done.set()
        self.join()
        return self._highest
