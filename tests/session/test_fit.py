"""`fit` end to end on small models: the oracle is the plain step, bit for bit."""

from __future__ import annotations

import contextlib
import copy
import random
import tempfile
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import keepwise
from keepwise import InfeasibleBudget, PlanMismatch, Status
from keepwise._errors import KeepwiseError, UsageError
from keepwise.measure import allocator_peak
from tests.session.models import Stack, loss, run, same, stack

PLANNERS = [
    "none",
    "full",
    "every:2",
    "sqrt",
    "recursive",
    "selective",
    "boundaries:blocks.2,blocks.4",
    "recompute_everything",
]


@pytest.mark.parametrize("planner", PLANNERS)
def test_named_planners_change_no_bit(planner: str) -> None:
    model, x = stack(dropout=0.2)
    plain = run(copy.deepcopy(model), x)
    plan = keepwise.fit(model, x, loss=loss, planner=planner, budget="max")
    for _ in range(2):
        assert same(run(model, x), plain)
    assert (plan.dropped_bytes > 0) == (planner != "none")
    assert (plan.stats.num_replays > 0) == (planner != "none")


@pytest.mark.parametrize("budget", ["0.9x", "0.7x", "0.5x", "min"])
def test_the_measured_peak_is_the_predicted_one_and_fits(budget: str) -> None:
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget=budget)

    def step() -> None:
        loss(model(x)).backward()

    step()  # gradients exist from now on, as they do in the step that was planned
    measured = plan.static_bytes + allocator_peak(step)
    assert measured == pytest.approx(plan.peak_bytes, rel=0.01)
    if plan.budget_bytes is not None:
        assert measured <= plan.budget_bytes * 1.01
    with plan.paused():
        assert plan.static_bytes + allocator_peak(step) == pytest.approx(plan.plain_peak_bytes, rel=0.01)


def test_less_budget_means_less_memory_and_not_less_time() -> None:
    model, x = stack()
    peaks, times = [], []
    for budget in ("1x", "0.8x", "0.6x", "min"):
        plan = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget=budget, verify=False)
        peaks.append(plan.peak_bytes)
        times.append(plan.added_seconds / plan.step_seconds)
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] < peaks[0]
    assert times[0] == 0
    assert all(t > 0 for t in times[1:])


def test_fit_leaves_everything_as_it_was() -> None:
    model, x = stack(dropout=0.3)
    x.requires_grad_()
    model.register_buffer("counter", torch.zeros(()))
    loss(model(x)).backward()
    grads = {n: p.grad for n, p in model.named_parameters()}
    before = [
        t.detach().clone()
        for t in (*model.parameters(), *model.buffers(), *(g for g in grads.values() if g is not None))
    ]
    assert x.grad is not None
    x_grad, x_bytes, version = x.grad, x.detach().clone(), x._version
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    keepwise.fit(model, x, loss=loss, budget="0.7x")
    assert all(p.grad is grads[n] for n, p in model.named_parameters())
    after = [*model.parameters(), *model.buffers(), *(g for g in grads.values() if g is not None)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert x.grad is x_grad
    assert torch.equal(x, x_bytes)
    assert x._version == version
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()
    assert states[2] == np.random.get_state()[1].tolist()


def test_the_optimizer_counts_and_is_left_alone() -> None:
    model, x = stack()
    optimizer = torch.optim.AdamW(model.parameters())
    without = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget="max", verify=False)
    weights = [p.detach().clone() for p in model.parameters()]
    plan = keepwise.fit(model, x, loss=loss, budget="0.8x", optimizer=optimizer)
    parameters = sum(p.nbytes for p in model.parameters())
    assert plan.static_bytes - without.static_bytes == pytest.approx(2 * parameters, rel=0.02)
    assert not optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    by_class = keepwise.fit(
        copy.deepcopy(model), x, loss=loss, budget="0.8x", optimizer=torch.optim.AdamW, verify=False
    )
    assert by_class.static_bytes == plan.static_bytes


