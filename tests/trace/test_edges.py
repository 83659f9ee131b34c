"""Surroundings of a recorded step: compiled regions, subclasses, other modes and hooks, `torch.func`, checkpoints, errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_module
from torch.optim import optimizer as optimizer_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from keepwise.ir import Category, Phase, Step
from keepwise.runtime.digest import strong_digest
from keepwise.session.batch import Batch, whole_step
from keepwise.trace import Recording, record, trace_steps
from keepwise.trace.admission import Admission
from keepwise.trace.calibration import is_dense, unshared_counts
from tests.steps import check_step
from tests.trace.models import Mlp, build, plain_step


def trace(model: nn.Module, x: Any, run: Callable[[], Any] | None = None) -> Recording:
    recording = trace_steps(run or plain_step(model, x), model=model, inputs=x).recording
    check_step(recording.step)
    return recording


def kept(step: Step) -> dict[str, int]:
    found: dict[str, int] = {}
    for s in step.storages:
        if s.keep_reason:
            found[s.keep_reason] = found.get(s.keep_reason, 0) + s.nbytes
    return found


class Wrapped(torch.Tensor):
    """A wrapper subclass that desugars into ops on the tensor inside."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(x: Any) -> Any:
            return x.inner if isinstance(x, Wrapped) else x

        def wrap(x: Any) -> Any:
            return Wrapped(x) if isinstance(x, Tensor) else x

        return tree_map(wrap, func(*tree_map(unwrap, args), **tree_map(unwrap, kwargs or {})))


def test_a_wrapper_subclass_is_seen_as_the_ops_that_it_desugars_into() -> None:
    weight = nn.Parameter(torch.randn(4, 4))
    x = Wrapped(torch.randn(3, 4))

    def run() -> None:
        (x @ weight).exp().sum().backward()

    recording = record(run, model=None, inputs=(x, weight), admit=Admission())
    step = check_step(recording.step)
    forward = [op.target for op in step.ops if op.phase is Phase.FORWARD]
    assert forward[:3] == ["aten.mm.default", "aten.exp.default", "aten.sum.default"]
    assert all(step.storages[step.values[v].storage].nbytes > 0 for op in step.ops[:3] for v in op.inputs)
    assert any("Wrapped" in reason for reason in kept(step))
    expected = (x.inner @ weight.detach()).exp()
    assert torch.allclose(weight.grad.inner, x.inner.t() @ expected)  # type: ignore[union-attr]


@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_stay_compiled_and_are_told() -> None:
    torch._dynamo.reset()
    inner = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), backend="aot_eager")
    model = nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))  # type: ignore[arg-type]
    x = torch.randn(4, 8)
    run = plain_step(model, x)
    run()

    def nodes() -> list[str]:
        found, todo = [], [model(x).sum().grad_fn]
        while todo:
            node = todo.pop()
            if node is not None:
                found.append(node.name())
                todo.extend(n for n, _ in node.next_functions)
        return found

    before = nodes()
    assert "CompiledFunctionBackward" in before
    torch._dynamo.utils.counters.clear()
    recording = trace(model, x)
    assert nodes() == before
    assert recording.compiled == ("1",)
    assert not torch._dynamo.utils.counters["stats"], "nothing was compiled again"


def test_torch_func_inside_a_model_works_and_is_told() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.func.grad(lambda z: (z**2).sin().sum())(x)

    model = nn.Sequential(nn.Linear(4, 4), Inner(), nn.Tanh())
    x = torch.randn(3, 4)
    run = plain_step(model, x)
    run()
    plain = [p.grad for p in model.parameters()]
    model.zero_grad()
    traced = trace_steps(run, model=model, inputs=x)
    assert traced.recording.functorch_paths == ("1",)
    for (_, g), p in zip(traced.gradients.items(), plain, strict=True):
        assert g is not None
        assert p is not None
        assert g == strong_digest(p)
    check_step(traced.recording.step)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t), pytest.raises(RuntimeError, match="hooks"):
        model(x)  # what torch itself does there, again


