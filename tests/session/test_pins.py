"""`pin=`: decisions of the user's, whatever the planner would do."""

from __future__ import annotations

import copy

import pytest
import torch

import keepwise
from keepwise import InfeasibleBudget
from keepwise._errors import UsageError
from keepwise.simulate import simulate
from tests.session.models import loss, run, same, stack


def kinds(plan: keepwise.Plan, path: str) -> set[str]:
    return {d.kind for d in plan.decisions if d.path == path or d.path.startswith(path + ".")}


@pytest.mark.parametrize("planner", ["auto", "none", "full", "recursive"])
def test_recompute_is_done_and_changes_no_bit(planner: str) -> None:
    model, x = stack(dropout=0.2)
    plain = run(copy.deepcopy(model), x)
    plan = keepwise.fit(model, x, loss=loss, budget="max", planner=planner, pin={"blocks.1": "recompute"})
    assert kinds(plan, "blocks.1") == {"recompute"}
    if planner in ("auto", "none"):
        assert kinds(plan, "blocks.3") == {"keep"}
    assert plan.peak_bytes < plan.plain_peak_bytes
    for _ in range(2):
        assert same(run(model, x), plain)
    assert plan.stats.num_replays > 0


def test_both_pins_under_a_budget() -> None:
    model, x = stack()
    pin = {"blocks.0": "keep", "blocks.4": "recompute"}
    plan = keepwise.fit(model, x, loss=loss, budget="0.7x", pin=pin, verify=False)
    assert kinds(plan, "blocks.0") == {"keep"}
    assert kinds(plan, "blocks.4") == {"recompute"}
    assert plan.budget_bytes is not None
    assert plan.peak_bytes <= plan.budget_bytes
    assert plan.peak_bytes == simulate(plan.step, plan.schedule).peak_bytes
    assert plan.bound_seconds <= plan.added_seconds


def test_all_of_a_model_and_the_smallest_peak() -> None:
    model, x = stack()
    free = keepwise.fit(model, x, loss=loss, budget="min", verify=False)
    plan = keepwise.fit(model, x, loss=loss, budget="min", pin={"blocks.*": "recompute"}, verify=False)
    assert [d.saved_by for d in plan.decisions if d.kind == "keep"] == [
        "PowBackward0"
    ]  # the loss's, outside of the model
    assert plan.peak_bytes <= free.peak_bytes * 1.1


def test_a_budget_that_the_pins_leave_no_room_in() -> None:
    model, x = stack()
    with pytest.raises(InfeasibleBudget, match="the smallest peak") as caught:
        keepwise.fit(model, x, loss=loss, budget="10KiB", pin={"blocks.1": "recompute"})
    assert caught.value.floor_bytes > 0
    assert type(model).__name__ == "Stack"


class Counting(torch.nn.Module):
    """Scales by the values of an op that never gives the same twice."""

    num_calls = 0

    def forward(self, x):
        return x * drifting(x.detach())


@torch.library.custom_op("keepwise_tests::drifting", mutates_args=())
def drifting(x: torch.Tensor) -> torch.Tensor:
    Counting.num_calls += 1
    return torch.full_like(x, float(Counting.num_calls))


@pytest.mark.parametrize(
    ("pin", "says"),
    [
        ({"blocks.1": "drop"}, "accepted: keep, recompute"),
        ({"blocks.1": "offload"}, "not there yet"),
        ({"nowhere": "recompute"}, "matches no module"),
        ("blocks.1", "must be a mapping"),
    ],
)
def test_pins_that_are_none(pin: object, says: str) -> None:
    model, x = stack()
    with pytest.raises(UsageError, match=says):
        keepwise.fit(model, x, loss=loss, budget="max", pin=pin)  # type: ignore[arg-type]


def test_what_cannot_be_made_again_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Counting(), torch.nn.Linear(8, 8))
    x = torch.randn(4, 8)
    with pytest.raises(UsageError, match=r"cannot be made again\. The largest: 128 bytes") as caught:
        keepwise.fit(model, x, loss=lambda y: y.square().mean(), budget="max", pin={"1": "recompute"})
    assert "Pin a smaller part" in str(caught.value)