def test_fresh_gradients_are_not_charged_in_forward() -> None:
    model, x = stack()
    held = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget="max", verify=False, grads="held")
    fresh = keepwise.fit(model, x, loss=loss, budget="max", verify=False, grads="fresh")
    assert fresh.static_bytes < held.static_bytes
    assert fresh.plain_peak_bytes <= held.plain_peak_bytes


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"budget": "lots"}, "no number of bytes"),
        ({"budget": 0}, "above 0"),
        ({"grads": "sometimes"}, "grads"),
        ({"on_infeasible": "shrug"}, "on_infeasible"),
        ({"in_flight": 0}, "in_flight"),
        ({"planner": "nonsense"}, "nonsense"),
        ({"pin": {"blocks.*": "burn"}}, "burn"),
        ({"pin": {"nowhere": "keep"}}, "nowhere"),
        ({"loss": lambda out: out}, "not a scalar"),
        ({"loss": lambda out: out.detach().sum()}, "require grad"),
        ({"loss": lambda out: 3.0}, "not a tensor"),
        ({"loss": None}, "scalar"),
        ({"loss": lambda out: out.sum().long()}, "int64"),
        ({"loss": lambda out: out.sum() * 1j}, "complex64"),
        ({"kwargs": [1]}, "kwargs must map names to arguments, got list"),
        ({"optimizer": 3}, "optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS.step needs a closure"),
    ],
)
def test_bad_arguments_give_one_line_and_change_nothing(arguments: dict[str, object], match: str) -> None:
    model, x = stack()
    before = type(model), dict(model.__dict__)
    plain = run(copy.deepcopy(model), x)
    with pytest.raises(KeepwiseError, match=match) as caught:
        keepwise.fit(model, x, **{"loss": loss, "budget": "0.7x", **arguments})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    assert type(model) is before[0]
    assert model.__dict__.keys() == before[1].keys()
    assert all(p.grad is None for p in model.parameters())
    assert same(run(model, x), plain)


def test_a_frozen_model_whose_input_is_trained_is_planned() -> None:
    model, x = stack(depth=4)
    head = nn.Sequential(model, nn.Flatten(0), nn.Linear(x.numel(), 1)).requires_grad_(False)
    x.requires_grad_(True)
    plan = keepwise.fit(head, x, budget="0.8x")
    assert plan.proof is not None
    assert plan.proof.identical
    grads = []
    for context in (plan.paused(), contextlib.nullcontext()):
        with context:
            grads += torch.autograd.grad(head(x), x)
    assert plan.stats.num_dropped
    assert torch.equal(*grads)


def test_all_frozen_and_wrong_kinds() -> None:
    model, x = stack()
    model.requires_grad_(False)
    with pytest.raises(UsageError, match="frozen"):
        keepwise.fit(model, x, loss=loss, budget="max")
    with pytest.raises(UsageError, match=r"nn\.Module"):
        keepwise.fit(lambda v: v, x, budget="max")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="args must be"):
        keepwise.fit(Stack(1), 3, budget="max")
    with pytest.raises(UsageError, match="meta"):
        keepwise.fit(Stack(1).to("meta"), x, budget="max")
    with pytest.raises(UsageError, match="model on cpu"):
        keepwise.fit(Stack(1), torch.empty(2, 2, 16, device="meta"), loss=loss, budget="max")


def test_a_budget_below_the_floor() -> None:
    model, x = stack()
    with pytest.raises(InfeasibleBudget) as caught:
        keepwise.fit(model, x, loss=loss, budget="20KiB")
    error = caught.value
    assert type(model) is Stack
    assert error.floor_bytes > 20 * 1024
    assert str(error.floor_bytes) in str(error)
    assert "backward" in error.binding or "forward" in error.binding
    assert "on_infeasible='floor'" in str(error)
    plan = keepwise.fit(model, x, loss=loss, budget="20KiB", on_infeasible="floor")
    assert plan.status is Status.INFEASIBLE
    assert plan.peak_bytes == error.floor_bytes
    plan.remove()
    assert keepwise.fit(model, x, loss=loss, budget=error.floor_bytes).peak_bytes <= error.floor_bytes


