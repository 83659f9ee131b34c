"""What `keepwise lesson` prints, and that nothing of it is written down beforehand."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import keepwise
from keepwise.cli import main
from keepwise.lessons import CHAPTERS, chapters
from keepwise.lessons.terminal import matches

FIGURES = [
    ("everything kept", "4,608", "0", "-"),
    ("k = 1", "1,088", "8", "0.0"),
    ("k = 2", "1,408", "8", "0.0"),
    ("k = 4", "2,432", "8", "0.0"),
    ("k = 8 (one segment)", "4,672", "8", "0.0"),
]
LESSONS = Path(keepwise.__file__).parent / "lessons"


@pytest.fixture(scope="module")
def book():
    return {chapter.key: chapter for chapter in chapters()}


def invoke(*args: str, **options):
    return CliRunner(env={"COLUMNS": "140", "NO_COLOR": "1"}).invoke(main, ["lesson", *args], **options)


def printed_rows(text: str) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in line.strip("│").split("│")) for line in text.splitlines() if "│" in line]


def test_prints_the_figures_exactly():
    result = invoke("every-k", "offload")
    assert result.exit_code == 0, result.output
    rows = printed_rows(result.output)
    for row in FIGURES:
        assert row in rows
    assert ("offload", "576", "0", "0.0", "9,216") in rows


def test_no_figure_is_written_in_the_code():
    figures = {"4608", "1088", "1408", "2432", "4672", "9216", "576"}
    for path in LESSONS.glob("*.py"):
        numbers = {match.replace(",", "").replace("_", "") for match in re.findall(r"\d[\d_,]*", path.read_text())}
        assert not numbers & figures, path.name


def test_the_whole_lesson_runs():
    result = invoke()
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert all(f"{number}. " in result.output for number in range(1, len(CHAPTERS) + 1))
    assert result.output.count("Predict: ") == result.output.count("Measured: ") == len(CHAPTERS)


def test_json_is_one_object_with_the_measured_numbers():
    result = invoke("every-k", "--json")
    rows = json.loads(result.output)["chapters"][0]["table"]["rows"]
    assert [row[1] for row in rows] == [4608, 1088, 1408, 2432, 4672]
    assert [row[3] for row in rows] == [None, 0.0, 0.0, 0.0, 0.0]


def test_ask_waits_for_predictions_and_counts_them():
    result = invoke("--ask", "every-k", "offload", input="4672\n17\n")
    assert result.exit_code == 0, result.output
    assert "Right. Measured: 4,672" in result.output
    assert "You said 17. Measured: 9,216" in result.output
    assert "1 of 2 predicted." in result.output
    assert result.output.index("Your prediction") < result.output.index("everything kept │")


def test_list_names_every_chapter():
    result = invoke("--list")
    assert [line.split()[0] for line in result.output.splitlines()] == list(CHAPTERS)


@pytest.mark.parametrize("args", [["nowhere"], ["--ask", "--json"], ["--torch", "sqrt"]])
def test_wrong_use_exits_with_2(args):
    assert invoke(*args).exit_code == 2


@pytest.mark.parametrize(
    ("typed", "answer", "right"),
    [
        ("4,672", 4672, True),
        ("4_672 ", 4672, True),
        ("4671", 4672, False),
        ("33%", "+33.3%", True),
        ("33.3", "+33.3%", True),
        ("25", "+33.3%", False),
        ("a third", "+33.3%", False),
        ("-5", "-5%", True),
        ("No", "no", True),
        ("yes", "no", False),
    ],
)
def test_predictions_are_compared_by_meaning(typed, answer, right):
    assert matches(typed, answer) is right


def test_the_key_of_every_chapter_is_its_name(book):
    assert list(book) == list(CHAPTERS)


def test_what_the_prose_claims_holds(book):
    by_k = {row[0]: row[1] for row in book["every-k"].table.rows}
    assert max(by_k, key=lambda label: by_k[label]) == "k = 8 (one segment)"  # "the worst of all"

    assert book["compute"].answer == "+33.3%"
    assert "4 units in place of 3" in book["compute"].why

    roots = book["sqrt"].table.rows
    assert [row[2] == row[4] for row in roots] == [True, True, False, False]  # the rule holds for A = b only

    frontier = book["budget"].table.rows
    assert [row[2] for row in frontier] == list(range(8))
    assert all(str(row[0]).rstrip().endswith("K") for row in frontier)  # "layers near the end are the best to keep"

    one_input = book["recursive"].table.rows[-1]
    assert one_input[2] == sum(range(8))
    assert one_input[4] == min(row[4] for row in book["recursive"].table.rows)  # "the floor of memory"

    assert book["selective"].why.startswith("Keep x, a.")
    assert book["dropout"].answer == "no"
    assert all(row[3] == 0.0 for row in book["accumulation"].table.rows)

    beaten = {row[1] for row in book["summary"].table.rows if row[4] == "yes"}
    assert {"k = 1", "k = 2", "k = 4", "k = 8", "square root"} <= beaten  # "the plans with a single dial lose"