def test_vmap_shows_the_ops_that_it_becomes() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.vmap(lambda z: z.sin() * z)(x)

    model, x = nn.Sequential(nn.Linear(4, 4), Inner()), torch.randn(3, 4)
    assert "aten.sin.default" in [op.target for op in trace(model, x).step.ops]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_existing_checkpoints_are_left_alone_and_told(use_reentrant: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Tanh())

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x).exp(), use_reentrant=use_reentrant)  # type: ignore[return-value]

    model, x = Model(), torch.randn(3, 4)
    run = plain_step(model, x)
    run()
    plain = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    traced = trace_steps(run, model=model, inputs=x)
    assert traced.recording.checkpoints
    assert all(strong_digest(plain[n]) == g for n, g in traced.gradients.items())
    step = check_step(traced.recording.step)
    tanh = [op.phase for op in step.ops if op.target == "aten.tanh.default"]
    assert len(tanh) == 2, "once in forward, once again in backward"


def test_the_users_own_hooks_on_saved_tensors_see_what_they_saw() -> None:
    packed: list[int] = []

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
                return self.lin(x).exp()

    model, x = Model(), torch.randn(3, 4)
    run = plain_step(model, x)
    run()
    plain = len(packed)
    recording = trace(model, x)
    assert len(packed) == 3 * plain
    assert recording.foreign_hooks


def test_reads_during_forward_are_a_reason_to_keep() -> None:
    class Model(nn.Module):
        def __init__(self, *, create_graph: bool) -> None:
            super().__init__()
            self.lin, self.create_graph = nn.Linear(4, 4), create_graph

        def forward(self, x: Tensor) -> Tensor:
            x = x.clone().requires_grad_()
            y = self.lin(x).tanh()
            (g,) = torch.autograd.grad(y.sum(), x, create_graph=self.create_graph, retain_graph=True)
            return g * y

    x = torch.randn(3, 4)
    for create_graph in (False, True):
        step = trace(Model(create_graph=create_graph), x).step
        assert any("forward was running" in reason for reason in kept(step))
        phases = {op.phase for op in step.ops if op.target == "aten.tanh_backward.default"}
        assert phases == ({Phase.FORWARD, Phase.BACKWARD} if create_graph else {Phase.BACKWARD})


def test_sparse_nested_and_conjugate_tensors_are_kept_by_reference() -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return torch.sparse.mm(torch.eye(3).to_sparse(), x @ self.weight).tanh()

    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4, dtype=torch.complex64)

        def forward(self, x: Tensor) -> Tensor:
            y = self.lin(x.to(torch.complex64))
            return (y * y.conj()).real.tanh()

    for model in (Sparse(), Complex()):
        x = torch.randn(3, 4)
        run = plain_step(model, x)
        run()
        plain = {n: p.grad for n, p in model.named_parameters()}
        model.zero_grad()
        traced = trace_steps(run, model=model, inputs=x)
        assert all(strong_digest(plain[n]) == g for n, g in traced.gradients.items())
        assert kept(check_step(traced.recording.step))


def test_user_modes_see_what_they_see_in_a_plain_step() -> None:
    seen: list[str] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    model, x = build("noisy")
    with torch.no_grad(), Dispatch(), Functions():
        model(x)
    plain = list(seen)
    for outside in (True, False):
        seen.clear()

        def inside() -> None:
            with Dispatch(), Functions():
                model(x)

        admit = Admission()
        with torch.no_grad():
            if outside:
                with Dispatch(), Functions():
                    record(lambda: model(x), model=model, inputs=x, admit=admit)
            else:
                record(inside, model=model, inputs=x, admit=admit)
        assert [s for s in seen if not s.startswith("aten.detach")] == plain


def test_module_paths_and_source_lines() -> None:
    model, x = build("block")
    step = trace(model, x).step
    forward = {op.path for op in step.ops if op.phase is Phase.FORWARD}
    assert {"norm1", "qkv", "out", "mlp.0", "mlp.1", "mlp.2", ""} <= forward
    backward = [op for op in step.ops if op.phase is Phase.BACKWARD and op.target == "aten.gelu_backward.default"]
    assert [op.path for op in backward] == ["mlp.1"]
    attention = next(op for op in step.ops if "scaled_dot_product" in op.target)
    assert attention.source.startswith("models.py:")
    assert {op.source.partition(":")[0] for op in step.ops if op.path == "norm1" and op.phase is Phase.FORWARD} == {
        "models.py"
    }


def test_a_model_of_torch_modules_alone_has_their_lines() -> None:
    model, x = nn.Sequential(nn.Linear(4, 1), nn.Tanh()), torch.ones(1, 4)
    step = trace(
        model, x, whole_step(model, Batch(args=(x,)), None, None)
    ).step  # no line of this file is one of the step's
    sources = {op.path: op.source for op in step.ops if op.phase is Phase.FORWARD and op.path}
    assert sources["0"].startswith("torch/nn/modules/linear.py:")
    assert sources["1"].startswith("torch/nn/modules/activation.py:")


