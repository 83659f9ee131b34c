"""Counts as people write them, both ways (sizes: `keepwise._units`)."""

from __future__ import annotations

import re

from keepwise._errors import UsageError
from keepwise._units import NUMBER

_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12}


def parse_count(text: str | float) -> int:
    """A count such as "8192", "6.738e9", "7B" (10**9) or "128k" (128 000).

    Raises:
        UsageError: when `text` is no count, or not positive.
    """
    if isinstance(text, (int, float)):
        value = float(text)
    else:
        match = re.fullmatch(NUMBER + r"\s*([kmgbt]?)", text.strip().replace("_", "").replace(",", ""), re.IGNORECASE)
        if match is None:
            raise UsageError(f"{text!r} is no count; write for example 8192, 6.738e9 or 7B")
        value = float(match[1]) * _DECIMAL[match[2].lower()]
    if value <= 0 or value != int(value):
        raise UsageError(f"a count must be a whole number above 0, not {text!r}")
    return int(value)


def format_count(count: float) -> str:
    """A count for people: "6.74 B", "124 M", "96"."""
    for unit, scale in (("T", 10**12), ("B", 10**9), ("M", 10**6)):
        if abs(count) >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:,.0f}"
