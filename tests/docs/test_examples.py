"""Every Python block of the documentation runs; every command and link that it names exists.

A comment on the line before a block says what is special about it:

    <!-- continues -->            runs after the blocks before it, in the same namespace
    <!-- not run: a reason -->    compiled only
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import click
import pytest

from keepwise.cli import COMMANDS, main

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.glob("*.md"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    page: str
    line: int
    language: str
    code: str
    markers: tuple[str, ...]

    @property
    def continues(self) -> bool:
        return "continues" in self.markers

    @property
    def not_run(self) -> str | None:
        return next((m.removeprefix("not run:").strip() for m in self.markers if m.startswith("not run:")), None)


def blocks_of(page: Path) -> list[Block]:
    found: list[Block] = []
    markers: list[str] = []
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    for number, line in lines:
        if marker := re.fullmatch(r"<!-- (.+) -->", line):
            markers.append(marker[1])
        elif line.startswith("```"):
            code = []
            for _, inside in lines:
                if inside == "```":
                    break
                code.append(inside)
            block = Block(page=page.name, line=number, language=line[3:], code="\n".join(code), markers=tuple(markers))
            found.append(block)
            markers = []
        else:
            markers = []
    return found


BLOCKS = {page.name: blocks_of(page) for page in PAGES}
PYTHON = [block for blocks in BLOCKS.values() for block in blocks if block.language == "python"]
CONSOLE = [block for blocks in BLOCKS.values() for block in blocks if block.language in ("bash", "console", "sh")]


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def with_those_before(block: Block) -> list[Block]:
    """The block, preceded by the chain of blocks that it continues."""
    page = [other for other in BLOCKS[block.page] if other.language == "python"]
    index = page.index(block)
    return [*with_those_before(page[index - 1]), block] if block.continues else [block]


@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_python_example(block, tmp_path, monkeypatch):
    chain = with_those_before(block)
    codes = [compile("\n" * part.line + part.code, str(DOCS / part.page), "exec") for part in chain]
    if block.not_run is not None:
        return
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "example"}
    for code in codes:
        exec(code, namespace)


@pytest.mark.parametrize("block", PYTHON, ids=name_of)
def test_markers_are_true(block):
    assert block.not_run is None or len(block.not_run) > 5, "say why it is not run"
    for marker in block.markers:
        assert marker == "continues" or marker.startswith("not run:"), f"unknown marker {marker!r}"


def test_most_examples_run():
    assert len(PYTHON) >= 20
    assert sum(block.not_run is not None for block in PYTHON) <= 2


@pytest.mark.parametrize("block", CONSOLE, ids=name_of)
def test_commands_exist_and_take_these_options(block):
    for line in block.code.splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0] != "keepwise":
            continue
        assert words[1] in COMMANDS, line
        command = main.get_command(click.Context(main), words[1])
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        options = {word.split("=")[0] for word in words[2:] if word.startswith("-")}
        assert options <= known, line


def links() -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        found += [(page.name, target) for target in re.findall(r"\]\(([^)\s]+)\)", text)]
    return found


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(("page", "target"), [link for link in links() if "://" not in link[1]])
def test_link_leads_somewhere(page, target):
    name, _, anchor = target.partition("#")
    path = (DOCS / name) if name else DOCS / page
    assert path.exists()
    assert not anchor or anchor in anchors(path)


def test_the_table_of_contents_lists_every_page():
    listed = {target for page, target in links() if page == "README.md"}
    assert {page.name for page in PAGES} - {"README.md"} <= listed


def test_every_row_of_the_comparison_has_a_source():
    text = (DOCS / "comparison.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    tools = [row for row in rows if row.count("|") > 4 and not row.startswith("| tool ")]
    assert len(tools) >= 25
    for row in tools:
        assert re.search(r"https?://|20[012]\d|\d\.\d+ \||PyTorch \d|DeepSpeed \d|this repository", row), row


def test_the_lesson_page_shows_what_the_lesson_prints():
    from keepwise.lessons.chapter import show
    from keepwise.lessons.chapters_where import every_k

    measured = ["| " + " | ".join(show(cell) for cell in row) + " |" for row in every_k().table.rows]
    text = (DOCS / "lesson.md").read_text()
    assert all(row in text for row in measured)


def test_the_lesson_page_names_every_chapter():
    from keepwise.lessons import CHAPTERS

    named = re.findall(r"^\| `([a-z-]+)` \|", (DOCS / "lesson.md").read_text(), flags=re.MULTILINE)
    assert named == list(CHAPTERS)
