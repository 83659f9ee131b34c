"""Sizes and counts as people write them, both ways."""

from __future__ import annotations

import re

from keepwise._errors import UsageError

_BINARY = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}
_NUMBER = r"([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)"


def parse_bytes(text: str | float) -> int:
    """Number of bytes in "80GiB", "512 MiB", "1.5e9", "24 GB"; "GiB" is 2**30, "GB" is 10**9.

    Raises:
        UsageError: when `text` is no size, or not positive.
    """
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        match = re.fullmatch(
            _NUMBER + r"\s*([kmgt]?)(i?)b?", text.strip().replace("_", "").replace(",", ""), re.IGNORECASE
        )
        if match is None:
            raise UsageError(f"{text!r} is no size in bytes; write for example 80GiB, 512MiB or 1.5e9")
        scale = (_BINARY if match[3] else _DECIMAL)[match[2].lower()]
        value = float(match[1]) * scale
    if value <= 0:
        raise UsageError(f"a size must be above 0 bytes, not {text!r}")
    return round(value)


def parse_count(text: str | float) -> int:
    """A count such as "8192", "6.738e9", "7B" (10**9) or "128k" (128 000).

    Raises:
        UsageError: when `text` is no count, or not positive.
    """
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        match = re.fullmatch(_NUMBER + r"\s*([kmgbt]?)", text.strip().replace("_", "").replace(",", ""), re.IGNORECASE)
        if match is None:
            raise UsageError(f"{text!r} is no count; write for example 8192, 6.738e9 or 7B")
        value = float(match[1]) * _DECIMAL[match[2].lower()]
    if value <= 0 or value != int(value):
        raise UsageError(f"a count must be a whole number above 0, not {text!r}")
    return int(value)


def format_bytes(num_bytes: float) -> str:
    """Bytes for people: "3.21 GiB", "512 MiB", "96 B"."""
    size = abs(num_bytes)
    for unit, scale in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            value = num_bytes / scale
            return f"{value:,.4g} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """A count for people: "6.74 B", "124 M", "96"."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if abs(count) >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:,.0f}"
