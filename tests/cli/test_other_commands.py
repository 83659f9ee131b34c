"""`verify`, `explain`, `bench`, `frontier`, `doctor` and `env`."""

from __future__ import annotations

import json

import pytest
import torch


def test_verify_a_saved_plan_over_steps(keepwise, target, plan_file):
    result = keepwise("verify", target("make"), "--plan", plan_file, "--steps", "3")
    assert result.exit_code == 0, result.stderr
    assert "identical bit for bit over 3 steps" in result.stdout
    found = keepwise.json("verify", target("make"), "--plan", plan_file, "--steps", "3")
    assert found["identical"] is True
    assert found["num_replays_compared"] > 0
    assert "parameters" in found["compared"]
    assert len(set(found["digests"])) == 3  # it trains
    assert all(digest in result.stdout for digest in found["digests"])
    assert found["losses"] == sorted(found["losses"], reverse=True)


def test_verify_without_a_plan_makes_one(keepwise, target):
    found = keepwise.json("verify", target("make"), "--optimizer", "none")
    assert found["identical"] is True
    assert found["num_replays_compared"] > 0


def test_verify_where_the_step_never_repeats(keepwise, target):
    found = keepwise.json("verify", target("never_the_same"), "--budget", "max", code=1)
    assert found["repeatable"] is False
    assert found["identical"] is None


def test_plan_files_that_are_none(keepwise, target, plan_file, tmp_path):
    data = plan_file.read_bytes()
    cut = tmp_path / "cut.json"
    cut.write_bytes(data[: len(data) // 2])
    old = tmp_path / "old.json"
    old.write_text(json.dumps({**json.loads(data), "version": 0}))
    other = tmp_path / "other.json"
    other.write_text('{"a": 1}')
    for path, says in (
        (cut, "truncated"),
        (old, "version 0"),
        (other, "no plan"),
        (tmp_path / "none.json", "cannot be read"),
        (tmp_path, "cannot be read"),
    ):
        for args in (("verify", target("make"), "--plan", path), ("explain", path)):
            assert says in keepwise.fails(*args, code=2)


def test_a_plan_for_another_model(keepwise, target, plan_file):
    line = keepwise.fails("verify", target("deeper"), "--plan", plan_file, code=2)
    assert "blocks.3.up.weight" in line


def test_explain_a_module(keepwise, plan_file):
    result = keepwise("explain", plan_file, "blocks.1")
    assert result.exit_code == 0, result.stderr
    assert "blocks.1.up" in result.stdout
    assert "blocks.2" not in result.stdout
    everything = keepwise.json("explain", plan_file)["decisions"]
    one = keepwise.json("explain", plan_file, "blocks.*.act")["decisions"]
    assert one == [d for d in everything if d["path"].endswith(".act")]
    assert {d["kind"] for d in everything} == {"keep", "recompute"}
    assert "blocks.9" in keepwise.fails("explain", plan_file, "blocks.9", code=2)


def test_bench_measures_all_in_one_run(keepwise, target):
    found = keepwise.json("bench", target("make"), "--against", "full,every2,sac", "--budget", "0.7x", "--pairs", "1")
    rows = {row["name"]: row for row in found["rows"]}
    assert list(rows) == ["none", "full", "every2", "sac", "keepwise 0.7x"]
    assert rows["none"]["ratio"] == 1.0
    assert all(row["identical"] and row["ratio"] > 0 for row in rows.values())
    peaks = {name: row["peak_bytes"] for name, row in rows.items()}
    assert peaks["full"] < peaks["every2"] < peaks["none"]
    assert peaks["keepwise 0.7x"] == pytest.approx(rows["keepwise 0.7x"]["predicted_peak_bytes"], rel=0.02)
    assert len({row["static_bytes"] for row in rows.values()}) == 1
    parameters = sum(
        p.numel() * 4 for p in torch.nn.ModuleList(torch.nn.Linear(*s) for s in [(16, 64), (64, 16)] * 3).parameters()
    )
    assert rows["none"]["static_bytes"] == 2 * parameters + 512 * 16 * 4  # weights, gradients, input


def test_bench_says_what_does_not_run(keepwise, target):
    rows = keepwise.json("bench", target("flat"), "--against", "full", "--budget", "max", "--pairs", "1")["rows"]
    assert "no repeated blocks" in rows[1]["failure"]
    assert rows[2]["identical"] is True
    result = keepwise("bench", target("make"), "--against", "none", "--budget", "100KiB", "--pairs", "1")
    assert result.exit_code == 1
    assert "does not fit" in result.stdout
    assert "sac2" in keepwise.fails("bench", target("make"), "--against", "some", code=2)
    assert "no number of bytes" in keepwise.fails("bench", target("make"), "--budget", "some", code=2)


def test_frontier(keepwise, target, tmp_path):
    page = tmp_path / "frontier.html"
    found = keepwise.json("frontier", target("make"), "--points", "3", "--report", page)
    peaks = [p["peak_bytes"] for p in found["points"]]
    seconds = [p["added_seconds"] for p in found["points"]]
    assert peaks == sorted(peaks)
    assert seconds == sorted(seconds, reverse=True)
    assert all(p["peak_bytes"] <= p["budget_bytes"] for p in found["points"])
    assert found["knee"] in found["points"]
    assert "<svg" in page.read_text()
    assert "--force" in keepwise.fails("frontier", target("make"), "--report", page, code=2)
    assert "At the knee" in keepwise("frontier", target("make"), "--points", "2").stdout
    several = keepwise.json("frontier", target("make"), "--points", "2", "--in-flight", "3")
    assert several["in_flight"] == 3
    assert several["plain_peak_bytes"] > found["plain_peak_bytes"]


def test_doctor(keepwise, target):
    found = keepwise.json("doctor", target("make"))
    questions = {f["question"] for f in found["findings"]}
    assert len(questions) == 3
    assert not any(f["serious"] for f in found["findings"])
    sick = keepwise("doctor", target("never_the_same"), "--budget", "max")
    assert sick.exit_code == 1
    assert "not repeatable" in sick.stdout


def test_env(keepwise):
    found = keepwise.json("env")
    assert found["packages"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    result = keepwise("env")
    assert result.exit_code == 0
    assert f"torch uses {torch.get_num_threads()} threads" in result.stdout


def test_env_writes_a_profile_that_fit_plans_with(keepwise, plan_file, tmp_path):
    profile = tmp_path / "device.json"
    result = keepwise("env", "--profile", profile)
    assert result.exit_code == 0, result.stderr
    assert "GFLOP/s" in result.stdout
    assert json.loads(profile.read_bytes())["kind"] == "keepwise.device"
    found = keepwise.json("fit", plan_file, "--budget", "min", "--on", profile)
    assert found["peak_bytes"] < found["plain_peak_bytes"]
    assert found["proof"] is None
    assert found["measured"] is None
    assert "exists" in keepwise.fails("env", "--profile", profile, code=2)
