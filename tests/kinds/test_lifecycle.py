"""A planned model is copied, stored, planned again, interrupted; and it does not grow."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import keepwise

from .compare import mapping_differences
from .harness import options, seed_all, tensors
from .lifecycle import Model, built, outcome, planned, same
from .program import mean_square

HOWS = ("everything", "min")


@pytest.fixture(params=HOWS)
def at_work(request: Any) -> Iterator[tuple[Model, torch.Tensor, keepwise.Plan]]:
    model, x = built()
    plan = planned(model, x, request.param)
    yield model, x, plan
    plan.remove()


def _plain(num: int = 1) -> dict[str, Any]:
    model, x = built()
    for _ in range(num - 1):
        outcome(model, x)
    return outcome(model, x)


# ---------------------------------------------------------------------------------------------- copies


def test_the_class_and_the_names_stay(at_work: Any) -> None:
    model, _, _ = at_work
    plain, _ = built()
    assert isinstance(model, Model)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert repr(model) == repr(plain)


def test_a_deepcopy_is_plain_and_computes_with_its_own_weights(at_work: Any) -> None:
    model, x, _ = at_work
    twin = copy.deepcopy(model)
    assert type(twin) is Model
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    same(_plain(), outcome(twin, x))


def test_a_shallow_copy_shares_weights_and_runs(at_work: Any) -> None:
    model, x, _ = at_work
    same(_plain(), outcome(copy.copy(model), x))


def test_pickling_gives_a_plain_model(at_work: Any) -> None:
    model, x, _ = at_work
    twin = pickle.loads(pickle.dumps(model))
    assert type(twin) is Model
    same(_plain(), outcome(twin, x))
    same(_plain(), outcome(model, x))


def test_a_copy_of_a_plan_is_the_same_decision_applied_to_nothing(at_work: Any) -> None:
    model, x, plan = at_work
    stream = io.BytesIO()
    torch.save(plan, stream)
    stream.seek(0)
    for twin in (
        pickle.loads(pickle.dumps(plan)),
        copy.deepcopy(plan),
        copy.copy(plan),
        torch.load(stream, weights_only=False),
    ):
        assert str(twin) == str(plan)
        assert twin.decisions == plan.decisions
        assert twin.proof == plan.proof
        with pytest.raises(keepwise.KeepwiseError, match="already"):
            twin.apply(model)
        other, _ = built()
        twin.apply(other)
        same(_plain(), outcome(other, x))
        assert twin.stats.num_dropped
        twin.remove()
    same(_plain(), outcome(model, x))


def test_torch_save_and_load_of_model_and_state(at_work: Any) -> None:
    model, x, _ = at_work
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    assert type(twin) is Model
    same(_plain(), outcome(twin, x))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other, _ = built(seed=9)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert mapping_differences(tensors(model), tensors(other)) == []


def test_weights_loaded_into_a_planned_model(at_work: Any) -> None:
    model, x, _ = at_work
    other, _ = built(seed=9)
    state = copy.deepcopy(other.state_dict())
    model.load_state_dict(state)
    same(outcome(other, x), outcome(model, x))
    model.load_state_dict(copy.deepcopy(state), assign=True)
    other.load_state_dict(copy.deepcopy(state))
    same(outcome(other, x), outcome(model, x))


# ---------------------------------------------------------------------------------------------- on and off


def test_removed_and_applied_again(at_work: Any) -> None:
    model, x, plan = at_work
    plain, _ = built()
    for turn in range(3):
        same(outcome(plain, x), outcome(model, x))
        plan.remove()
        assert type(model) is Model
        same(outcome(plain, x), outcome(model, x))
        plan.apply(model)
        assert turn < 3


def test_removed_twice_and_between_forward_and_backward(at_work: Any) -> None:
    model, x, plan = at_work
    plain, _ = built()
    losses = []
    for each in (plain, model):
        seed_all(2)
        each.zero_grad(set_to_none=True)
        losses.append(mean_square(each(x)))
    plan.remove()
    plan.remove()
    for loss in losses:
        loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (plain, model)]
    assert mapping_differences(*grads) == []


def test_paused_drops_nothing(at_work: Any) -> None:
    model, x, plan = at_work
    plain, _ = built()
    with plan.paused():
        seed_all(2)
        out = model(x)
        assert plan.stats.num_dropped == 0 or plan.stats.num_saved == 0
        del out
    model, _ = built()
    plan.apply(model)
    with plan.paused():
        same(outcome(plain, x), outcome(model, x))
    same(outcome(plain, x), outcome(model, x))


def test_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEEPWISE", "0")
    model, x = built()
    plan = planned(model, x)
    assert type(model) is Model
    assert plan.dropped_bytes == 0
    same(_plain(), outcome(model, x))


def test_planned_again_on_top(at_work: Any) -> None:
    model, x, _ = at_work
    plan = planned(model, x, "everything")
    same(_plain(), outcome(model, x))
    plan.remove()


def test_one_plan_on_two_instances_that_take_turns(at_work: Any) -> None:
    model, x, plan = at_work
    second, y = built(seed=5)
    plan.apply(second)
    losses: list[torch.Tensor] = []
    plains = [built(), built(seed=5)]
    for first, other in ((plains[0][0], plains[1][0]), (model, second)):
        seed_all(2)
        a, b = mean_square(first(x)), mean_square(other(y))
        b.backward()
        a.backward()
        losses += [a, b]
    assert torch.equal(losses[0], losses[2])
    assert torch.equal(losses[1], losses[3])
    for mine, theirs in ((model, plains[0][0]), (second, plains[1][0])):
        grads = [{n: p.grad for n, p in each.named_parameters()} for each in (theirs, mine)]
        assert mapping_differences(*grads) == []


def test_two_models_planned_in_one_process() -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    def both() -> tuple[Model, Other, torch.Tensor]:
        model, x = built()
        return model, Other(), x

    def step(model: Any, other: Any, x: torch.Tensor) -> dict[str, Any]:
        seed_all(3)
        (mean_square(model(other(x))) + mean_square(other(model(x)))).backward()
        pairs = [*model.named_parameters(), *other.named_parameters()]
        return {n: p.grad for n, p in pairs}

    plain = step(*both())
    model, other, x = both()
    plans = [planned(model, x), planned(other, x, "min")]
    same(plain, step(model, other, x))
    for plan in plans:
        plan.remove()


def test_a_plan_saved_and_loaded(at_work: Any, tmp_path: Any) -> None:
    _, x, plan = at_work
    plan.save(tmp_path / "plan.json")
    again = keepwise.Plan.load(tmp_path / "plan.json")
    model, _ = built()
    again.apply(model)
    same(_plain(), outcome(model, x))
    assert again.dropped_bytes == plan.dropped_bytes
    again.remove()


# ---------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("error", [MemoryError("no memory"), KeyboardInterrupt(), ValueError("mine")])
@pytest.mark.parametrize("after", [0, 5])
def test_an_error_in_a_replay_comes_through_and_the_next_step_is_right(
    error: BaseException, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator of the replay fails, as an allocation may: the first one, and one in the middle."""
    from keepwise.runtime.replay import WindowRun

    plain, x = built()
    model, _ = built()
    plan = planned(model, x)
    same(outcome(plain, x), outcome(model, x))
    run, num_calls = WindowRun._run, 0

    def failing(self: Any, *args: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls > after:
            raise error
        run(self, *args)

    seed_all(2)
    plain(x)  # moves the statistics as the failing step does
    seed_all(2)
    loss = mean_square(model(x))
    with monkeypatch.context() as patch:
        patch.setattr(WindowRun, "_run", failing)
        with pytest.raises(type(error), match=str(error) or None):
            loss.backward()
    assert num_calls == after + 1
    del loss
    same(outcome(plain, x), outcome(model, x))
    plan.remove()


class Broken(Model):
    broken = False

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        if self.broken:
            raise ValueError("broken in forward")
        return x


def test_an_error_while_planning_leaves_no_trace() -> None:
    seed_all(1)
    model, x = Broken().train(), torch.randn(6, 8)
    model.broken = True
    before, state = tensors(model), torch.get_rng_state()
    with pytest.raises(ValueError, match="broken in forward"):
        planned(model, x)
    assert mapping_differences(before, tensors(model)) == []
    assert torch.equal(state, torch.get_rng_state())
    assert type(model) is Broken
    assert all(p.grad is None for p in model.parameters())
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None  # pyright: ignore[reportAttributeAccessIssue]
    model.broken = False
    seed_all(1)
    plain = Broken().train()
    same(outcome(plain, x), outcome(model, x))


@pytest.mark.parametrize("how", ["everything", "min"])
def test_memory_can_be_resized_as_before(how: str) -> None:
    model, x = built()
    seed_all()
    big = torch.randn(6, 8, requires_grad=True)
    plan = planned(model, x, how)
    keepwise.verify(model, (x,), plan=plan, loss=mean_square)
    plan.audit(every=1)
    mean_square(model(big)).backward()
    held = {**dict(model.named_parameters()), **dict(model.named_buffers()), "batch": x, "argument": big}
    held |= {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert {name: t for name, t in held.items() if not t.untyped_storage().resizable()} == {}
    plan.remove()


def test_an_infeasible_budget_leaves_no_trace() -> None:
    model, x = built()
    before = tensors(model)
    with pytest.raises(keepwise.InfeasibleBudget) as caught:
        keepwise.fit(model, (x,), loss=mean_square, budget=1000)
    assert caught.value.floor_bytes > 1000
    assert mapping_differences(before, tensors(model)) == []
    assert type(model) is Model
    same(_plain(), outcome(model, x))


@pytest.mark.parametrize("how", HOWS)
def test_an_optimizer_is_as_before(how: str) -> None:
    plain, x = built()
    model, _ = built()
    optimizers = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        outcome(each, x)
        optimizer.step()
        optimizers.append(optimizer)
    before = copy.deepcopy(optimizers[1].state_dict())
    plan = keepwise.fit(model, (x,), loss=mean_square, optimizer=optimizers[1], **options(how))
    after = optimizers[1].state_dict()
    assert before["param_groups"] == after["param_groups"]
    for key, state in before["state"].items():
        assert mapping_differences(state, after["state"][key]) == []
    for _ in range(3):
        same(outcome(plain, x), outcome(model, x))
        for optimizer in optimizers:
            optimizer.step()
    assert mapping_differences(tensors(plain), tensors(model)) == []
    plan.remove()


# ---------------------------------------------------------------------------------------------- audit and proof


def test_audit_passes_what_is_right(at_work: Any) -> None:
    model, x, plan = at_work
    plain, _ = built()
    plan.audit(every=2)
    for _ in range(4):
        same(outcome(plain, x), outcome(model, x))


def test_a_write_to_a_small_parameter_that_no_version_shows_does_not_reach_the_replay() -> None:
    plain, x = built()
    model, _ = built()
    plan = planned(model, x)
    plan.audit(every=1)
    for each in (plain, model):
        seed_all(2)
        loss = mean_square(each(x))
        each.inp.weight.data.mul_(1.5)  # plain kept the activations; the replay reads a copy of the weight
        loss.backward()
    grads = [{n: p.grad for n, p in each.named_parameters()} for each in (plain, model)]
    assert mapping_differences(*grads) == []
    assert plan.stats.num_audited > 0
    plan.remove()


def test_audit_finds_a_write_to_a_large_parameter_that_no_version_shows() -> None:
    seed_all(1)
    model, x = nn.Sequential(nn.Linear(160, 160), nn.Tanh(), nn.Linear(160, 8)), torch.randn(4, 160)
    plan = planned(model, x)
    plan.audit(every=1)
    loss = mean_square(model(x))
    model[0].weight.data.mul_(1.5)  # plain does not notice this either, but it kept the activations
    with pytest.raises(keepwise.MismatchError):
        loss.backward()
    plan.remove()


@pytest.mark.parametrize("how", HOWS)
def test_verify_says_identical(how: str) -> None:
    model, x = built()
    plan = planned(model, x, how)
    proof = keepwise.verify(model, (x,), plan=plan, loss=mean_square, steps=2)
    assert proof.identical
    assert proof.recomputed_identical
    assert proof.repeatable
    plan.remove()


# ---------------------------------------------------------------------------------------------- growth


def _census() -> int:
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def _objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def _lived(model: Any, x: torch.Tensor, plan: keepwise.Plan, num_steps: int, trouble: int) -> None:
    """Steps of changing shapes; every `trouble`-th fails in forward, in backward or in a hook, or the plan is taken off and put back."""
    for i in range(num_steps):
        if i % trouble == trouble - 1:
            kind = i // trouble % 4
            if kind == 3:
                plan.remove()
                outcome(model, x)
                plan.apply(model)
            else:
                place = (model.blocks[1].register_forward_pre_hook, model.blocks[1].register_full_backward_hook)[
                    kind % 2
                ]
                handle = place(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    outcome(model, x)
                handle.remove()
        outcome(model, x[: 6 - i % 3])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(
    ("num_steps", "trouble"), [(60, 5), pytest.param(500, 50, marks=pytest.mark.slow)], ids=["60 steps", "500 steps"]
)
def test_nothing_grows_over_steps_of_all_kinds(how: str, num_steps: int, trouble: int) -> None:
    model, x = built()
    plan = planned(model, x, how)
    _lived(model, x, plan, 4 * trouble if trouble < 50 else 30, 5)
    process = psutil.Process()
    tensors_before, objects_before, resident_before = _census(), _objects(), process.memory_info().rss
    _lived(model, x, plan, num_steps, trouble)
    assert _census() <= tensors_before
    assert _objects() <= objects_before + 60
    assert process.memory_info().rss <= resident_before + (16 << 20)
    plain, _ = built()
    for mine, its in zip(model.buffers(), plain.buffers(), strict=True):
        mine.copy_(its)
    same(outcome(plain, x), outcome(model, x))
    plan.remove()


@pytest.mark.parametrize("how", HOWS)
def test_nothing_grows_where_backward_never_runs(how: str) -> None:
    model, x = built()
    plan = planned(model, x, how)
    for _ in range(5):
        model(x)
    tensors_before, objects_before = _census(), _objects()
    for _ in range(100):
        model(x)
    assert _census() <= tensors_before
    assert _objects() <= objects_before + 60
    plan.remove()


@pytest.mark.parametrize("how", HOWS)
def test_nothing_grows_when_backward_fails(how: str) -> None:
    model, x = built()
    plan = planned(model, x, how)

    def failing() -> None:
        out = model(x)
        out.register_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            mean_square(out).backward()

    for _ in range(5):
        failing()
    before = _census()
    for _ in range(60):
        failing()
    assert _census() <= before
    same({"loss": _plain()["loss"]}, {"loss": outcome(built()[0], x)["loss"]})
    plan.remove()


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
