"""`keepwise fit`: what it prints, writes, and how it ends."""

from __future__ import annotations

import json

import pytest

from keepwise import targets


def test_says_what_was_planned_proved_and_measured(keepwise, target):
    result = keepwise("fit", target("make"), "--budget", "0.7x")
    assert result.exit_code == 0, result.stderr
    out = result.stdout
    assert "\x1b" not in out
    assert "keepwise: " in out
    assert "blocks.0-2" in out or "blocks.0" in out
    for part in (
        "What happens to the activations",
        "Memory at the peak",
        "Memory over the step",
        "parameters",
        "budget",
    ):
        assert part in out
    assert "Proof: identical bit for bit" in out
    assert "Measured: peak" in out
    assert "keepwise.fit(model, batch, budget='0.7x', loss=loss)" in out


def test_json_is_one_object_whatever_the_model_prints(keepwise, target):
    found = keepwise.json("fit", target("noisy"), "--budget", "0.7x", "--pairs", "1")
    assert found["peak_bytes"] <= found["budget_bytes"] == int(0.7 * found["plain_peak_bytes"])
    assert found["proof"]["identical"] is True
    assert found["measured"]["plan_peak_bytes"] == pytest.approx(found["peak_bytes"], rel=0.02)
    assert found["measured"]["plain_peak_bytes"] == pytest.approx(found["plain_peak_bytes"], rel=0.02)
    groups = found["groups"]
    for kind in ("keep", "recompute"):
        assert sum(g["nbytes"][kind] for g in groups) == found["nbytes"][kind]
    assert sum(g["replay_seconds"] for g in groups) == pytest.approx(found["replay_seconds"])
    for column, peak in (("plain_bytes", "plain_peak_bytes"), ("plan_bytes", "peak_bytes")):
        assert sum(c[column] for c in found["categories"]) == found[peak]


def test_without_proof_and_measurement(keepwise, target):
    found = keepwise.json("fit", target("make"), "--budget", "0.8x", "--no-verify", "--no-measure")
    assert found["proof"] is None
    assert found["measured"] is None


def test_writes_files_once_unless_forced(keepwise, target, tmp_path):
    plan, page, trace = tmp_path / "plan.json", tmp_path / "report.html", tmp_path / "trace.json"
    args = ["fit", target("make"), "--budget", "0.7x", "--no-verify", "--no-measure"]
    result = keepwise(*args, "--save", plan, "--report", page, "--trace", trace)
    assert result.exit_code == 0, result.stderr
    assert json.loads(plan.read_bytes())["kind"] == "keepwise.plan"
    assert page.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_bytes())["traceEvents"]
    for option, path in (("--save", plan), ("--report", page), ("--trace", trace)):
        path.write_text("mine")
        assert "--force" in keepwise.fails(*args, option, path, code=2)
        assert path.read_text() == "mine"
    assert keepwise(*args, "--save", plan, "--force").exit_code == 0
    assert plan.read_text() != "mine"
    assert "no folder" in keepwise.fails(*args, "--save", tmp_path / "none" / "plan.json", code=2)


@pytest.mark.parametrize("budget", ["12 parsecs", "0", "0x", "1e999"])
def test_a_budget_that_is_none(keepwise, target, budget):
    line = keepwise.fails("fit", target("make"), "--budget", budget, code=2)
    assert "0.6x" in line  # what would be one
    assert "no number of bytes" in line


def test_a_budget_below_the_floor_names_the_floor_and_that_one_fits(keepwise, target):
    line = keepwise.fails("fit", target("make"), "--budget", "100 KiB", code=1)
    assert "no plan fits" in line
    assert "or --budget min, or --on-infeasible floor to run the smallest plan" in line
    assert "budget=" not in line
    error = keepwise.json("fit", target("make"), "--budget", "100 KiB", code=1)["error"]
    assert error["type"] == "InfeasibleBudget"
    assert error["binding"]
    assert f"Try --budget {error['floor_bytes']} or" in error["message"]
    found = keepwise.json("fit", target("make"), "--budget", error["floor_bytes"], "--no-measure")
    assert found["peak_bytes"] <= error["floor_bytes"]


def test_the_smallest_plan_where_nothing_fits_is_still_a_no(keepwise, target):
    found = keepwise.json(
        "fit", target("make"), "--budget", "100 KiB", "--on-infeasible", "floor", "--no-measure", code=1
    )
    assert found["status"] == "INFEASIBLE"
    assert found["peak_bytes"] > found["budget_bytes"]
    assert found["proof"]["identical"] is True


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_scalar", "not a scalar; let the target return one as its fourth element"),
        ("frozen", "frozen"),
        ("no_model", "torch.nn.Module"),
        ("nothing", "no function 'nothing'"),
        ("on_the_meta_device", "meta device"),
    ],
)
def test_a_target_that_is_none(keepwise, target, name, says):
    assert says in keepwise.fails("fit", target(name), code=2)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("nowhere.py:make", "no file nowhere.py"),
        ("no.such.module:make", "no module"),
        ("gpt2-tyni", "gpt2-tiny"),
        ("nowhere.py", "names no function"),
    ],
)
def test_a_spec_that_names_nothing(keepwise, spec, says):
    assert says in keepwise.fails("fit", spec, code=2)


