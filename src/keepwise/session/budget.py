"""Budgets as users write them, in bytes."""

from __future__ import annotations

import re
from typing import Any

from keepwise._errors import UsageError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-zA-Z%]*)\s*$")
FORMS = "bytes as an int, '20GiB', '512 MiB', '1.5e9', '80%' of the device, '0.6x' of the plain step's peak, 'auto', 'min' or 'max'"


def is_word(budget: Any, word: str) -> bool:
    """Whether a budget is that word: `"auto"`, `"min"` or `"max"`."""
    return isinstance(budget, str) and budget.strip().lower() == word


def parse_budget(
    budget: int | float | str, *, plain_peak_bytes: int, floor_bytes: int | None, device_bytes: int, auto_bytes: int
) -> int | None:
    """A budget in bytes.

    Args:
        budget: what the user wrote.
        plain_peak_bytes: peak of the plain step, what `"0.6x"` refers to.
        floor_bytes: smallest reachable peak, what `"min"` means; None while it is not known yet.
        device_bytes: memory of the device, what `"80%"` refers to.
        auto_bytes: what `"auto"` means.

    Returns:
        Bytes; None for no limit.

    Raises:
        UsageError: not a budget, or not positive.
    """
    if isinstance(budget, bool) or not isinstance(budget, (int, float, str)):
        raise UsageError(f"budget {budget!r} is no size; accepted: {FORMS}")
    if isinstance(budget, (int, float)):
        return _positive(budget, budget)
    text = budget.strip().lower()
    if text == "max":
        return None
    if text == "min":
        return floor_bytes if floor_bytes is not None else 0
    if text == "auto":
        return auto_bytes
    found = _NUMBER.match(text)
    if found is None:
        raise UsageError(f"budget {budget!r} is no size; accepted: {FORMS}")
    number, unit = float(found[1]), found[2]
    if unit == "x":
        return _positive(number * plain_peak_bytes, budget)
    if unit == "%":
        return _positive(number / 100 * device_bytes, budget)
    if unit not in _UNITS:
        raise UsageError(f"budget {budget!r} has the unknown unit {found[2]!r}; accepted: {FORMS}")
    return _positive(number * _UNITS[unit], budget)


def check_budget(budget: int | float | str) -> None:
    """Raise for what can never be a budget, before any work is done.

    Raises:
        UsageError: not a budget, or not positive.
    """
    parse_budget(budget, plain_peak_bytes=2**40, floor_bytes=1, device_bytes=2**40, auto_bytes=2**40)


def _positive(number: float, shown: object) -> int:
    if not number >= 1:
        raise UsageError(f"budget {shown!r} is {number:g} bytes; it must be positive. Accepted: {FORMS}")
    if number == float("inf"):
        raise UsageError(f"budget {shown!r} is infinite; write 'max' for no limit")
    return int(number)
