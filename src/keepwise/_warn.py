"""Warnings that point to the user's own line."""

from __future__ import annotations

import os
import sys
import types
import warnings

_OURS = ("keepwise", "torch")
_FOLDER = os.path.dirname(os.path.abspath(__file__)) + os.sep


def warn(message: str) -> None:
    """Warn at the innermost line outside of Keepwise and PyTorch."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_passed_by(frame):
        frame = frame.f_back
        level += 1
    warnings.warn(message, UserWarning, stacklevel=level)


def _is_passed_by(frame: types.FrameType) -> bool:
    """By the file of its code, too: a function of ours that stands in for one of the user's has the user's globals."""
    return frame.f_globals.get("__name__", "").partition(".")[0] in (*_OURS, "contextlib") or (
        frame.f_code.co_filename.startswith(_FOLDER)
    )
