from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from keepwise.ir import Step, Value
from keepwise.ir.settle import are_disjoint, settle_saves
from keepwise.ir.validate import validate
from keepwise.plan import get_planner
from keepwise.plan.droppable import droppable
from keepwise.simulate import simulate
from tests.steps import StepBuilder, Tensor, gpt_like, in_place_stream, msgspec_replace


def value(shape: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: str = "float32") -> Value:
    return Value(
        id=0, storage=0, version=0, view=0, shape=shape, stride=stride, offset=offset, dtype=dtype, producer=-1
    )


def elements(v: Value) -> set[int]:
    ranges = [range(n) for n in v.shape]
    return {v.offset + sum(i * s for i, s in zip(at, v.stride, strict=True)) for at in itertools.product(*ranges)}


views = st.integers(1, 3).flatmap(
    lambda n: st.builds(
        value,
        st.tuples(*[st.integers(0, 3)] * n),
        st.tuples(*[st.integers(0, 9)] * n),
        st.integers(0, 20),
    )
)


@settings(max_examples=500, deadline=None)
@given(views, views)
def test_views_called_disjoint_share_no_element(a: Value, b: Value) -> None:
    if are_disjoint(a, b):
        assert not elements(a) & elements(b)


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 3), st.integers(2, 5), st.integers(1, 4), st.data())
def test_parts_of_a_split_are_disjoint(rows: int, parts: int, width: int, data: st.DataObject) -> None:
    """Along either axis of a row-major matrix."""
    i, j = data.draw(st.integers(0, parts - 1)), data.draw(st.integers(0, parts - 1))
    columns = [value((rows, width), (parts * width, 1), k * width) for k in (i, j)]
    blocks = [value((rows, width), (width, 1), k * rows * width) for k in (i, j)]
    assert are_disjoint(*columns) == are_disjoint(*blocks) == (i != j)


def test_other_types_are_not_judged() -> None:
    assert not are_disjoint(value((2,), (1,), 0), value((2,), (1,), 8, "float16"))


def gates() -> tuple[Step, Tensor]:
    """One storage, split in two parts; each is overwritten in place and saved at once, as an LSTM cell does."""
    b = StepBuilder()
    x = b.one(b.input(8), size=8)
    left, right = b.view(x), b.view(x)
    b.write(left, save_result=True, target="aten.sigmoid_.default")
    b.write(right, save_result=True, target="aten.tanh_.default")
    step = b.build(b.one(left, right, size=4))
    values = [
        msgspec_replace(v, shape=(4,), offset=4 * (v.view == right.view)) if v.view in (left.view, right.view) else v
        for v in step.values
    ]
    return msgspec_replace(step, values=tuple(values)), x


def test_a_part_beside_later_writes_is_named_by_the_last_version() -> None:
    step, x = gates()
    settled = settle_saves(step)
    assert [step.values[s.value].version for s in step.saves] == [1, 2]
    assert [settled.values[s.value].version for s in settled.saves] == [2, 2]
    assert [settled.values[s.value].view for s in settled.saves] == [step.values[s.value].view for s in step.saves]
    assert validate(settled) == []
    assert x.storage not in droppable(step)
    assert x.storage in droppable(settled)
    schedule = get_planner("recompute_everything").plan(settled, None)
    assert simulate(settled, schedule).dropped_bytes == 8


def test_a_part_that_is_overwritten_keeps_its_version() -> None:
    step, _ = gates()
    whole = tuple(msgspec_replace(v, shape=(8,), offset=0) for v in step.values)
    step = msgspec_replace(step, values=whole)
    assert settle_saves(step) is step


def test_other_steps_are_returned_as_they_are() -> None:
    for step in (gpt_like(2, optimizer=True), in_place_stream(3), Step()):
        assert settle_saves(step) is step
