"""Putting a plan onto a model and taking it off."""

from __future__ import annotations

import abc
import copy
import gc
import inspect
import io
import pickle
import types
import weakref
from typing import Any, ClassVar, Generic, TypeVar

import pytest
import torch
from torch import Tensor, nn

import keepwise
from keepwise.runtime import apply
from keepwise.runtime.allocated import highest_allocated

from .helpers import Chain, batch, differences, fit, made, step, twice

T = TypeVar("T")


class Named(Chain):
    """A model whose class has everything that people look at."""

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        """Documented."""
        return super().forward(x) * scale


def test_the_class_is_the_users_own() -> None:
    own = Named.__dict__["forward"]
    model, x = made(Named), batch(3, 4)
    before = set(vars(model))
    plan = fit(model, x)
    assert type(model) is Named
    assert inspect.signature(model.forward) == inspect.signature(Named().forward)
    assert model.forward.__doc__ == "Documented."
    assert set(vars(model)) == before
    assert repr(model) == repr(made(Named))
    plan.remove()
    assert Named.__dict__["forward"] is own


class Heir(Named):
    """Has no forward of its own."""


def test_two_plans_on_classes_that_inherit_from_one_another() -> None:
    models, x = [made(Heir), made(Named), made(Chain)], batch(3, 4)
    plans = [fit(model, x) for model in models]
    for plan, model in zip(plans, models, strict=True):
        twice(plan, lambda model=model: step(model, x))
        assert plan.stats.num_dropped
    num = plans[0].runner.num_steps
    step(models[0], x)
    assert plans[0].runner.num_steps == num + 1  # `super().forward` of a planned model begins no step of its own
    for plan in plans:
        plan.remove()
    assert "forward" not in Heir.__dict__
    assert not any(hasattr(kind.__dict__["forward"], "__wrapped__") for kind in (Named, Chain))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_compilers_read_the_forward_of_a_planned_model_and_of_its_class() -> None:
    model, other, x = made(Chain), made(Chain, seed=5), batch(3, 4)
    plan = fit(model, x)
    for m in (model, other):
        with torch.no_grad():
            expected = m(x)
            assert torch.equal(torch.fx.symbolic_trace(m)(x), expected)
            assert torch.equal(torch.compile(m, backend="eager", fullgraph=True)(x), expected)
            assert torch.equal(torch.jit.script(m)(x), expected)
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped


def test_state_dicts_know_nothing_of_it() -> None:
    model, x = made(Chain), batch(3, 4)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    fit(model, x)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(before[k], after[k]) for k in before)
    made(Chain, seed=3).load_state_dict(after)


@pytest.mark.parametrize("copied", ["deepcopy", "copy", "pickle", "torch.save"])
def test_a_copy_is_a_plain_model_that_computes_with_its_own_weights(copied: str) -> None:
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    if copied == "deepcopy":
        twin = copy.deepcopy(model)
    elif copied == "copy":
        twin = copy.copy(model)
    elif copied == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is Chain
    assert apply.runner_of(twin) is None
    if copied == "copy":
        return
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(2.0)
    plain = made(Chain)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(2.0)
    assert not differences(step(plain, x), step(twin, x))
    twice(plan, lambda: step(model, x))


def test_a_moving_average_of_the_model_computes_with_its_own_weights() -> None:
    model, x = made(Chain), batch(3, 4)
    fit(model, x)
    average = torch.optim.swa_utils.AveragedModel(model, avg_fn=lambda a, b, n: a * 0.5 + b * 0.5)
    before = average(x)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert torch.equal(average(x), before)
    average.update_parameters(model)
    assert not torch.equal(average(x), before)


def test_a_plan_goes_onto_another_instance_and_comes_off() -> None:
    model, other, x = made(Chain), made(Chain, seed=7), batch(3, 4)
    plan = fit(model, x)
    assert plan.apply(other) is plan
    twice(plan, lambda: step(other, x))
    assert plan.stats.num_dropped
    plan.remove()
    assert type(model) is type(other) is Chain
    plan.runner.reset()
    step(other, x)
    assert plan.stats.num_saved == 0
    plan.remove()
    plan.apply(other)
    step(other, x)
    assert plan.stats.num_dropped


def test_a_second_plan_on_one_model_is_refused() -> None:
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    with pytest.raises(keepwise.KeepwiseError, match="remove"):
        plan.apply(model)
    fit(model, x)  # fit takes the old one off


def test_another_architecture_is_refused_with_the_first_difference() -> None:
    plan = fit(made(Chain), batch(3, 4))
    with pytest.raises(keepwise.PlanMismatch, match=r"layers\.0\.weight"):
        plan.apply(Chain(width=5))
    frozen = Chain()
    frozen.layers[1].bias.requires_grad_(False)
    with pytest.raises(keepwise.PlanMismatch, match="frozen"):
        plan.apply(frozen)


class Wrapped(Chain):
    """Mixed-precision wrappers and others put `forward` on the instance."""

    def __init__(self) -> None:
        super().__init__()
        inner = self.forward
        self.forward = lambda x: inner(x * 0.5)  # type: ignore[method-assign]


