import hypothesis.strategies as st
from hypothesis import given

from keepwise.measure import AllocatorEvent, peak_of
from keepwise.measure.categories import peak_by_category


def event(delta, address, node="", time=0):
    return AllocatorEvent(delta_bytes=delta, address=address, time_ns=time, device="cpu", op="", node=node)


def test_each_block_by_what_becomes_of_it():
    events = [
        event(-8, 1),  # The old gradient goes.
        event(100, 2),  # Freed in backward: an activation.
        event(7, 3),
        event(-7, 3),  # Gone before the peak.
        event(30, 4),  # Freed in forward, after the peak.
        event(20, 5, "MulBackward0"),
        event(8, 6, "AccumulateGrad"),  # The new gradient.
        event(5, 7),  # Never freed: the output.
        event(-30, 4),
        event(-100, 2, "MulBackward0"),
        event(-20, 5),
    ]
    before = {0: ("parameter", 8), 1: ("gradient", 8)}
    after = {0: ("parameter", 8), 6: ("gradient", 8)}
    assert peak_by_category(events, before, after) == {
        "parameter": 8,
        "gradient": 8,
        "activation": 105,
        "temporary": 50,
    }


@st.composite
def timelines(draw):
    """Allocations and frees of a few addresses, some of them occupied before, as an allocator would do them."""
    sizes = {address: draw(st.integers(1, 50)) for address in range(3)}
    before = {address: ("parameter", size) for address, size in sizes.items()}
    events = []
    for _ in range(draw(st.integers(0, 30))):
        address = draw(st.integers(0, 7))
        node = draw(st.sampled_from(["", "XBackward0"]))
        if address in sizes:
            events.append(event(-sizes.pop(address), address, node))
        else:
            sizes[address] = draw(st.integers(1, 50))
            events.append(event(sizes[address], address, node))
    after = {address: ("gradient", size) for address, size in sizes.items() if draw(st.booleans())}
    return events, before, after


@given(timelines())
def test_categories_add_up_to_the_peak(timeline):
    events, before, after = timeline
    found = peak_by_category(events, before, after)
    assert sum(found.values()) == sum(size for _, size in before.values()) + peak_of(events)
    assert all(size > 0 for size in found.values())
