"""Numbers of bytes for people."""

from __future__ import annotations

SIZES = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}
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
