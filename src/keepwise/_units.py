"""Numbers of bytes for people."""

from __future__ import annotations


def show_bytes(n: float, *, unit: str | None = None) -> str:
    """Bytes for people: `19.6 GiB`, `312 MiB`, `9.5 KiB`."""
    unit = unit or unit_of(n)
    value = n / {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "B": 1}[unit]
    return f"{show_number(value)} {unit}"


def unit_of(n: float) -> str:
    """The unit in which a number of bytes reads best."""
    n = abs(n)
    return "GiB" if n >= 2**30 else "MiB" if n >= 2**20 else "KiB" if n >= 2**10 else "B"


def show_number(value: float) -> str:
    """Three figures or so: `1069`, `19.6`, `0.42`."""
    if value == int(value) and abs(value) < 10:
        return f"{value:.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 1 else f"{value:.2f}"