def test_a_forward_on_the_instance_is_used_and_put_back() -> None:
    model, x = made(Wrapped), batch(3, 4)
    own = model.forward
    plan = fit(model, x)
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped
    plan.remove()
    assert model.forward is own
    assert type(model) is Wrapped


def _halved(model: Chain, x: Tensor) -> Tensor:
    return type(model).forward(model, x * 0.5)


class Bound(Chain):
    """As `accelerate` does it: a method bound to the instance, which a copy binds to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = types.MethodType(_halved, self)  # type: ignore[method-assign]


def test_a_copy_of_a_model_with_its_own_forward_computes_with_its_own_weights() -> None:
    model, x = made(Bound), batch(3, 4)
    plan = fit(model, x)
    twin = copy.deepcopy(model)
    assert isinstance(twin.forward, types.MethodType)
    plain = made(Bound)
    for m in (twin, plain):
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(2.0)
    assert not differences(step(plain, x), step(twin, x))
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped


def test_a_plan_keeps_no_model_alive() -> None:
    for make in (Chain, Bound):
        model = made(make)
        plan = fit(model, batch(3, 4))
        model.zero_grad()
        seen = weakref.ref(model)
        del model
        gc.collect()
        assert seen() is None, make
        plan.remove()


class Registry(nn.Module):
    """A base that keeps a list of its subclasses and asks for an argument."""

    known: ClassVar[list[type]] = []

    def __init_subclass__(cls, *, tag: str, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        Registry.known.append(cls)


class Registered(Registry, tag="a"):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.a(x)))


class Abstract(abc.ABC, nn.Module):
    @abc.abstractmethod
    def scale(self) -> float: ...


class Concrete(Abstract, Generic[T]):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def scale(self) -> float:
        return 2.0

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.tanh(self.a(x)) * self.scale())


@pytest.mark.parametrize("kind", [Registered, Concrete])
def test_the_users_class_machinery_is_left_alone(kind: type[nn.Module]) -> None:
    model, x = made(kind), batch(3, 4)
    plan = fit(model, x)
    assert isinstance(model, kind)
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped
    assert Registry.known == [Registered]
    assert type(copy.deepcopy(model)) is kind


def test_paused_and_the_environment_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    plan.runner.reset()
    with plan.paused():
        step(model, x)
    assert plan.stats.num_saved == 0
    step(model, x)
    assert plan.stats.num_dropped
    other = made(Chain)
    monkeypatch.setenv("KEEPWISE", "0")
    inert = keepwise.fit(other, (x,), loss=lambda out: out.sum())
    assert type(other) is Chain
    assert inert.dropped_bytes == 0
    plan.apply(other)
    assert type(other) is Chain


def test_without_gradients_nothing_is_watched() -> None:
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    plan.runner.reset()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    assert plan.stats.num_ops == 0
    model.eval()  # what decides is whether gradients are recorded
    twice(plan, lambda: step(model, x))
    assert plan.stats.num_dropped


def test_a_tracer_sees_the_model_as_it_is() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = model(x).square().mean()
        fake.backward()
    assert all(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    exported = torch.export.export(model, (x,))
    assert torch.equal(exported.module()(x), model(x))
    twice(plan, lambda: step(model, x))


def test_counters_by_their_plain_names() -> None:
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    step(model, x)
    stats = plan.stats
    assert stats.dropped == stats.num_dropped > 0
    assert stats.replayed >= sum(d.kind == "recompute" for d in plan.decisions)
    assert stats.ops_replayed == sum(len(w.ops) for w in plan.schedule.windows)
    assert stats.seconds > 0
    assert stats.deviations == 0
    assert not stats.over_budget
    assert stats.peak_bytes is None  # the CPU's allocator counts nothing


def test_the_peak_is_the_devices_own_count_and_an_old_one_blames_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA's allocator says, by hand: a counter that only goes up, which a user may reset."""
    model, x = made(Chain), batch(3, 4)
    plan = fit(model, x)
    plan.runner.budget_bytes = 1000
    counter = [400]
    monkeypatch.setattr(apply, "highest_allocated", lambda device: counter[0])

    def after(peak: int) -> tuple[int | None, bool]:
        step(model, x)
        counter[0] = peak
        return plan.stats.peak_bytes, plan.stats.over_budget

    assert after(900) == (900, False)
    assert after(900) == (900, False)
    assert after(1001) == (1001, True)
    assert plan.metrics()["keepwise/over_budget"] == 1
    assert after(1001) == (1001, False)  # that was the step before
    counter[0] = 300  # reset between the steps
    assert after(800) == (800, False)
    assert after(1200) == (1200, True)
    step(model, x)
    counter[0] = 1100  # reset inside the step
    assert (plan.stats.peak_bytes, plan.stats.over_budget) == (1100, True)


def test_what_cuda_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = {"allocated_bytes": {"all": {"peak": 77, "current": 5}, "large_pool": {"peak": 70}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: counted)
    assert highest_allocated(torch.device("cuda:1")) == 77
    assert highest_allocated(torch.device("cpu")) is None
    counted.clear()  # CUDA has not begun
    assert highest_allocated(torch.device("cuda:1")) is None