def test_no_target_at_all(keepwise):
    assert "--list" in keepwise.fails("fit", code=2)


def test_a_target_that_raises_when_built(keepwise, target):
    text = keepwise.fails("fit", target("raises"), code=3)
    assert "ValueError: no weights at that place" in text
    assert "models.py:" in text
    assert "in raises" in text


def test_a_target_that_raises_in_forward(keepwise, target):
    text = keepwise.fails("fit", target("raises_in_forward"), code=3)
    assert "the target failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied" in text
    assert "in forward: return super().forward(x) @ torch.zeros(3, 3)" in text
    error = keepwise.json("fit", target("raises_in_forward"), code=3)["error"]
    assert error["type"] == "RuntimeError"
    assert "models.py:" in error["place"]
    shown = keepwise("fit", target("raises_in_forward"), "--traceback")
    assert "Traceback (most recent call last)" in shown.stderr


def test_a_fault_of_ours_is_not_blamed_on_the_target(keepwise, target, monkeypatch):
    from keepwise.session import planning

    space: dict = {}
    # As if a line of that file had raised.
    exec(compile("def simulate(step, schedule=None):\n    assert False, 'broken'\n", planning.__file__, "exec"), space)
    monkeypatch.setattr(planning, "simulate", space["simulate"])
    text = keepwise.fails("fit", target("make"), "--budget", "0.7x", code=3)
    assert "a fault of Keepwise" in text
    assert "AssertionError: broken" in text


def test_an_interrupt_leaves_no_traceback(keepwise, target):
    assert "interrupted" in keepwise.fails("fit", target("interrupted"), code=130)


def test_other_ranks_are_silent_and_write_nothing(keepwise, target, tmp_path):
    path = tmp_path / "plan.json"
    args = ["fit", target("make"), "--budget", "0.8x", "--no-verify", "--no-measure", "--save", path]
    result = keepwise(*args, RANK="1")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    assert not path.exists()
    assert keepwise(*args, "--json", RANK="1").stdout == ""
    assert "error (rank 1)" in keepwise.fails("fit", target("raises"), code=3, RANK="1")


def test_list_names_every_target(keepwise):
    result = keepwise("fit", "--list")
    assert result.exit_code == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(targets.names())
    assert [t["name"] for t in keepwise.json("fit", "--list")["targets"]] == list(targets.names())


def test_pins(keepwise, target):
    found = keepwise.json(
        "fit", target("make"), "--budget", "min", "--pin", "blocks.1=keep", "--no-verify", "--no-measure"
    )
    pinned = next(g for g in found["groups"] if g["name"] == "blocks.1")
    assert pinned["nbytes"]["recompute"] == 0
    assert any(g["nbytes"]["recompute"] for g in found["groups"])
    found = keepwise.json(
        "fit", target("make"), "--budget", "max", "--pin", "blocks.1=recompute", "--no-verify", "--no-measure"
    )
    pinned = next(g for g in found["groups"] if g["name"] == "blocks.1")
    assert pinned["nbytes"]["keep"] == 0 < pinned["nbytes"]["recompute"]
    assert "not there yet" in keepwise.fails("fit", target("make"), "--pin", "blocks.1=offload", code=2)
    assert "PATTERN=keep" in keepwise.fails("fit", target("make"), "--pin", "blocks", code=2)


def test_unknown_optimizer_and_device(keepwise, target):
    assert "AdamW" in keepwise.fails("fit", target("make"), "--optimizer", "Adamant", code=2)
    assert "no device 'qpu'" in keepwise.fails("fit", target("make"), "--device", "qpu", code=2)


def test_optimizer_state_counts(keepwise, target):
    args = ["fit", target("make"), "--budget", "max", "--no-verify", "--no-measure"]
    plain, adam = keepwise.json(*args), keepwise.json(*args, "--optimizer", "adamw")
    assert adam["static_bytes"] > plain["static_bytes"]


def test_switched_off_by_the_environment(keepwise, target):
    result = keepwise("fit", target("make"), "--budget", "0.7x", KEEPWISE="0")
    assert result.exit_code == 0, result.stderr
    assert "KEEPWISE=0" in result.stdout


def test_a_plan_file_is_planned_again_without_its_model(keepwise, plan_file, tmp_path):
    again = tmp_path / "again.json"
    result = keepwise("fit", plan_file, "--budget", "min", "--on", "h100", "--save", again)
    assert result.exit_code == 0, result.stderr
    assert "H100" in result.stdout
    assert "Plan.load" in result.stdout
    found = keepwise.json("fit", again, "--budget", "max")
    assert found["status"] == "FITS_UNCHANGED"
    assert found["peak_bytes"] == found["plain_peak_bytes"]
    assert "smallest peak" in keepwise.fails("fit", plan_file, "--budget", "1KiB", code=1)


def test_another_machine_needs_a_plan_file(keepwise, target, tmp_path):
    assert "plan file as TARGET" in keepwise.fails("fit", target("make"), "--on", "h100", code=2)
    assert "cannot be read" in keepwise.fails("fit", tmp_path / "none.json", "--on", "h100", code=2)
