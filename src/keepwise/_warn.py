"""Warnings that point to the user's own line."""

from __future__ import annotations

import sys
import warnings

_OURS = ("keepwise", "torch")


def warn(message: str) -> None:
    """Warn at the innermost line outside of Keepwise and PyTorch."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (*_OURS, "contextlib"):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)
