"""Every command in the README runs; targets are swapped for their tiny size, budgets for ones that a tiny model can meet."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import keepwise
from keepwise.cli import main

README = Path(__file__).parents[2] / "README.md"
LINES = [line.split("#")[0].strip() for line in README.read_text().splitlines() if line.startswith("keepwise ")]
TARGET = re.search(r"^```python\n(# train\.py\n.*?)^```$", README.read_text(), flags=re.MULTILINE | re.DOTALL)[1]  # type: ignore[index]
CONFIG = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
}


def test_the_readme_has_commands() -> None:
    assert len(LINES) >= 6


@pytest.mark.parametrize("line", LINES)
def test_command(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "train.py").write_text(TARGET)
    if "plan.json" in line:  # the plan that the README saves in Python
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        x = torch.randn(512, 64)
        keepwise.fit(model, x, loss=lambda y: y.square().mean(), budget="0.9x").save("plan.json")
    words = line.split()[1:]
    words = ["gpt2-tiny" if w == "gpt2" else "0.9x" if w == "0.6x" else w for w in words]
    if words[0] == "fit" and "--list" not in words:
        words += ["--pairs", "1"]
    result = CliRunner().invoke(main, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert result.output.strip()
    if "--report" in words:
        assert (tmp_path / words[words.index("--report") + 1]).stat().st_size > 1000
