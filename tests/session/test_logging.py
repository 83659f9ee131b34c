"""What `fit` says: the plan, at INFO, from the first process."""

from __future__ import annotations

import logging

import pytest

import keepwise
from tests.session.models import loss, stack


@pytest.mark.parametrize("rank", ["0", "1", ""])
def test_the_plan_is_logged_by_the_first_process(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, rank: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    model, x = stack()
    with caplog.at_level(logging.INFO, logger="keepwise"):
        plan = keepwise.fit(model, x, loss=loss, budget="0.7x", verify=False)
    said = [r.getMessage() for r in caplog.records if r.name == "keepwise"]
    assert said == ([] if rank == "1" else [str(plan)])
    assert str(plan).splitlines()[0] == plan.summary()


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    model, x = stack()
    keepwise.fit(model, x, loss=loss, budget="0.7x")
    out, err = capfd.readouterr()
    assert out == ""
    assert [line for line in err.splitlines() if "CPUAllocator" not in line] == []  # a warning of torch's profiler


def test_a_plan_that_plans_nothing_says_so_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWISE", "0")
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget="0.7x")
    assert repr(plan) == "keepwise: nothing is planned: KEEPWISE=0 is set: the model runs as it is"
    assert str(plan).startswith(repr(plan))