def test_calls_of_the_model_are_told() -> None:
    model, x = build("mlp")

    def run() -> None:
        for part in x.chunk(2):
            model(part).square().sum().backward()

    recording = trace(model, x, run)
    assert len(recording.inside) == 2
    assert all(len(call) > 0 for call in recording.inside)
    inside = [i for call in recording.inside for i in call]
    assert inside == sorted(set(inside))
    outside = [save for save in recording.step.saves if save.index not in inside]
    assert [save.node for save in outside] == ["PowBackward0"] * 2


def test_gradients_that_backward_makes_are_gradients() -> None:
    model, x = build("mlp")
    step = check_step(trace_steps(plain_step(model, x), model=model, inputs=x, grads="fresh").recording.step)
    born = [s for s in step.storages if s.category is Category.GRADIENT]
    assert {s.name for s in born} == {n for n, _ in model.named_parameters()}
    assert all(step.ops[s.birth].phase is Phase.BACKWARD and s.held_until == len(step.ops) - 1 for s in born)


def test_optimizer_ops_have_their_phase() -> None:
    model, x = build("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = plain_step(model, x)

    def run() -> None:
        plain()
        optimizer.step()

    traced = trace_steps(run, model=model, inputs=x, optimizer=optimizer)
    step = check_step(traced.recording.step)
    phases = [op.phase for op in step.ops if not op.target.startswith("profiler.")]
    assert Phase.OPTIMIZER in phases
    assert phases[phases.index(Phase.OPTIMIZER) :] == [Phase.OPTIMIZER] * phases.count(Phase.OPTIMIZER)
    parameters = {s.id for s in step.storages if s.category is Category.PARAMETER}
    assert {s for op in step.ops if op.phase is Phase.OPTIMIZER for s in op.writes} >= parameters


def _globals() -> tuple[Any, ...]:
    autograd: Any = torch._C._autograd  # type: ignore[attr-defined]
    return (
        dict(module_module._global_forward_hooks),
        dict(module_module._global_forward_pre_hooks),
        dict(optimizer_module._global_optimizer_pre_hooks),
        dict(optimizer_module._global_optimizer_post_hooks),
        autograd._saved_tensors_hooks_disable,
        autograd._top_saved_tensors_default_hooks(False),
        torch._C._len_torch_dispatch_stack(),
    )


def test_an_error_leaves_nothing_behind() -> None:
    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"broken at {tuple(self.lin(x).shape)}")

    before = _globals()
    model, x = nn.Sequential(nn.Linear(4, 4), Breaks()), torch.randn(2, 4)
    with pytest.raises(RuntimeError, match="broken at"):
        trace_steps(plain_step(model, x), model=model, inputs=x)
    assert _globals() == before
    mlp, y = build("mlp")
    check_step(trace_steps(plain_step(mlp, y), model=mlp, inputs=y).recording.step)
    assert _globals() == before


def test_an_op_that_raises_and_is_caught_is_written_down() -> None:
    x = torch.randn(3)

    def run() -> Tensor:
        try:
            return x @ torch.randn(4, 4)
        except RuntimeError:
            return x * 2.0

    step = record(run, model=None, inputs=x, admit=Admission()).step
    failed = next(op for op in step.ops if not op.replayable)
    assert "raised" in failed.why_not
    assert step.ops[-1].target == "aten.mul.Tensor"


def test_autocast_casts_in_every_step() -> None:
    model, x = Mlp(8, 1), torch.randn(2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        traced = trace_steps(plain_step(model, x), model=model, inputs=x)
    first, second = ([op.target for op in r.step.ops] for r in (traced.first, traced.recording))
    assert first.count("aten._to_copy.default") == second.count("aten._to_copy.default") > 0


def test_steps_survive_json() -> None:
    model, x = build("conv")
    step = trace(model, x).step
    assert Step.from_json(step.to_json()) == step


def test_calibration() -> None:
    counts = unshared_counts()
    assert counts is not None
    assert all(n > 0 for n in counts)
    t = torch.zeros(4, 5, 6)
    assert is_dense(t)
    assert is_dense(t.permute(2, 0, 1))
    assert is_dense(t[:2])
    assert not is_dense(t[:, :2])
    assert not is_dense(torch.zeros(1).expand(3))
