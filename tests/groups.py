"""The end of a process group in a test."""

from __future__ import annotations

import ctypes

import torch.distributed as dist


def leave_group() -> None:
    """Destroy the default process group, but never free its object.

    torch 2.13 frees a gloo group with the interpreter's lock held and waits there for the group's threads, one of which
    may wait for that lock (to free what it worked on last): about one program in thirty hangs, Keepwise or not.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))
    dist.destroy_process_group()