def test_what_the_model_raises_comes_through_and_nothing_is_applied() -> None:
    class Broken(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            super().forward(x)
            raise KeyError("mine")

    torch.manual_seed(0)
    model = Broken(2)
    state = torch.get_rng_state()
    with pytest.raises(KeyError, match="mine"):
        keepwise.fit(model, torch.randn(2, 2, 16), loss=loss, budget="max")
    assert type(model) is Broken
    torch.set_rng_state(state)


def test_save_load_apply(tmp_path: Path) -> None:
    model, x = stack(dropout=0.1)
    plain = run(copy.deepcopy(model), x)
    plan = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget="0.6x")
    path = tmp_path / "plan.json"
    plan.save(path)
    loaded = keepwise.Plan.load(path)
    assert str(loaded) == str(plan)
    assert loaded.decisions == plan.decisions
    loaded.apply(model)
    assert same(run(model, x), plain)
    assert loaded.stats.num_dropped == sum(
        1
        for s in plan.step.saves
        if plan.step.values[s.value].storage in {d.storage for d in plan.decisions if d.kind == "recompute"}
    )
    with pytest.raises(KeepwiseError, match="already"):
        plan.apply(model)
    loaded.remove()
    assert type(model) is Stack
    with pytest.raises(FileNotFoundError):
        keepwise.Plan.load(tmp_path / "absent.json")
    with pytest.raises(UsageError, match="force=True"):
        plan.save(path, force=False)


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda b: b[: len(b) // 2], "truncated"),
        (lambda b: b'{"kind": "other"}', "no plan"),
        (lambda b: b.replace(b'"version":1', b'"version":99', 1), "version 99"),
        (lambda b: b.replace(b'"nbytes":', b'"bytes":', 1), "damaged plan: .*nbytes"),
        (lambda b: b.replace(b'"held":[', b'"held":[99999,', 1), "damaged plan: .*99999"),
        (lambda b: b.replace(b'"storage":0,', b'"storage":99999,', 1), "damaged plan: .*99999"),
        (lambda b: b.replace(b'"aten.tanh.default"', b'"elsewhere.tanh.default"'), "elsewhere.tanh.default.* Import"),
        (lambda b: b.replace(b'"aten.tanh.default"', b'"__class__.mro"'), "no op '__class__.mro'"),
    ],
)
def test_a_damaged_plan_says_what_is_wrong(damage: Callable[[bytes], bytes], match: str, tmp_path: Path) -> None:
    model, x = stack(depth=2)
    path = tmp_path / "plan.json"
    keepwise.fit(model, x, loss=loss, budget="0.8x", verify=False).save(path)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(PlanMismatch, match=match) as caught:
        keepwise.Plan.load(path)
    assert "\n" not in str(caught.value)


def test_the_summary_counts_what_the_decisions_list() -> None:
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget="0.6x", verify=False)
    kinds = [d.kind for d in plan.decisions]
    assert f"{kinds.count('recompute')} of {len(kinds)} tensors dropped" in plan.summary()
    assert f" in {kinds.count('recompute')} tensors" in str(plan)
    assert len(kinds) < len(plan.step.saves)  # `tanh(h) * sigmoid(h)` saves each factor twice
    assert "(budget 20.0 GiB)" in keepwise.fit(model, x, loss=loss, budget="20GiB", verify=False).summary()


def test_a_plan_for_another_model_names_the_first_difference() -> None:
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget="0.7x", verify=False)
    with pytest.raises(PlanMismatch, match=r"blocks\.0\.norm\.weight \[8\]|blocks\.0\.norm\.weight"):
        plan.apply(Stack(6, width=8))
    with pytest.raises(PlanMismatch, match=r"blocks\.6"):
        plan.apply(Stack(7))
    frozen = Stack(6)
    frozen.blocks[0].up.weight.requires_grad_(False)
    with pytest.raises(PlanMismatch, match="frozen"):
        plan.apply(frozen)


def test_keepwise_0_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWISE", "0")
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget="0.5x")
    assert plan.status is Status.INERT
    assert type(model) is Stack
    with plan:
        run(model, x)
    assert plan.stats.num_saved == 0


def test_fit_again_replaces_the_plan_and_a_failed_fit_keeps_it() -> None:
    model, x = stack()
    first = keepwise.fit(model, x, loss=loss, budget="0.8x", verify=False)
    with pytest.raises(InfeasibleBudget):
        keepwise.fit(model, x, loss=loss, budget="20KiB")
    run(model, x)
    assert first.stats.num_dropped > 0
    second = keepwise.fit(model, x, loss=loss, budget="0.6x", verify=False)
    run(model, x)
    assert second.stats.num_dropped > 0
    second.remove()
    assert type(model) is Stack


