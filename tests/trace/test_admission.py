"""What ops are found to do, against what they are known to do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keepwise.ir import Op, Phase, Step
from keepwise.trace import record
from keepwise.trace.admission import Admission, same_bytes
from keepwise.trace.workspace import run_with_workspace


def trace(run: Callable[[], Any], **kwargs: Any) -> Step:
    return record(run, model=None, admit=Admission(), spill=False, **kwargs).step


def find(step: Step, target: str) -> Op:
    found = [op for op in step.ops if op.target == target]
    assert found, f"no {target} among {[op.target for op in step.ops]}"
    return found[0]


def written(step: Step, op: Op) -> list[int]:
    """Sizes of the storages that an op writes."""
    return [step.storages[s].nbytes for s in op.writes]


def test_batch_norm_moves_its_statistics_although_its_schema_does_not_say_so() -> None:
    norm = nn.BatchNorm1d(6, affine=True)
    x = torch.randn(5, 6)
    step = record(lambda: norm(x), model=norm, inputs=x, admit=Admission(), spill=False).step
    op = find(step, "aten.native_batch_norm.default")
    names = [step.storages[s].name for s in op.writes]
    assert names == ["running_mean", "running_var"]
    assert op.replayable, op.why_not
    assert not {step.values[v].storage for v in op.inputs} & set(op.writes), "the recipe needs no statistics"
    assert [step.storages[s].versions for s in op.writes] == [2, 2]


def test_batch_norm_in_eval_writes_nothing_and_reads_its_statistics() -> None:
    norm = nn.BatchNorm1d(6).eval()
    x = torch.randn(5, 6)
    step = record(lambda: norm(x), model=norm, inputs=x, admit=Admission(), spill=False).step
    op = find(step, "aten.native_batch_norm.default")
    assert op.writes == ()
    assert {"running_mean", "running_var"} <= {step.storages[step.values[v].storage].name for v in op.inputs}


def test_notes_of_a_recurrent_layer_have_gaps_and_are_made_again_all_the_same() -> None:
    layer = nn.LSTM(8, 8)
    x = torch.randn(5, 2, 8)
    step = record(lambda: layer(x)[0].sum().backward(), model=layer, inputs=x, admit=Admission(), spill=False).step
    op = find(step, "aten.mkldnn_rnn_layer.default")
    assert op.replayable, op.why_not
    assert {step.values[v].storage for v in op.outputs if v >= 0} & set(step.saved_storages)


def test_alignments_of_texts_of_several_lengths_are_made_again() -> None:
    scores, texts = torch.randn(20, 3, 5, requires_grad=True), torch.randint(1, 5, (3, 8))
    others = [torch.full((3, 20, 17), float(i)) for i in range(50)]  # memory to be found in the gaps
    del others[::2]
    loss = nn.CTCLoss()
    step = trace(lambda: loss(scores, texts, (20, 11, 7), (8, 2, 1)).backward(), inputs=(scores, texts))
    op = find(step, "aten._ctc_loss.default")
    assert op.replayable, op.why_not


def test_rrelu_writes_its_noise_and_draws() -> None:
    x = torch.randn(64, 32)
    step = trace(lambda: nn.functional.rrelu(x, training=True), inputs=x)
    op = find(step, "aten.rrelu_with_noise.default")
    assert written(step, op) == [x.nbytes]
    assert (op.random, op.rng_bytes, op.replayable) == ("cpu", torch.get_rng_state().numel(), True)


def test_in_place_ops_write_even_if_no_bit_changes() -> None:
    x = torch.ones(8)
    step = trace(lambda: x.relu_().add_(0.0), inputs=x)
    assert [op.writes for op in step.ops] == [(0,), (0,)]
    assert step.storages[0].versions == 3


def test_out_variants_write_what_they_are_given() -> None:
    x = torch.randn(4, 4)

    def run() -> Tensor:
        out = torch.empty(4, 4)
        torch.mul(x, 2.0, out=out)
        return out.sin()

    step = trace(run, inputs=x)
    op = find(step, "aten.mul.out")
    (storage,) = op.writes
    assert storage == step.values[op.outputs[0]].storage
    assert step.values[find(step, "aten.sin.default").inputs[0]].version == 1


def test_dropout_draws_from_the_default_generator_and_replays() -> None:
    x = torch.randn(50)
    op = find(trace(lambda: torch.native_dropout(x, 0.5, True), inputs=x), "aten.native_dropout.default")
    assert (op.random, op.replayable) == ("cpu", True)


def test_draws_leave_the_generators_where_a_plain_step_does() -> None:
    x = torch.randn(50)

    def run() -> Tensor:
        return torch.native_dropout(x, 0.5, True)[0] * torch.rand(50) + torch.empty(50).normal_()

    torch.manual_seed(3)
    plain = run()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    traced = record(run, model=None, admit=Admission(), spill=False)
    assert same_bytes(traced.result, plain)
    assert torch.equal(torch.get_rng_state(), after)


def test_an_own_generator_is_told_apart_and_reported() -> None:
    own = torch.Generator().manual_seed(5)
    before = own.get_state()
    recording = record(lambda: torch.rand(9, generator=own), model=None, admit=Admission(), spill=False)
    op = find(recording.step, "aten.rand.generator")
    assert (op.random, op.replayable) == ("own", True)
    ((seen, state),) = recording.generators
    assert seen._cdata == own._cdata
    assert torch.equal(state, before)


def test_views_are_views_and_cost_nothing() -> None:
    x = torch.randn(4, 6)

    def run() -> Tensor:
        a, b = x.t().split(3)
        return (a.unsqueeze(0)[:, 1:] * 1.0).sum() + b.detach().sum()

    step = trace(run, inputs=x)
    views = {op.target for op in step.ops if op.is_view}
    assert {"aten.t.default", "aten.split.Tensor", "aten.unsqueeze.default", "aten.slice.Tensor"} <= views
    assert not find(step, "aten.mul.Tensor").is_view
    assert all(op.replayable and op.workspace_bytes == 0 for op in step.ops if op.is_view)


def test_empty_results_need_not_repeat() -> None:
    step = trace(lambda: torch.empty(100).fill_(1.0) + torch.zeros(3).new_empty(100).zero_())
    assert all(op.replayable for op in step.ops)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Operators written in Python that stand for kernels of an extension: those may be tried."""
    monkeypatch.setattr("keepwise.trace.admission.is_opaque", lambda func: "")
    monkeypatch.setattr("keepwise.trace.admission.is_python", lambda func: False)
    lib = torch.library.Library("keepwise_test", "FRAGMENT")
    yield lib
    lib._destroy()


