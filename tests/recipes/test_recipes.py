"""Each recipe trains as the same program without Keepwise does: losses and final weights, bit for bit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from .page import plain, program, titles
from .processes import run_both

OWN_LOOP = "A loop of your own, with gradient accumulation"
TRAINER = "Hugging Face Trainer"
LORA = "LoRA with PEFT"
LIGHTNING = "Lightning"
DDP = "Several processes with DDP"


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def run(code: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(code, "recipes.md", "exec"), namespace)
    return namespace


def both(code: str) -> Any:
    """Run the program and its plain form, compare them, and return the plan."""
    without = run(plain(code))
    assert not any("keepwise" in name.lower() or name == "plan" for name in without)
    got = run(code)
    assert len(got["losses"]) >= 4
    assert len(set(got["losses"])) > 1, "it trains"
    assert got["losses"] == without["losses"]
    assert same(got["model"].state_dict(), without["model"].state_dict())
    plan = got["plan"] if "plan" in got else got["keepwise_callback"].plan
    assert plan.peak_bytes <= plan.budget_bytes < plan.plain_peak_bytes
    assert plan.dropped_bytes > 0
    assert plan.stats.num_replays > 0
    return plan


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KEEPWISE", raising=False)


def test_every_recipe_is_tested():
    assert titles() == [OWN_LOOP, TRAINER, LORA, LIGHTNING, DDP]


def test_own_loop():
    plan = both(program(OWN_LOOP))
    assert plan.stats.num_deviations == 0


def test_trainer():
    pytest.importorskip("transformers")
    plan = both(program(TRAINER))
    assert 1 <= plan.runner.chooser.num_plans <= 6


def test_lora():
    pytest.importorskip("peft")
    plan = both(program(LORA))
    assert plan.stats.num_deviations == 0
    assert plan.static_bytes < plan.plain_peak_bytes / 2, "activations are the largest part"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Lightning's use of torch
def test_lightning():
    pytest.importorskip("lightning")
    plan = both(program(LIGHTNING))
    assert any(d.path.startswith("module.network.") for d in plan.decisions)


def test_ddp(tmp_path):
    code = program(DDP)
    wrap = "    model = DistributedDataParallel(network)\n"
    assert code.count(wrap) == 1
    before = code.replace(wrap, "").replace("    losses = []\n", wrap + "    losses = []\n")
    programs = {
        "plain": plain(code),
        "inside": code,
        "wrapped": re.sub(r"keepwise\.fit\(\s*network,", "keepwise.fit(model,", code),
        "before": before.replace("torch.optim.SGD(model.", "torch.optim.SGD(network."),
    }
    assert len(set(programs.values())) == 4
    end = "dist.destroy_process_group()"
    assert all(text.count(end) == 1 for text in programs.values())
    programs = {
        name: f"from tests.groups import leave_group\n{text.replace(end, 'leave_group()')}"
        for name, text in programs.items()
    }
    results, said = run_both(programs, tmp_path)
    for rank, text in enumerate(said):
        assert text.count(f"rank {rank}: keepwise: ") == 3, text
    expected = results["plain"]
    assert same(expected[0][1], expected[1][1]), "the processes stay together"
    assert expected[0][0] != expected[1][0], "on batches of their own"
    for name, got in results.items():
        for rank in range(2):
            assert got[rank][0] == expected[rank][0], (name, rank)
            assert same(got[rank][1], expected[rank][1]), (name, rank)