def test_explain_and_str_name_numbers_and_reasons() -> None:
    model, x = stack()
    plan = keepwise.fit(model, x, loss=loss, budget="0.6x", pin={"blocks.0": "keep"}, verify=False)
    first = str(plan).splitlines()[0]
    assert first.startswith("keepwise: ")
    assert "budget" in first
    assert "% time" in first
    assert repr(plan) == first
    text = plan.explain("blocks.0")
    assert "pinned by the user" in text
    assert "recompute" not in text
    assert "recompute" in plan.explain("blocks.*")
    with pytest.raises(UsageError, match="blocks"):
        plan.explain("nowhere")
    assert plan.kept_bytes + plan.dropped_bytes + plan.packed_bytes + plan.offloaded_bytes == sum(
        d.nbytes for d in plan.decisions
    )
    assert all(isinstance(v, float) for v in plan.metrics().values())


def test_cache_reuses_a_plan(tmp_path: Path) -> None:
    model, x = stack()
    said: list[str] = []
    first = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget="0.7x", cache=tmp_path, progress=said.append)
    assert "recording two steps" in said
    said.clear()
    plain = run(copy.deepcopy(model), x)
    again = keepwise.fit(model, x, loss=loss, budget="0.7x", cache=tmp_path, progress=said.append)
    assert said == ["reusing a cached plan"]
    assert again.decisions == first.decisions
    assert same(run(model, x), plain)
    said.clear()
    keepwise.fit(
        copy.deepcopy(model).requires_grad_(True),
        x[:32],
        loss=loss,
        budget="0.7x",
        cache=tmp_path,
        progress=said.append,
    )
    assert "recording two steps" in said


def test_the_cache_tells_losses_and_optimizers_apart(tmp_path: Path) -> None:
    model, x = stack()
    said: list[str] = []

    def planned(loss_of: Callable[[torch.Tensor], torch.Tensor], optimizer: Any = None) -> bool:
        said.clear()
        options: dict[str, Any] = {"budget": "0.7x", "cache": tmp_path, "progress": said.append, "optimizer": optimizer}
        keepwise.fit(model, x, loss=loss_of, **options).remove()
        return "recording two steps" in said

    def absolute(out: torch.Tensor) -> torch.Tensor:
        return out.abs().mean()

    assert planned(loss)
    assert not planned(loss)
    assert planned(absolute)
    assert planned(lambda out: (2 * out).square().mean())
    assert planned(lambda out: (3 * out).square().mean())
    assert planned(loss, torch.optim.SGD)
    assert not planned(absolute)


def test_a_loader_with_200_lengths_needs_a_handful_of_plans() -> None:
    model, _ = stack(depth=4)
    twin = copy.deepcopy(model)
    longest = torch.randn(8, 220, 16)
    plan = keepwise.fit(model, longest, loss=loss, budget="0.7x")
    lengths = list(range(20, 221))
    random.Random(0).shuffle(lengths)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in lengths:
            x = longest[:, :n]
            assert same(run(model, x), run(twin, x))
            assert not plan.stats.over_budget
    chooser = plan.runner.chooser
    assert chooser is not None
    assert chooser.num_plans <= 8  # type: ignore[attr-defined]


def test_a_batch_that_cannot_fit_is_announced_once() -> None:
    model, x = stack(depth=4)
    plan = keepwise.fit(model, x, loss=loss, budget="0.5x")
    large = torch.cat([x] * 6)
    with pytest.warns(UserWarning, match="the budget is"):
        run(model, large)
    assert plan.stats.over_budget
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, large)


def test_step_form_covers_several_forwards() -> None:
    model, x = stack(dropout=0.2)
    twin = copy.deepcopy(model)

    def step(m: nn.Module) -> torch.Tensor:
        total = torch.zeros(())
        for part in x.chunk(2):
            value = loss(m(part)) / 2
            value.backward()
            total = total + value.detach()
        return total

    def observe(m: nn.Module, plan: keepwise.Plan | None) -> list[torch.Tensor]:
        torch.manual_seed(5)
        m.zero_grad()
        if plan is None:
            value = step(m)
        else:
            with plan:
                value = step(m)
        return [value, *(p.grad.clone() for p in m.parameters() if p.grad is not None), torch.get_rng_state()]

    plan = keepwise.fit(model, step=lambda: step(model), budget="0.6x")
    assert same(observe(model, plan), observe(twin, None))
    assert plan.stats.num_dropped > 0
    with pytest.raises(UsageError, match="not both"):
        keepwise.fit(twin, x, step=lambda: step(twin), budget="max")


