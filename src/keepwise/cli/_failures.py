"""Whose fault an exception is, where in the user's code it came from, and what to do about it on the command line."""

from __future__ import annotations

import linecache
import re
import sysconfig
import traceback
from collections.abc import Sequence
from pathlib import Path

import keepwise

_OURS = Path(keepwise.__file__).parent
_USERS_ROOMS = ("targets", "lessons")
"""Rooms of ours whose code stands where a user's would."""


_SPELLINGS = (
    (r"\bbudget=(\d+)", r"--budget \1"),
    (r"\bbudget='(\w+)'", r"--budget \1"),
    (r"\bplanner='(\w+)'", r"--planner \1"),
    (
        r"\bpass loss=, a function from (?:the )?output to (?:a )?scalar",
        "let the target return one as its fourth element",
    ),
)
"""What an error of the Python interface says to pass -> how that is said on the command line."""
_FLOOR = re.compile(r", or on_infeasible='floor'(?= to run)")


def in_options(message: str, options: Sequence[str]) -> str:
    """An error's message with the options of the command in place of Python's arguments."""
    floor = ", or --on-infeasible floor" if "on_infeasible" in options else None
    if floor is None:
        message = re.sub(r", or on_infeasible='floor' to run the smallest plan", "", message)
    else:
        message = _FLOOR.sub(floor, message)
    for python, option in _SPELLINGS:
        message = re.sub(python, option, message)
    return message


def is_ours(error: BaseException) -> bool:
    """Whether the exception was raised by a line of Keepwise itself, and not by an op or by the target's code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _is_ours(frames[-1].filename)


def place_in_user_code(error: BaseException) -> str:
    """`train.py:14, in forward: return self.head(x)` of the innermost line that is neither ours nor a library's.

    Where there is none, the innermost line that is neither ours nor torch's; empty if there is none of these either.
    """
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if not _is_ours(f.filename) and f.filename[:1] != "<"
    ]
    own = [f for f in frames if not _is_library(f.filename)]
    other = [f for f in frames if "/torch/" not in f.filename]
    found = own[-1] if own else other[-1] if other else None
    if found is None or found.lineno is None:
        return ""
    code = linecache.getline(found.filename, found.lineno).strip()
    return f"{found.filename}:{found.lineno}, in {found.name}" + (f": {code}" if code else "")


def _is_ours(filename: str) -> bool:
    path = Path(filename)
    if not path.is_relative_to(_OURS):
        return False
    return path.relative_to(_OURS).parts[0] not in _USERS_ROOMS


def _is_library(filename: str) -> bool:
    return any(filename.startswith(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
