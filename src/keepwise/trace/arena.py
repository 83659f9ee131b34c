"""A file without a name in which copies of tensors wait.

Notes:
1. It is written and read with `pwrite` and `preadv`, never mapped: copies take neither memory nor address space, so a trace runs
   under the hard limits (`ulimit -v`, containers) that the plain step does not fit into.
2. One file a process; copies are appended. When the last one is gone the file is cut to nothing.
"""

from __future__ import annotations

import os
import tempfile
import threading

import torch

from keepwise.runtime.memory import bytes_at


class Arena:
    """Room for bytes outside of memory."""

    def __init__(self) -> None:
        self._wanted: str | None = None
        self._folder: str | None = None
        """Where the file is."""
        self._lock = threading.RLock()  # a copy can be collected, and released, at any allocation inside `write`
        self._handle = -1
        self._owner = -1
        self._end = 0
        self._num_copies = 0

    def use(self, folder: str | None) -> None:
        """Make the file in `folder` (None: the system's temporary folder), from the next time on that no copy is in it."""
        self._wanted = folder

    def write(self, storage: torch.UntypedStorage) -> int | None:
        """Append the bytes of a CPU storage.

        Returns:
            Where they lie; None where there is no room on disk.
        """
        view = bytes_at(storage, storage.nbytes())
        with self._lock:
            is_ours = self._owner == os.getpid()  # else the first use, or a fork: the parent's file is not ours
            if not is_ours or (self._folder != self._wanted and not self._num_copies):
                try:
                    handle, name = tempfile.mkstemp(prefix="keepwise-", dir=self._wanted)
                except OSError:
                    return None
                os.unlink(name)
                if is_ours:
                    os.close(self._handle)
                self._folder, self._handle, self._owner = self._wanted, handle, os.getpid()
                self._end = self._num_copies = 0
            self._num_copies += 1  # before anything else: what is released meanwhile must not cut the file
            place = self._end
            self._end += len(view)
            try:
                os.posix_fallocate(self._handle, place, len(view))
            except OSError:
                self._num_copies -= 1
                return None
        done = 0
        while done < len(view):
            done += os.pwrite(self._handle, view[done : done + (1 << 30)], place + done)
        return place

    def read(self, place: int, storage: torch.UntypedStorage) -> None:
        """Fill a CPU storage with what was written there."""
        view = bytes_at(storage, storage.nbytes())
        done = 0
        while done < len(view):
            got = os.preadv(self._handle, [view[done : done + (1 << 30)]], place + done)
            if got <= 0:
                raise OSError("a copy of a tensor is missing from the temporary file")
            done += got

    def release(self, owner: int) -> None:
        """A copy made by process `owner` is gone."""
        with self._lock:
            if owner != self._owner:
                return
            self._num_copies -= 1
            if self._num_copies == 0:
                os.ftruncate(self._handle, 0)
                self._end = 0


ARENA = Arena()
