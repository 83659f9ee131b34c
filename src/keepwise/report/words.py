"""Numbers and names as people read them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from keepwise._units import show_number


def show_seconds(seconds: float) -> str:
    """Seconds for people: `1.92 s`, `12.4 ms`, `85 us`; `0` for nothing."""
    if seconds <= 0:
        return "0"
    if seconds >= 1:
        return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"
    if seconds >= 1e-3:
        return f"{show_number(seconds * 1e3)} ms"
    return f"{seconds * 1e6:.0f} us"


def show_percent(part: float, whole: float, *, sign: bool = True) -> str:
    """`+4.1 %`; `-` where the whole is nothing."""
    if whole <= 0:
        return "-"
    value = 100 * part / whole
    return f"{value:+.1f} %" if sign else f"{value:.1f} %"


def short_op(target: str) -> str:
    """`aten.native_layer_norm.default` -> `native_layer_norm`."""
    parts = target.split(".")
    return parts[1].lstrip("_") if len(parts) > 1 and parts[0] == "aten" else target


def ranges(numbers: Iterable[int]) -> str:
    """`0-3, 5` for 0, 1, 2, 3, 5; `0, 1` for two neighbours."""
    spans: list[list[int]] = []
    for n in sorted(numbers):
        if spans and n == spans[-1][1] + 1:
            spans[-1][1] = n
        else:
            spans.append([n, n])
    shown = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in spans]
    return ", ".join(shown)


def plain_reason(why: str) -> str:
    """A decision's reason without its timing, so that equal reasons of different tensors can be put together."""
    return re.sub(r", [0-9.]+ ms$", "", why)
