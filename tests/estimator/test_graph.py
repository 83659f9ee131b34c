"""Live bytes of small graphs by hand, and the closure of what is rebuilt over random graphs."""

import hypothesis.strategies as st
from hypothesis import given, settings

from keepwise.estimator.context import Context
from keepwise.estimator.graph import Graph
from keepwise.estimator.operators import Builder

CONTEXT = {
    "batch": 1, "rows": 4, "length": 4, "source_rows": 0, "source_length": 0, "itemsize": 4, "weight_itemsize": 4, "autocast": False,
    "fp8": False, "fused_kernels": False, "attention": "sdpa", "cpu": False, "tensor_parallel": 1, "sequence_parallel": False,
    "context_parallel": 1, "expert_parallel": 1, "train_base": True, "lora_rank": 0, "lora_targets": frozenset(), "lora_dropout": 0.0,
    "quantised": False, "checkpointed": False, "held_gradients": False,
}  # fmt: skip


def builder(**changes):
    return Builder("test", Context(**{**CONTEXT, **changes}))


def chain(saves):
    """x -> a -> b -> c, 16 bytes each; operator i saves what `saves[i]` says."""
    b = builder()
    values = [b.enter("x", 4, 4)]
    b.graph.entry = values[0]
    for name, what in zip("abc", saves, strict=True):
        values.append(b.pointwise(values[-1], name, "m", saves=what))
    b.graph.exit = values[-1]
    return b.graph


def test_forward_frees_what_nobody_reads_again():
    walk = chain(["nothing"] * 3).walk()
    assert walk.forward_peak == 32  # one input and one result at a time


def test_forward_holds_what_is_saved():
    walk = chain(["input"] * 3).walk()
    assert walk.forward_peak == 64


def test_backward_frees_each_saved_value_after_its_operator():
    graph = chain(["input"] * 3)
    walk = graph.walk()
    # At the first operator of backward: x, a and b saved, the gradient of c and the new gradient of b.
    assert walk.backward_peak == 3 * 16 + 2 * 16
    assert walk.backward_saved == 48
    assert walk.first_gradients == 16


def test_a_value_saved_twice_lives_until_its_first_reader_in_forward_order():
    b = builder()
    x = b.graph.entry = b.enter("x", 4, 4)
    first = b.pointwise(x, "first", "m", saves="input")
    second = b.pointwise(x, "second", "m", saves="input")
    b.graph.exit = b.multiply(first, second, "product", "m")
    assert b.graph.bytes_of(b.graph.saved()) == 48
    assert b.graph.walk().backward_peak == 48 + 16 + 32  # x, both factors; gradient of the product and of both factors


def test_sums_pass_their_gradient_on():
    b = builder()
    x = b.graph.entry = b.enter("x", 4, 4)
    y = b.pointwise(x, "branch", "m", saves="input")
    b.graph.exit = b.add(x, y, "sum", "m")
    # The sum's gradient is that of both; only the branch makes a new one.
    assert b.graph.walk().backward_peak == 16 + 16 + 16


def test_views_hold_no_bytes_but_have_gradients():
    b = builder()
    x = b.graph.entry = b.enter("x", 8, 4)
    left, right = b.views(x, (4, 4), ("left", "right"), "m")
    b.graph.exit = b.multiply(left, right, "product", "m")
    assert b.graph.saved() == {x}
    assert b.graph.bytes_of({left, right}) == 0
    # x saved; gradients: of the product, of both halves.
    assert b.graph.walk().backward_peak == 32 + 16 + 2 * 16


def test_weight_gradients_are_added_to_held_ones():
    fresh, held = builder(), builder(held_gradients=True)
    for b in (fresh, held):
        x = b.graph.entry = b.enter("x", 16, 4)
        b.graph.exit = b.linear(x, 8, 8, "projection", "m")
    assert held.graph.walk().backward_peak - fresh.graph.walk().backward_peak == 8 * 8 * 4


def random_graph(draw):
    b = builder()
    values = [b.enter("x", 4, 4)]
    b.graph.entry = values[0]
    for i in range(draw(st.integers(1, 10))):
        inputs = draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True))
        y = b.value(f"v{i}", draw(st.integers(1, 9)), 4)
        saves = [v for v in (*inputs, y) if draw(st.booleans())]
        b.op(f"op{i}", "m", inputs, [y], saves)
        values.append(y)
    b.graph.exit = values[-1]
    return b.graph


graphs = st.composite(random_graph)()


@settings(max_examples=200, deadline=None)
@given(graphs, st.data())
def test_what_is_rebuilt_is_enough_and_no_more(graph: Graph, data):
    saved = sorted(graph.saved())
    kept = frozenset(v for v in saved if data.draw(st.booleans()))
    ops, needed = graph.rebuild(kept)
    assert needed <= {graph.entry}

    def reachable(order):
        there = set(kept | needed)
        for i in order:
            if set(graph.ops[i].inputs) <= there:
                there |= set(graph.ops[i].outputs)
        return there

    assert set(saved) <= reachable(ops)
    for left_out in ops:
        assert not set(saved) <= reachable([i for i in ops if i != left_out])


@settings(max_examples=200, deadline=None)
@given(graphs)
def test_walks_are_at_least_what_is_held(graph: Graph):
    walk = graph.walk()
    saved = graph.bytes_of(graph.saved())
    assert walk.forward_peak >= saved - graph.bytes_of({graph.entry} & graph.saved())
    assert walk.backward_peak >= saved
    assert 0 <= walk.backward_saved <= saved
