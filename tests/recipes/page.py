"""The programs of docs/recipes.md: as they stand, and without Keepwise."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
_OURS = re.compile(r"keepwise|\bplan\b", re.IGNORECASE)


def program(title: str) -> str:
    """The code under a heading."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert section is not None, f"{PAGE.name} has no section {title!r}"
    blocks = re.findall(r"^```python\n(.*?)^```$", section[1], flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) == 1, "one program a recipe"
    return blocks[0]


def plain(code: str) -> str:
    """The same program without the lines that name Keepwise or a plan."""
    kept = [line for line in code.splitlines() if not _OURS.search(line)]
    assert 3 <= len(code.splitlines()) - len(kept) <= 6, "few lines make the difference"
    return "\n".join(kept) + "\n"


def titles() -> list[str]:
    return re.findall(r"^## (.+)$", PAGE.read_text(), flags=re.MULTILINE)
