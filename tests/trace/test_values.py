"""Identity: storages, objects, versions, births, deaths and reads of small programs whose answers are known."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from keepwise.ir import NO_OP, Category, Phase, Step, Storage
from keepwise.trace import record
from keepwise.trace.admission import Admission
from keepwise.trace.spill import Copy, Geometry
from tests.steps import check_step


def trace(run: Callable[[], Any], **kwargs: Any) -> Step:
    return check_step(record(run, model=None, admit=Admission(), **kwargs).step)


def storage_made_by(step: Step, target: str) -> Storage:
    return next(
        step.storages[step.values[op.outputs[0]].storage] for op in step.ops if op.target == target and op.outputs
    )


def targets(step: Step) -> list[str]:
    return [op.target.removeprefix("aten.") for op in step.ops]


def test_an_in_place_op_returns_the_same_object_at_the_next_version() -> None:
    def run() -> Tensor:
        a = torch.zeros(4)
        return a.add_(1.0).mul_(2.0).neg()

    step = trace(run)
    zeros, add, mul, neg = step.ops
    a0, a1, a2 = (step.values[op.outputs[0]] for op in (zeros, add, mul))
    assert {a0.view, a1.view, a2.view} == {a0.id}
    assert [a0.version, a1.version, a2.version] == [0, 1, 2]
    assert [a0.producer, a1.producer, a2.producer] == [0, 1, 2]
    assert neg.inputs == (a2.id,)
    assert step.storages[a0.storage].versions == 3
    assert step.dependencies(a2.id) == (0, 2)


def test_a_write_through_a_view_makes_a_new_version_of_the_base() -> None:
    def run() -> Tensor:
        base = torch.zeros(4, 4)
        row = base[1]
        row.fill_(5.0)
        return base.sum() + row.sum()

    step = trace(run)
    fill = next(op for op in step.ops if op.target == "aten.fill_.Scalar" or op.target == "aten.fill_.Tensor")
    sums = [op for op in step.ops if op.target == "aten.sum.default"]
    base = step.values[sums[0].inputs[0]]
    row = step.values[sums[1].inputs[0]]
    assert base.storage == row.storage == fill.writes[0]
    assert (base.version, base.producer) == (1, fill.index)
    assert step.values[base.view].version == 0
    assert base.view != row.view
    assert row.offset == 4


def test_metadata_changed_in_place_counts_as_a_write() -> None:
    def run() -> Tensor:
        a = torch.zeros(2, 3)
        a.t_()
        return a.neg()

    step = trace(run)
    before, after = step.values[step.ops[0].outputs[0]], step.values[step.ops[2].inputs[0]]
    assert (before.view, before.version, after.version) == (after.view, 0, 1)
    assert (before.shape, after.shape) == ((2, 3), (3, 2))


def test_births_and_deaths() -> None:
    x = torch.randn(8)

    def run() -> Tensor:
        a = x.sin()  # op 0
        b = a.cos()  # op 1
        del a
        c = b.exp()  # op 2
        view = b[2:]  # op 3
        del b
        d = view.neg()  # op 4
        del view, c
        return d.abs()  # op 5

    step = trace(run, inputs=x)
    lives = {
        op.target: (s.birth, s.held_until)
        for op in step.ops
        for s in [step.storages[step.values[op.outputs[0]].storage]]
    }
    assert lives["aten.sin.default"] == (0, 1)
    assert lives["aten.cos.default"] == (1, 4)
    assert lives["aten.exp.default"] == (2, 4)
    assert lives["aten.abs.default"] == (5, 5)
    assert all(s.saved_until == NO_OP for s in step.storages)


def test_two_deaths_of_a_saved_tensor() -> None:
    x = torch.randn(8, requires_grad=True)

    def run(hold: list[Tensor]) -> None:
        a = x.sin()
        b = a.exp()
        hold.append(b)
        loss = b.exp().sum()
        del a, b
        hold.clear()
        loss = loss * 1.0
        loss.backward()

    step = trace(lambda: run([]), inputs=x)
    (first, second) = [op for op in step.ops if op.target == "aten.exp.default"]
    b = step.storages[step.values[first.outputs[0]].storage]
    assert step.ops[b.held_until].target == "aten.sum.default", "`hold` is cleared before the last product"
    assert step.ops[b.saved_until].phase is Phase.BACKWARD
    (save,) = [s for s in step.saves if step.values[s.value].storage == b.id]
    assert save.node == "ExpBackward0"
    assert save.at == first.index + 1
    assert [step.ops[i].target for i in (save.reads[0].first, save.reads[0].last)] == ["aten.mul.Tensor"] * 2
    assert save.reads[0].last == b.saved_until
    assert second.index > first.index


def test_held_to_the_end_if_someone_keeps_it() -> None:
    x = torch.randn(8, requires_grad=True)

    def run() -> Tensor:
        a = x.exp()
        a.sum().backward()
        return a.detach()

    step = trace(run, inputs=x)
    a = storage_made_by(step, "aten.exp.default")
    assert a.held_until == len(step.ops) - 1


def test_a_graph_that_is_kept_saves_until_it_dies() -> None:
    x = torch.randn(8, requires_grad=True)

    def run() -> Tensor:
        loss = x.exp().exp().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        del loss
        return x.detach().neg()

    step = trace(run, inputs=x)
    inner = storage_made_by(step, "aten.exp.default")
    save = step.saved_storages[inner.id][0]
    assert len(save.reads) == 2
    assert inner.saved_until == save.reads[1].last < len(step.ops) - 1


def test_a_forward_without_backward_saves_until_its_graph_dies() -> None:
    x = torch.randn(8, requires_grad=True)

    def run() -> Tensor:
        y = x.exp()
        z = y.exp()
        del y
        z = z.detach()
        return z.neg()

    step = trace(run, inputs=x)
    y = storage_made_by(step, "aten.exp.default")
    assert step.ops[y.saved_until].target == "aten.detach.default"
    assert step.saved_storages[y.id][0].reads == ()


def test_saved_views_share_their_storage_when_they_come_back() -> None:
    x = torch.randn(4, 6, requires_grad=True)
    seen: list[tuple[int, ...]] = []

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            base = t * 2.0
            ctx.save_for_backward(base[1], base.t(), base)
            return base.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            row, turned, base = ctx.saved_tensors
            seen.append((row.data_ptr() - base.data_ptr(), turned.data_ptr() - base.data_ptr(), *turned.stride()))
            assert torch.equal(turned.t(), base)
            assert torch.equal(row, base[1])
            return grads[0] * 2.0 * torch.ones_like(base)

    step = trace(lambda: Pair.apply(x).backward(), inputs=x)
    assert seen == [(24, 0, 1, 6)]
    assert len({step.values[s.value].storage for s in step.saves}) == 1


def test_a_saved_tensor_that_somebody_takes_out_of_backward_is_held() -> None:
    x = torch.randn(8, requires_grad=True)
    stolen: list[Tensor] = []

    class Steal(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            y = t.exp()
            ctx.save_for_backward(y)
            return y.sum()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (y,) = ctx.saved_tensors
            stolen.append(y)
            return grads[0] * y

    def run() -> Tensor:
        Steal.apply(x).backward()
        return x.detach().neg()

    step = trace(run, inputs=x)
    y = storage_made_by(step, "aten.exp.default")
    assert y.held_until == len(step.ops) - 1


def test_rrelus_noise_is_saved_as_it_is_after_the_op() -> None:
    x = torch.randn(16, requires_grad=True)
    step = trace(lambda: torch.nn.functional.rrelu(x, training=True).sum().backward(), inputs=x)
    noise = storage_made_by(step, "aten.empty_like.default")
    (save,) = step.saved_storages[noise.id]
    assert (step.values[save.value].version, noise.versions) == (1, 2)
    assert step.is_final(save.value)


def test_gradients_are_those_of_a_plain_step_when_saved_tensors_are_written_later() -> None:
    """Copies follow what plain autograd would read in backward: here through views with version counters of their own."""
    cell = torch.nn.LSTMCell(8, 8)
    x = torch.randn(3, 8)

    def run() -> None:
        h, c = cell(x)
        h, c = cell(x, (h, c))
        (h * c).sum().backward()

    run()
    plain = [p.grad for p in cell.parameters()]
    for p in cell.parameters():
        p.grad = None
    trace(run, inputs=(x, list(cell.parameters())))
    assert all(
        torch.equal(a, p.grad)
        for a, p in zip(plain, cell.parameters(), strict=True)
        if a is not None and p.grad is not None
    )


def test_the_engines_additions_are_in_place_where_nobody_else_holds_the_first() -> None:
    x = torch.randn(16, requires_grad=True)

    def run() -> None:
        y = x * 2.0
        (y.sin() + y.exp() + y.neg()).sum().backward()

    step = trace(run, inputs=x)
    backward = [op.target for op in step.ops if op.phase is Phase.BACKWARD]
    assert backward.count("aten.add_.Tensor") == 2
    assert "aten.add.Tensor" not in backward


def test_additions_of_a_node_itself_stay_out_of_place() -> None:
    x = torch.randn(16, requires_grad=True)

    class Adds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, t: Tensor) -> Tensor:
            ctx.save_for_backward(t)
            return t * 2.0

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            (t,) = ctx.saved_tensors
            return (grads[0] * 2.0) + (t * 0.0)

    step = trace(lambda: Adds.apply(x).sum().backward(), inputs=x)
    assert [op.target for op in step.ops if op.phase is Phase.BACKWARD].count("aten.add.Tensor") == 1


def test_what_comes_from_nowhere_is_kept() -> None:
    x = torch.randn(3)

    def run() -> Tensor:
        constant = torch.tensor([1.0, 2.0, 3.0])
        foreign = torch.frombuffer(bytearray(12), dtype=torch.float32)
        return x * constant + foreign

    step = trace(run, inputs=x)
    found = [s.keep_reason for s in step.storages if s.birth == NO_OP and s.category is Category.ACTIVATION]
    assert sorted(found) == ["a constant", "made by code that shows no ops"]


def test_what_lived_before_the_step_is_an_input_of_it() -> None:
    x, outside = torch.randn(3), torch.randn(3)
    first = record(lambda: x * outside, model=None, inputs=x, admit=Admission())
    second = record(lambda: x * outside, model=None, inputs=x, admit=Admission(), leaves=first.leaves)
    (op,) = second.step.ops
    storage = second.step.storages[second.step.values[op.inputs[1]].storage]
    assert (storage.category, storage.keep_reason) == (Category.INPUT, "")


def test_nothing_is_kept_alive_by_a_trace() -> None:
    x = torch.randn(64, requires_grad=True)
    died: list[int] = []

    def run() -> None:
        y = x.exp()
        weakref.finalize(y.untyped_storage(), died.append, 1)
        y.exp().sum().backward()

    recording = record(run, model=None, inputs=x, admit=Admission())
    gc.collect()
    assert died == [1]
    assert recording.step.ops


def test_copies_come_back_bit_for_bit() -> None:
    for to_disk in (False, True):
        base = torch.randn(300, 400)
        base[0, 0] = float("nan")
        view = base[10:, ::3].t()
        copy = Copy(base.untyped_storage(), to_disk=to_disk)
        geometry = Geometry(view)
        expected = view.clone()
        base.zero_()
        storage, is_new = copy.back()
        again = geometry.on(storage)
        assert is_new
        assert copy.back() == (storage, False) or copy.back()[0]._cdata == storage._cdata
        assert (again.stride(), again.storage_offset()) == (view.stride(), view.storage_offset())
        assert torch.equal(again.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
        del storage, again
        assert copy.back()[1], "nobody held it any more"