def test_verify_proves_and_restores() -> None:
    model, x = stack(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plan = keepwise.fit(copy.deepcopy(model), x, loss=loss, budget="0.6x")
    weights = [p.detach().clone() for p in model.parameters()]
    proof = keepwise.verify(model, x, plan=plan, loss=loss, optimizer=optimizer, steps=3)
    assert proof.identical
    assert proof.recomputed_identical
    assert proof.repeatable
    assert set(proof.compared) == {"loss", "outputs", "gradients", "buffers", "rng", "parameters"} - {"buffers"}
    assert proof.num_replays_compared > 0
    assert len(set(proof.digests)) == 3
    assert keepwise.verify(model, x, plan=plan, loss=loss, optimizer=torch.optim.AdamW).identical
    with pytest.raises(UsageError, match="plan= must be"):
        keepwise.verify(model, x, plan="plan.json", loss=loss)  # type: ignore[arg-type]
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not optimizer.state
    assert "identical bit for bit over 3 steps" in str(proof)


def test_verify_gives_no_verdict_where_plain_does_not_repeat() -> None:
    import os

    class Leaky(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + int.from_bytes(os.urandom(2), "little")

    torch.manual_seed(0)
    model, x = Leaky(4), torch.randn(64, 32, 16)
    plan = keepwise.fit(model, x, loss=loss, budget="0.6x")
    assert "not repeatable" in str(plan)
    proof = keepwise.verify(model, x, plan=plan, loss=loss)
    assert proof.identical is None
    assert not proof.repeatable
    assert proof.recomputed_identical


def test_frontier_is_monotone_and_has_a_knee() -> None:
    model, x = stack()
    found = keepwise.frontier(model, x, loss=loss, points=6)
    assert len(found.points) == 6
    peaks = [p.peak_bytes for p in found.points]
    times = [p.added_seconds for p in found.points]
    assert peaks == sorted(peaks)
    assert times == sorted(times, reverse=True)
    assert all(p.peak_bytes <= p.budget_bytes for p in found.points)
    assert found.knee in found.points
    assert type(model) is Stack
    with pytest.raises(UsageError):
        keepwise.frontier(model, x, loss=loss, points=1)


def test_a_fault_of_the_solver_falls_back_to_a_named_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    from keepwise.session import planning

    def broken(*_: object, **__: object) -> None:
        raise AssertionError("a check of its own")

    monkeypatch.setattr(planning, "plan_optimal", broken)
    model, x = stack()
    plain = run(copy.deepcopy(model), x)
    plan = keepwise.fit(model, x, loss=loss, budget="0.6x")
    assert "a check of its own" in str(plan)
    assert plan.peak_bytes <= (plan.budget_bytes or 0)
    assert same(run(model, x), plain)


def test_settings_without_effect_warn() -> None:
    model, x = stack(depth=2)
    with pytest.warns(UserWarning, match="host_budget"):
        keepwise.fit(model, x, loss=loss, budget="max", host_budget="1GiB")


def test_micro_batches_in_flight_count() -> None:
    """Four forward passes before the first backward: as a step of that form is measured, so it is predicted for one."""
    model, x = stack(depth=4)

    def all_forward_first() -> None:
        plan.apply(model)
        model.zero_grad(set_to_none=False)
        for value in [loss(model(x)) for _ in range(4)]:
            value.backward()
        plan.remove()

    peaks = []
    for n in (1, 4):
        plan = keepwise.fit(model, x, loss=loss, budget="min", in_flight=n)
        peaks.append(plan.peak_bytes - plan.static_bytes)
        assert peaks[-1] < plan.plain_peak_bytes - plan.static_bytes
        plan.remove()
    all_forward_first()  # gradients are there from now on
    assert allocator_peak(all_forward_first) <= 1.01 * peaks[-1]
    assert peaks[0] < peaks[1] < 4 * peaks[0]


def test_the_weight_cache_of_autocast_is_as_a_step_finds_it() -> None:
    model, x = stack(depth=3)
    with torch.autocast("cpu", torch.bfloat16):
        plan = keepwise.fit(
            model, x, loss=lambda out: out.float().square().mean(), planner="recompute_everything", budget="max"
        )
        model(x).float().square().mean().backward()
    assert plan.stats.num_deviations == 0
    assert plan.stats.num_dropped > 0


def test_fit_keeps_its_proof() -> None:
    model, x = stack(dropout=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = keepwise.fit(model, x, loss=loss, budget="0.7x", optimizer=optimizer)
    assert plan.proof is not None
    assert plan.proof.identical
    assert set(plan.proof.compared) == {"loss", "gradients", "rng", "parameters"}
    assert plan.proof.num_replays_compared > 0
    assert plan.proof.num_steps == 1
    plan.remove()
    assert keepwise.fit(model, x, loss=loss, budget="0.7x", verify=False).proof is None
    plan = keepwise.fit(model, x, loss=loss, budget="max")
    assert plan.proof is not None
    assert plan.proof.identical


def test_a_scheduler_does_not_think_that_the_optimizer_stepped() -> None:
    model, x = stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    keepwise.fit(model, x, loss=loss, budget="0.7x", optimizer=optimizer)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    optimizer.step()
    keepwise.fit(model, x, loss=loss, budget="0.7x", optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


class Masked(torch.nn.Module):
    """Scores of all pairs; with a mask there are more ops."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, _ = stack(depth=4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        for block in self.inner.blocks:
            scores = x @ x.transpose(1, 2)
            if mask is not None:
                scores = scores.masked_fill(mask[:, None, :], -1e4)
            x = block(torch.tanh(scores).softmax(-1) @ x)
        return x


@pytest.mark.parametrize("recorded", ["with", "without"])
def test_the_budget_holds_or_it_is_said_where_only_some_batches_have_a_mask(recorded: str) -> None:
    torch.manual_seed(0)
    model = Masked()
    batches = {"with": (torch.randn(8, 48, 16), torch.rand(8, 48) < 0.2), "without": (torch.randn(8, 48, 16),)}
    plan = keepwise.fit(model, batches[recorded], loss=loss, budget="0.6x")
    assert plan.budget_bytes is not None
    static = 2 * sum(p.nbytes for p in model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for length in (48, 31, 40, 45):
            for batch in batches.values():
                shorter = tuple(t[:, :length] for t in batch)
                given = sum(t.untyped_storage().nbytes() for t in shorter)

                def step(shorter: tuple[torch.Tensor, ...] = shorter) -> None:
                    loss(model(*shorter)).backward()

                step()
                peak = static + given + allocator_peak(step)
                assert peak <= 1.01 * plan.budget_bytes or plan.stats.over_budget


def test_several_batches_are_proved_and_listed() -> None:
    model, _ = stack(depth=4)
    twin = copy.deepcopy(model)
    batches = [torch.randn(8, n, 16) for n in (20, 48, 20, 33)]
    said: list[str] = []
    plan = keepwise.fit(model, loss=loss, budget="0.7x", batches=batches, progress=said.append)
    assert plan.shapes == ("[0] [8, 48, 16]", "[0] [8, 20, 16]", "[0] [8, 33, 16]")
    assert sum(text.startswith("proving the plan for") for text in said) == 2
    assert len(plan.document.batch_scales) == 2
    for x in batches:
        assert same(run(model, x), run(twin, x))
        assert not plan.stats.over_budget
        assert not plan.stats.num_deviations


@pytest.mark.parametrize("batches", [iter(()), [], torch.randn(8, 4, 16), {"x": torch.randn(8, 4, 16)}, 5, "data"])
def test_what_is_no_sequence_of_batches_is_one_clear_line(batches: object) -> None:
    model, _ = stack(depth=1)
    with pytest.raises(UsageError, match=r"batches= (is empty|must be a sequence)"):
        keepwise.fit(model, loss=loss, budget="min", batches=batches)


def test_batches_may_come_from_a_generator_and_take_no_other_arguments() -> None:
    model, x = stack(depth=2)
    plan = keepwise.fit(model, loss=loss, budget="min", batches=(x[:n] for n in (8, 16)))
    assert len(plan.shapes) == 2
    with pytest.raises(UsageError, match="batches= alone"):
        keepwise.fit(model, kwargs={"x": x}, loss=loss, budget="min", batches=[x])


def test_every_plan_of_several_batches_counts_the_micro_batches_in_flight() -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(8, 48, 16)
    batches = [(x, torch.rand(8, 48) < 0.2), (x,)]
    plan = keepwise.fit(model, loss=loss, budget="0.8x", batches=batches, in_flight=3)
    assert [v.step.in_flight for v in (plan.document, *plan.document.variants)] == [3, 3]


@pytest.mark.parametrize("on_infeasible", ["raise", "floor"])
def test_a_named_plan_over_the_budget_is_refused_or_said(on_infeasible: str) -> None:
    model, x = stack(depth=4)
    options = {"loss": loss, "budget": 1000, "planner": "every:2", "on_infeasible": on_infeasible}
    if on_infeasible == "floor":
        plan = keepwise.fit(model, x, **options)
        assert plan.status is Status.INFEASIBLE
        assert any("planner 'every:2' needs" in note for note in plan.notes)
        return
    with pytest.raises(InfeasibleBudget, match="planner 'every:2' needs") as caught:
        keepwise.fit(model, x, **options)
    assert caught.value.floor_bytes > 1000
    assert type(model) is Stack


def test_the_folder_of_the_trace_is_checked_and_may_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    plain = tempfile.mkstemp

    def seen(*, prefix: str, dir: str | None) -> tuple[int, str]:
        made.append(dir)
        return plain(prefix=prefix, dir=dir)

    monkeypatch.setattr(tempfile, "mkstemp", seen)
    model, x = stack(depth=2)
    with pytest.raises(UsageError, match="disk= must be a folder"):
        keepwise.fit(model, x, loss=loss, budget="min", disk=tmp_path / "none")
    for disk in (tmp_path, None):
        keepwise.fit(model, x, loss=loss, budget="min", disk=disk).remove()
    assert made[-2:] == [str(tmp_path), None]


def test_nested_batches_have_shapes() -> None:
    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, _ = stack(depth=2)

        def forward(self, batch: UserDict[str, torch.Tensor]) -> torch.Tensor:
            return self.inner(batch["x"])

    plan = keepwise.fit(Nested(), (UserDict(x=torch.randn(8, 20, 16)),), loss=loss, budget="0.95x")
    assert plan.shapes == ("[0].x [8, 20, 16]",)


@pytest.mark.parametrize("budget", ["0.6x", "min"])
def test_batches_that_take_another_path_have_a_plan_of_their_own(budget: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Masked()
    twin = copy.deepcopy(model)
    x = torch.randn(8, 48, 16)
    batches = [(x, torch.rand(8, 48) < 0.2), (x[:, :30],), (x[:, :20], torch.rand(8, 20) < 0.2)]
    plan = keepwise.fit(model, loss=loss, budget=budget, batches=batches, on_infeasible="floor")
    assert len(plan.shapes) == 3
    assert any("a plan of their own" in note for note in plan.notes)
    plan.save(tmp_path / "plan.json")
    plan.remove()
    plan = keepwise.Plan.load(tmp_path / "plan.json").apply(model)
    for given in (*batches, (x,), (x[:, :40],)):
        for m in (model, twin):
            m.zero_grad(set_to_none=True)
            loss(m(*given)).backward()
        assert not plan.stats.num_deviations
        assert not plan.stats.num_unknown_ops
        assert plan.stats.num_dropped or budget != "min"
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]


def test_what_the_loss_saves_of_the_output_counts() -> None:
    """`square` saves its argument before it runs: just after the model's last op, and outside of its forward."""
    model, x = stack(depth=4)
    plan = keepwise.fit(model, x, loss=loss, budget="min")
    outside = [d for d in plan.decisions if "PowBackward0" in d.saved_by]
    assert [d.kind for d in outside] == ["keep"]


def test_what_nothing_reads_is_kept_and_says_so() -> None:
    """A head that the loss leaves out."""

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return torch.tanh(torch.tanh(self.used(x))), torch.tanh(torch.tanh(self.unused(x)))

    plan = keepwise.fit(
        Two(), torch.randn(4, 8), loss=lambda out: out[0].sum(), budget="max", planner="recompute_everything"
    )
    why = {d.why for d in plan.decisions if d.op == "aten.tanh.default" and not d.is_forced}
    assert any("nothing in backward reads it" in text for text in why), why
