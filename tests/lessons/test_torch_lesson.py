"""The lesson in PyTorch, with the drop-in and with the original as oracle; and the notebook, cell by cell."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.checkpoint import checkpoint as original

import keepwise
from keepwise.cli import main
from keepwise.lessons import placements, torch_lesson
from keepwise.lessons.training import BATCH, HIDDEN, NUM_BLOCKS, WIDTH, network, train_step

NOTEBOOK = Path(torch_lesson.__file__).with_name("notebook.py")


def test_plain_torch_keeps_x_and_a_as_the_selective_chapter_says():
    plain = torch_lesson.run()
    selective = train_step(network(), placements.everything(NUM_BLOCKS, "xa")).peak_floats
    assert plain.kept_floats * BATCH == selective * torch_lesson.ROWS
    assert plain.kept_floats == NUM_BLOCKS * torch_lesson.ROWS * (WIDTH + HIDDEN)
    assert plain.products == 6 * NUM_BLOCKS - 1  # nobody asks for the gradient of the very first input


@pytest.mark.parametrize("name", ["original", "ours"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_segments_keep_one_input_and_change_no_bit(k, name):
    checkpoint = original if name == "original" else keepwise.checkpoint
    plain, run = torch_lesson.run(), torch_lesson.run(k, checkpoint)
    segments = NUM_BLOCKS // k
    states = torch.get_rng_state().nbytes // 4 if name == "original" else 0  # ours keeps none where nothing is drawn
    assert run.kept_floats == segments * (torch_lesson.ROWS * WIDTH + states)
    assert run.products - plain.products == segments * (2 * k - 1)  # the last product of a segment is not needed
    assert run.difference(plain) == 0.0


@pytest.mark.parametrize("name", ["original", "ours"])
def test_the_chapter_shows_equal_gradients_only_where_the_random_state_is_saved(name):
    chapter = torch_lesson.chapter(original if name == "original" else keepwise.checkpoint)
    differences = {row[0]: row[-1] for row in chapter.table.rows}
    assert [differences[f"k = {k}"] for k in (1, 2, 4, 8)] == [0.0] * 4
    assert differences["dropout, k = 2"] == differences["dropout, k = 2, torch.utils.checkpoint"] == 0.0
    assert chapter.answer == torch_lesson.ROWS * (WIDTH + HIDDEN)

    wrong = differences["the same, preserve_rng_state=False"]
    assert isinstance(wrong, float)
    assert wrong > 1.0


def test_the_command_prints_it():
    result = CliRunner(env={"COLUMNS": "140"}).invoke(main, ["lesson", "--torch"])
    assert result.exit_code == 0, result.output
    assert "everything kept (plain PyTorch)" in result.output


def cells() -> list[str]:
    return ["\n".join(part.splitlines()[1:]) for part in NOTEBOOK.read_text().split("\n# %%")]


def test_the_notebook_runs_from_top_to_bottom(capsys):
    code = "\n\n".join(cells())
    exec(compile(code, str(NOTEBOOK), "exec"), {"__name__": "notebook"})
    printed = capsys.readouterr().out
    assert "everything kept: 4,608 floats" in printed
    assert "k = 1: 1,088 floats, 8 again, 0.0" in printed
    assert "k = 8, shared storage: 4,608 floats" in printed
    assert "x and a: 2,560 floats, 0 products again" in printed
    assert "difference 0.0" in printed
    assert "random state not saved: difference 0.0" not in printed


def test_the_notebook_asks_before_each_run():
    markdown = [cell for cell in cells() if cell.lstrip().startswith("# ##")]
    assert len(markdown) >= 8
    assert all("Guess:" in cell for cell in markdown)