def test_an_op_that_does_not_repeat_is_found_and_its_results_are_kept(library: Any) -> None:
    library.define("jitter(Tensor x) -> Tensor")
    library.impl("jitter", lambda x: x * random.random(), "CPU")
    x = torch.randn(5)
    step = trace(lambda: torch.ops.keepwise_test.jitter(x).exp(), inputs=x)
    op = find(step, "keepwise_test.jitter.default")
    assert not op.replayable
    assert "other bits" in op.why_not
    assert "other bits" in step.storages[step.values[op.outputs[0]].storage].keep_reason
    assert find(step, "aten.exp.default").replayable


def test_a_write_through_numpy_is_found(library: Any) -> None:
    def bump(x: Tensor) -> Tensor:
        x.numpy()[...] += 1.0
        return x.sum()

    library.define("bump(Tensor x) -> Tensor")
    library.impl("bump", bump, "CPU")
    x, y = torch.zeros(6), torch.zeros(7)
    version = y._version
    step = trace(lambda: torch.ops.keepwise_test.bump(x), inputs=x)
    assert written(step, find(step, "keepwise_test.bump.default")) == [24]
    assert np.array_equal(x.numpy(), np.ones(6)), "the real run happened once"
    assert y._version == version


def test_what_an_op_written_in_python_does_is_measured_in_its_one_run() -> None:
    calls = []

    def bump(x: Tensor) -> Tensor:
        calls.append(1)
        x.numpy()[...] += 1.0
        return x.sum()

    lib = torch.library.Library("keepwise_test_python", "FRAGMENT")
    try:
        lib.define("bump(Tensor x) -> Tensor")
        lib.impl("bump", bump, "CPU")
        x = torch.zeros(6)
        step = trace(lambda: torch.ops.keepwise_test_python.bump(x), inputs=x)
        op = find(step, "keepwise_test_python.bump.default")
        assert len(calls) == 1
        assert written(step, op) == [24]
        assert not op.replayable
        assert "Python" in op.why_not
    finally:
        lib._destroy()


