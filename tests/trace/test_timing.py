"""Prices of ops, in memory and on disk. The clock is a list of numbers here."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
import torch

from keepwise.trace import timing
from keepwise.trace.admission import Admission
from keepwise.trace.record import record
from keepwise.trace.timing import MAX_PRICES, Timings, cache_folder, conditions

CPU = torch.device("cpu")


def never() -> float:
    raise AssertionError("it was run again")


def test_the_median_of_runs_until_20_ms_were_spent() -> None:
    timings = Timings(CPU)
    runs = iter([0.004, 0.001, 0.002, 0.003, 0.005, 0.006])
    # Of 9, 4, 1, 2, 3 and 5 ms: after the sixth run 24 ms are over.
    assert timings.price("a", 0.009, lambda: next(runs)) == 0.0035
    assert timings.price("b", 0.5, never) == 0.5


def test_a_known_price_is_not_measured_again(tmp_path: Path) -> None:
    first = Timings(CPU, tmp_path)
    assert first.price("a", 0.03, never) == 0.03
    first.save()
    second = Timings(CPU, tmp_path)
    assert second.price("a", 0.09, never) == 0.03  # 0.09: another job kept the cores busy
    assert second.num_known == 1


def test_a_price_from_a_busy_machine_is_put_right(tmp_path: Path) -> None:
    busy = Timings(CPU, tmp_path)
    busy.price("a", 0.5, never)
    busy.save()
    quiet = Timings(CPU, tmp_path)
    assert quiet.price("a", 0.03, never) == 0.03
    quiet.save()
    assert Timings(CPU, tmp_path).price("a", 0.03, never) == 0.03


def test_two_processes_write_one_file_and_the_smaller_price_counts(tmp_path: Path) -> None:
    one, two = Timings(CPU, tmp_path), Timings(CPU, tmp_path)
    one.price("a", 0.04, never)
    two.price("a", 0.03, never)
    one.price("b", 0.05, never)
    two.save()
    one.save()
    again = Timings(CPU, tmp_path)
    assert again.price("a", 0.03, never) == 0.03
    assert again.price("b", 0.05, never) == 0.05
    assert [p.suffix for p in tmp_path.iterdir()] == [".json"]  # nothing half-written is left


def test_other_conditions_have_prices_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Timings(CPU, tmp_path)
    first.price("a", 0.04, never)
    first.save()
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "65536")
    assert conditions(CPU) != first.conditions
    assert Timings(CPU, tmp_path).price("a", 0.08, never) == 0.08


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b'{"kind": "other"}', b'{"seconds": 1}'])
def test_a_damaged_file_is_no_error(tmp_path: Path, content: bytes) -> None:
    first = Timings(CPU, tmp_path)
    assert first.path is not None
    first.path.parent.mkdir(exist_ok=True)
    first.path.write_bytes(content)
    assert first.price("a", 0.04, never) == 0.04
    first.save()
    assert json.loads(first.path.read_bytes())["seconds"]


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timings = Timings(CPU, tmp_path / "file" / "below")
    assert timings.price("a", 0.04, never) == 0.04
    timings.save()
    assert os.listdir(tmp_path) == ["file"]


def test_the_file_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "MAX_PRICES", 5)
    assert MAX_PRICES > 5
    timings = Timings(CPU, tmp_path)
    for i in range(9):
        timings.price(f"{i}", 0.02 + i, never)
    timings.save()
    assert timings.path is not None
    kept = json.loads(timings.path.read_bytes())["seconds"]
    assert sorted(kept.values()) == [0.02 + i for i in range(4, 9)]


def test_threads_may_ask_at_once(tmp_path: Path) -> None:
    timings = Timings(CPU, tmp_path)
    threads = [threading.Thread(target=timings.price, args=(f"{i % 5}", 0.02, never)) for i in range(40)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert timings.num_known == 35


def test_where_the_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWISE_CACHE_DIR", "")
    assert cache_folder() is None
    monkeypatch.setenv("KEEPWISE_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("KEEPWISE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache_folder() == tmp_path / "x" / "keepwise"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "keepwise"


def test_a_second_recording_knows_all_prices(tmp_path: Path) -> None:
    x = torch.randn(64, 64, requires_grad=True)

    def step() -> None:
        ((x @ x).tanh() * 2).sum().backward()

    def seconds(timings: Timings) -> list[float]:
        found = record(step, model=None, inputs=x, admit=Admission(timings), spill=False).step
        timings.save()
        return [op.seconds for op in found.ops if op.replayable and op.phase == "forward"]

    first, second = Timings(CPU, tmp_path), Timings(CPU, tmp_path)
    priced = seconds(first)
    assert all(s > 0 for s in priced)
    assert first.num_known == 0
    again = seconds(second)
    assert second.num_known > 0
    # A price changes only where the op was much faster this time.
    assert all(b == a or b < a for a, b in zip(priced, again, strict=True))
