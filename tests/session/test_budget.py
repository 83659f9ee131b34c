"""Budgets in every form, against arithmetic done by hand."""

from __future__ import annotations

import pytest

from keepwise._errors import KeepwiseError, UsageError
from keepwise._units import show_bytes
from keepwise.session.budget import check_budget, parse_budget


def parse(budget: object) -> int | None:
    return parse_budget(budget, plain_peak_bytes=1000, floor_bytes=7, device_bytes=500, auto_bytes=99)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (123, 123),
        (1.5e3, 1500),
        ("123", 123),
        ("1.5e9", 1_500_000_000),
        ("20GiB", 20 * 2**30),
        ("512 MiB", 512 * 2**20),
        ("0.5gib", 2**29),
        ("3 KiB", 3072),
        ("2GB", 2 * 10**9),
        ("2g", 2 * 10**9),
        ("1_500 KB", 1_500_000),
        ("7b", 7),
        ("80%", 400),
        ("0.6x", 600),
        ("1x", 1000),
        ("auto", 99),
        ("min", 7),
        ("max", None),
        (" MAX ", None),
    ],
)
def test_every_form(budget: object, expected: int | None) -> None:
    assert parse(budget) == expected


@pytest.mark.parametrize(
    "budget",
    [
        "",
        "lots",
        "20 bananas",
        "GiB",
        "-5",
        "0",
        0,
        -1,
        "0x",
        "0%",
        "0.5",
        "1e999",
        "7i",
        None,
        True,
        [1],
        float("inf"),
        float("nan"),
    ],
)
def test_what_is_no_budget_gives_one_line_that_says_what_is(budget: object) -> None:
    with pytest.raises(UsageError) as caught:
        check_budget(budget)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text
    assert "GiB" in text or "max" in text
    assert isinstance(caught.value, KeepwiseError)


@pytest.mark.parametrize(
    ("n", "shown"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1536, "1.50 KiB"),
        (2**20, "1 MiB"),
        (-(2**20), "-1 MiB"),
        (1.469 * 2**20, "1.47 MiB"),
        (20 * 2**30, "20.0 GiB"),
        (1069 * 2**30, "1.04 TiB"),
        (312 * 2**30, "312 GiB"),
    ],
)
def test_bytes_for_people(n: float, shown: str) -> None:
    assert show_bytes(n) == shown
