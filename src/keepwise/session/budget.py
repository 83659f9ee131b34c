"""Budgets as users write them, in bytes."""

from __future__ import annotations

import re
from typing import Any

from keepwise._errors import UsageError
from keepwise._units import NUMBER, parse_bytes

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
    text = budget.strip().lower() if isinstance(budget, str) else ""
    if text == "max":
        return None
    if text == "min":
        return floor_bytes if floor_bytes is not None else 0
    if text == "auto":
        return auto_bytes
    try:
        share = re.fullmatch(NUMBER + r"\s*([x%])", text)
        if share is None:
            return parse_bytes(budget)
        whole = plain_peak_bytes if share[2] == "x" else device_bytes / 100
        return parse_bytes(float(share[1]) * whole)
    except UsageError:
        raise UsageError(f"budget {budget!r} is no number of bytes above 0; accepted: {FORMS}") from None


def check_budget(budget: int | float | str) -> None:
    """Raise for what can never be a budget, before any work is done.

    Raises:
        UsageError: not a budget, or not positive.
    """
    parse_budget(budget, plain_peak_bytes=2**40, floor_bytes=1, device_bytes=2**40, auto_bytes=2**40)