def test_an_op_that_fails_when_run_again_is_kept(library: Any) -> None:
    calls = []

    def once(x: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("only once")
        return x + 1.0

    library.define("once(Tensor x) -> Tensor")
    library.impl("once", once, "CPU")
    x = torch.zeros(3)
    op = find(trace(lambda: torch.ops.keepwise_test.once(x), inputs=x), "keepwise_test.once.default")
    assert not op.replayable
    assert "only once" in op.why_not


def test_each_distinct_op_is_admitted_once(library: Any) -> None:
    calls: list[int] = []

    def count(x: Tensor) -> Tensor:
        calls.append(x.numel())
        return x + 1.0

    library.define("count(Tensor x) -> Tensor")
    library.impl("count", count, "CPU")
    x, y = torch.zeros(3), torch.zeros(4)
    admit = Admission()
    record(lambda: torch.ops.keepwise_test.count(x), model=None, admit=admit, spill=False)
    first = len(calls)
    for _ in range(3):
        record(lambda: torch.ops.keepwise_test.count(x), model=None, admit=admit, spill=False)
    assert len(calls) == first + 3
    record(lambda: torch.ops.keepwise_test.count(y), model=None, admit=admit, spill=False)
    assert calls.count(4) > 1


def test_backward_ops_are_timed_but_never_run_again(library: Any) -> None:
    calls: list[int] = []

    def double(x: Tensor) -> Tensor:
        calls.append(1)
        return x * 2.0

    library.define("double(Tensor x) -> Tensor")
    library.impl("double", double, "CPU")

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * 2.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return torch.ops.keepwise_test.double(grads[0])

    x = torch.randn(4, requires_grad=True)
    step = trace(lambda: Twice.apply(x).sum().backward(), inputs=x)
    op = find(step, "keepwise_test.double.default")
    assert (op.phase, len(calls)) == (Phase.BACKWARD, 1)
    assert op.seconds > 0.0


def test_seconds_flops_and_signatures() -> None:
    a, b = torch.randn(64, 32), torch.randn(32, 16)
    step = trace(lambda: [a @ b, a @ b, a.t() @ a, (a * 2.0), (a * 3.0)], inputs=(a, b))
    mm = [op for op in step.ops if op.target == "aten.mm.default"]
    assert [op.flops for op in mm] == [2 * 64 * 32 * 16] * 2 + [2 * 32 * 64 * 32]
    assert mm[0].signature == mm[1].signature != mm[2].signature
    assert mm[0].seconds == mm[1].seconds > 0.0
    mul = [op for op in step.ops if op.target == "aten.mul.Tensor"]
    assert mul[0].signature != mul[1].signature, "literals count"


def test_workspace_is_what_the_kernel_takes_beyond_its_results() -> None:
    size = 4096

    def run() -> Tensor:
        scratch = torch.empty(2 * size, dtype=torch.uint8)
        more = torch.empty(size, dtype=torch.uint8)
        del scratch
        return more

    result, workspace = run_with_workspace(run)
    assert result.nbytes == size
    assert workspace == 2 * size
    with torch.autograd.profiler.profile(use_cpu=True):
        assert run_with_workspace(run)[1] is None


def test_same_bytes_tells_bits_apart() -> None:
    nan = torch.tensor([float("nan"), 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, torch.tensor([float("nan"), -0.0]))
    assert same_bytes(torch.empty(0), torch.empty(0))
    assert same_bytes(torch.eye(3)[:, ::2], torch.eye(3)[:, ::2].clone())
