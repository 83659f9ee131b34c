"""Numbers of bytes as people write and read them."""

from __future__ import annotations

import re

from keepwise._errors import UsageError

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)"
"""A positive number as people write it, as a regular expression."""

SIZES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
"""Binary units, the largest first."""


def show_bytes(n: float) -> str:
    """Bytes for people, in binary units: `19.6 GiB`, `312 MiB`, `9.50 KiB`, `12 B`."""
    unit = unit_of(n)
    return f"{show_number(n / SIZES[unit])} {unit}"


def unit_of(n: float) -> str:
    """The unit in which a number of bytes reads best."""
    return next((unit for unit, size in SIZES.items() if abs(n) >= size), "B")


def show_number(value: float) -> str:
    """Three figures or so: `1069`, `19.6`, `1.47`, `0.42`; small whole numbers as they are."""
    size = abs(value)
    if size < 10 and value == int(value):
        return f"{value:.0f}"
    return f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"


def parse_bytes(text: str | float) -> int:
    """Number of bytes in "80GiB", "512 MiB", "1.5e9", "24 GB"; "GiB" is 2**30, "GB" is 10**9.

    Raises:
        UsageError: when `text` is no size, is below one byte, or is infinite.
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        value = float(text)
    else:
        compact = text.strip().replace("_", "").replace(",", "") if isinstance(text, str) else ""
        match = re.fullmatch(NUMBER + r"\s*(?:([kmgt])(i?))?b?", compact, re.IGNORECASE)
        if match is None:
            raise UsageError(f"{text!r} is no size in bytes; write for example 80GiB, 512MiB or 1.5e9")
        value = float(match[1]) * (_BINARY if match[3] else _DECIMAL)[(match[2] or "").lower()]
    if not 1 <= value < float("inf"):
        raise UsageError(f"a size must be a finite number of bytes above 0, not {text!r}")
    return int(value)
