"""The judge on steps that are small enough to count by hand, and every rule that it enforces."""

from __future__ import annotations

import msgspec
import pytest

from keepwise.ir import Category, Schedule, Step, Window
from keepwise.ir.schedule import NO_WINDOW
from keepwise.plan import get_planner
from keepwise.plan.droppable import formally_droppable
from keepwise.plan.tables import tables_of
from keepwise.simulate import LiveKind, ScheduleError, Timeline, simulate
from tests.steps import StepBuilder, Tensor, chain, check_step, gpt_like, in_place_stream, msgspec_replace


def three_layers() -> Step:
    """Input of 10 bytes, then x0 (10), x1 (20), x2 (30), loss x3 (4); each layer saves its input.

    Moments 0-3 are forward, 4 makes the seed, 5-7 are the backward of the layers, 8 is that of the copy.
    """
    b = StepBuilder()
    x = b.one(b.input(10), size=10, target="aten.copy.default")
    x = b.one(x, size=20, save=[x], seconds=2.0, workspace=3)
    x = b.one(x, size=30, save=[x], seconds=3.0)
    return check_step(b.build(b.one(x, size=4, save=[x]), outside=1000))


X0, X1, X2 = 1, 2, 3


def test_plain_step_by_hand() -> None:
    timeline = simulate(three_layers())
    # input 10 + outside 1000, then x0, x1 with workspace 3, x2, loss; seed 4; gradients of x2 (30), x1 (20), x0 (10).
    assert timeline.live_bytes.tolist() == [1020, 1043, 1070, 1074, 1074, 1104, 1090, 1050, 1020]
    assert timeline.replay_bytes.tolist() == [0] * 9
    assert (timeline.peak_bytes, timeline.peak_moment, timeline.peak_window) == (1104, 5, NO_WINDOW)
    assert timeline.static_bytes == 1010
    assert (timeline.held_bytes, timeline.dropped_bytes) == (60, 0)
    assert timeline.by_category(5) == {"outside": 1000, "activation": 60, "temporary": 34, "input": 10}
    assert timeline.added_seconds == 0.0


def test_one_window_by_hand() -> None:
    step = three_layers()
    window = Window(id=0, start=6, stop=6, ops=(1,), retain=(X1,))
    timeline = simulate(step, Schedule(held=(X0, X2), windows=(window,)))
    # x1 is let go after op 2; at moments 3 to 5 its 20 bytes are missing; before 6 it is replayed from x0.
    assert timeline.live_bytes.tolist() == [1020, 1043, 1070, 1054, 1054, 1084, 1090, 1050, 1020]
    # Between ops 5 and 6: outside, input, x0, gradient of x2; the replay adds x1 and the workspace.
    assert timeline.replay_bytes.tolist() == [0, 0, 0, 0, 0, 0, 1000 + 10 + 10 + 30 + 20 + 3, 0, 0]
    assert timeline.added_seconds == 2.0
    assert (timeline.replayed_ops, timeline.held_bytes, timeline.dropped_bytes) == (1, 40, 20)
    assert timeline.served == {(1, 0): 0}
    assert [(x.kind, x.id, x.nbytes) for x in timeline.live_in_replay(0)] == [
        (LiveKind.OUTSIDE, -1, 1000),
        (LiveKind.STORAGE, 6, 30),
        (LiveKind.REPLAY, X1, 20),
        (LiveKind.STORAGE, 0, 10),
        (LiveKind.STORAGE, X0, 10),
        (LiveKind.WORKSPACE, 1, 3),
    ]


def test_temporaries_of_a_replay_die_at_their_last_use_and_retained_ones_live_on() -> None:
    step = three_layers()
    window = Window(id=0, start=5, stop=5, ops=(0, 1, 2), retain=(X2,))
    inner = Window(id=1, start=6, stop=6, ops=(0, 1), retain=(X1,))
    timeline = simulate(step, Schedule(held=(X0,), windows=(window, inner)))
    # First replay: x0, x1 and workspace, then x1 and x2 (x0 is dead by then); the base is outside, inputs, kept x0 and seed.
    base = 1000 + 10 + 10 + 4
    replay = timeline.replays[0]
    assert replay.base_bytes == base
    assert replay.inner_bytes.tolist() == [10, 10 + 20 + 3, 20 + 30]
    assert timeline.replay_bytes[5] == base + 50
    assert timeline.live_bytes[5] == base + 30 + 30


def equal_layers(overwriting: tuple[int, ...]) -> Step:
    """Four storages of 10 bytes, each made from the one before; only the last is saved."""
    b = StepBuilder()
    x = b.one(b.input(10), size=10)
    for _ in range(2):
        x = b.one(x, size=10)
    x = b.one(x, size=10)
    step = check_step(b.build(b.one(x, size=4, save=[x]), outside=0))
    ops = tuple(msgspec.structs.replace(op, overwrites=op.index in overwriting) for op in step.ops)
    return msgspec.structs.replace(step, ops=ops)


@pytest.mark.parametrize(
    ("overwriting", "inner"),
    [((), [10, 20, 20, 20]), ((1,), [10, 10, 20, 20]), ((1, 2, 3), [10, 10, 10, 10]), ((0,), [10, 20, 20, 20])],
)
def test_an_argument_that_dies_gives_its_memory_to_the_result(overwriting: tuple[int, ...], inner: list[int]) -> None:
    step = equal_layers(overwriting)
    first = next(op.index for op in step.ops if op.phase == "backward")
    read = step.saves[0].reads[0]
    window = Window(id=0, start=read.first, stop=read.last, ops=(0, 1, 2, 3), retain=(4,))
    assert first <= read.first
    timeline = simulate(step, Schedule(windows=(window,)))
    assert timeline.replays[0].inner_bytes.tolist() == inner


def test_what_is_retained_keeps_its_memory() -> None:
    b = StepBuilder()
    x = b.one(b.input(10), size=10)
    y = b.one(x, size=10, save=[x])
    step = check_step(b.build(b.one(y, size=4, save=[y]), outside=0))
    step = msgspec.structs.replace(step, ops=tuple(msgspec.structs.replace(op, overwrites=True) for op in step.ops))
    start = min(r.first for save in step.saves for r in save.reads)
    stop = max(r.last for save in step.saves for r in save.reads)
    window = Window(id=0, start=start, stop=stop, ops=(0, 1), retain=(1, 2))
    assert simulate(step, Schedule(windows=(window,))).replays[0].inner_bytes.tolist() == [10, 20]


def test_nested_windows_read_what_the_outer_one_retains() -> None:
    step = three_layers()
    outer = Window(id=0, start=5, stop=7, ops=(0,), retain=(X0,))
    inner = Window(id=1, start=5, stop=6, ops=(1, 2), retain=(X1, X2), parent=0)
    timeline = simulate(step, Schedule(windows=(outer, inner)))
    retained = {(c.live.window, c.live.id): (c.first, c.last) for c in timeline.charges}
    assert retained == {(0, X0): (5, 7), (1, X1): (5, 6), (1, X2): (5, 5)}
    assert timeline.served == {(0, 0): 0, (1, 0): 1, (2, 0): 1}
    # Before 5: outside, input, seed; the outer replay makes x0, the inner one finds it there.
    assert timeline.replays[1].base_bytes == timeline.replays[0].base_bytes + 10


def test_what_a_window_reads_is_held_until_then() -> None:
    step = three_layers()
    late = Window(id=0, start=6, stop=6, ops=(1,), retain=(X1,))
    schedule = Schedule(held=(X0, X2), windows=(late,))
    b = StepBuilder()
    x = b.one(b.input(8), size=8)
    y = b.one(x, size=8)
    unsaved = check_step(b.build(b.one(y, size=4, save=[y])))
    window = Window(id=0, start=4, stop=4, ops=(1,), retain=(y.storage,))
    plain = simulate(unsaved)
    held = simulate(unsaved, Schedule(held=(x.storage,), windows=(window,)))
    # x is not saved: it dies at op 1 in the plain step, and lives until the window with this schedule; y the other way round.
    assert (held.live_bytes - plain.live_bytes).tolist() == [0, 0, 8, 0, 8, 0, 0]
    assert simulate(step, schedule).ends[X0] == 7


def test_a_copy_is_charged_from_its_reader_to_the_window_and_not_twice() -> None:
    step = in_place_stream(3)
    schedule = get_planner("full").plan(step, None)
    timeline = simulate(step, schedule)
    copies = [c for c in timeline.charges if c.live.kind is LiveKind.COPY]
    assert copies
    for c in copies:
        window = schedule.windows[c.live.window]
        assert c.last == window.start
        assert c.first == min(i for i in window.ops if c.live.id in step.ops[i].inputs)
        assert c.live.nbytes == 8


def test_a_generator_state_is_charged_once_until_the_last_replay() -> None:
    b = StepBuilder()
    x = b.one(b.input(4), size=4)
    y = b.one(x, size=4, save_outputs=(0,), random="cpu", rng_bytes=50)
    z = b.one(y, size=4, save_outputs=(0,))
    step = check_step(b.build(b.one(z, size=4)))
    reads = tables_of(step).reads
    windows = (
        Window(id=0, start=reads[0].first, stop=reads[0].last, ops=(0, 1, 2), retain=(z.storage,)),
        Window(id=1, start=reads[1].first, stop=reads[1].last, ops=(0, 1), retain=(y.storage,)),
    )
    timeline = simulate(step, Schedule(windows=windows))
    [rng] = [c for c in timeline.charges if c.live.kind is LiveKind.RNG]
    assert (rng.first, rng.last, rng.live.nbytes, rng.live.id) == (1, reads[1].first, 50, 1)


def test_a_leaf_is_copied_once_for_all_windows_that_need_it() -> None:
    """From its first reader that is replayed to the last replay; nothing where no window reads it, nor twice where two do."""
    b = StepBuilder()
    bias, other = b.copied(b.parameter(50)), b.copied(b.buffer(7))
    x = b.one(b.input(4), other, size=4)
    y = b.one(x, bias, size=4, save_outputs=(0,))
    z = b.one(y, bias, size=4, save_outputs=(0,))
    step = check_step(b.build(b.one(z, size=4)))
    by_reference = msgspec_replace(step, storages=tuple(msgspec_replace(s, copied=False) for s in step.storages))
    reads = tables_of(step).reads
    late, early = reads[1].first, reads[0].first
    assert early < late

    def check(held: tuple[Tensor, ...], *windows: tuple[int, tuple[int, ...], Tensor], want: dict[range, int]) -> None:
        schedule = Schedule(
            held=tuple(t.storage for t in held),
            windows=tuple(
                Window(id=i, start=start, stop=start, ops=ops, retain=(t.storage,))
                for i, (start, ops, t) in enumerate(windows)
            ),
        )
        found, without = simulate(step, schedule), simulate(by_reference, schedule)
        moments = range(len(step.ops))
        assert (found.live_bytes - without.live_bytes).tolist() == [
            sum(n for span, n in want.items() if t in span) for t in moments
        ]
        for start, *_ in windows:
            inside = sum(n for span, n in want.items() if start in span)
            assert found.replay_bytes[start] - without.replay_bytes[start] == inside

    check((y, z), want={})
    check((y,), (early, (2,), z), want={range(2, early + 1): 50})
    check((x, z), (late, (1,), y), want={range(1, late + 1): 50})
    check((x,), (early, (1, 2), z), (late, (1,), y), want={range(1, late + 1): 50})
    check((y,), (early, (0, 1, 2), z), want={range(early + 1): 7, range(1, early + 1): 50})


def test_a_leaf_is_copied_anew_when_the_windows_that_needed_it_are_over() -> None:
    b = StepBuilder()
    bias = b.copied(b.parameter(50))
    saved = []
    for last in (False, True):
        x = b.one(b.input(4), size=4, save_outputs=(0,))
        y = b.one(x, bias, size=4, save_outputs=(0,))
        saved.append((x, y))
        loss = b.one(y, size=4)
        if not last:
            b.backward(loss)
    step = check_step(b.build(loss))
    reads = [(read, step.values[save.value].storage) for save in step.saves for read in save.reads]
    windows = []
    for _, y in saved:
        [read] = [r for r, s in reads if s == y.storage]
        op = step.values[y.view].producer
        windows.append(Window(id=len(windows), start=read.first, stop=read.last, ops=(op,), retain=(y.storage,)))
    timeline = simulate(step, Schedule(windows=tuple(windows), held=tuple(x.storage for x, _ in saved)))
    found = [(c.first, c.last) for c in timeline.charges if c.live.kind is LiveKind.COPY]
    assert found == [(w.ops[0], w.start) for w in windows]
    assert found[0][1] < found[1][0]


def test_storages_on_other_devices_are_not_charged() -> None:
    step = three_layers()
    storages = list(step.storages)
    storages[X1] = msgspec_replace(storages[X1], device="cuda:0")
    moved = msgspec_replace(step, storages=tuple(storages))
    assert (simulate(step).live_bytes - simulate(moved).live_bytes).tolist() == [0, 20, 20, 20, 20, 20, 20, 0, 0]


def test_a_parameter_that_the_optimizer_writes_later_is_read_by_reference() -> None:
    step = gpt_like(3, optimizer=True)
    schedule = get_planner("full").plan(step, None)
    parameters = {s.id for s in step.storages if s.category is Category.PARAMETER and s.versions > 1}
    read = {step.values[v].storage for w in schedule.windows for i in w.ops for v in step.ops[i].inputs}
    assert parameters & read
    assert not any(w.copies for w in schedule.windows)
    simulate(step, schedule)


def test_sums_agree_with_what_is_listed() -> None:
    step = gpt_like(3, dropout=True, optimizer=True)
    for name in ("none", "full", "recursive"):
        timeline = simulate(step, get_planner(name).plan(step, None))
        for t in range(len(step.ops)):
            assert sum(x.nbytes for x in timeline.live_at(t)) == timeline.live_bytes[t]
            assert sum(timeline.by_category(t).values()) == timeline.high_water[t]
        for replay in timeline.replays:
            for position in range(len(replay.ops)):
                total = replay.base_bytes + replay.inner_bytes[position]
                assert sum(x.nbytes for x in timeline.live_in_replay(replay.window, position)) == total
        assert sum(x.nbytes for x in timeline.at_peak) == timeline.peak_bytes


def test_the_plain_step_is_the_plan_that_holds_everything() -> None:
    step = gpt_like(2)
    plain, none = simulate(step), simulate(step, Schedule(held=tuple(formally_droppable(step))))
    assert (plain.live_bytes == none.live_bytes).all()
    assert isinstance(plain, Timeline)


def test_an_empty_step() -> None:
    timeline = simulate(Step(outside_bytes=7))
    assert (timeline.peak_bytes, timeline.peak_moment, timeline.at_peak[0].nbytes) == (7, -1, 7)


# ------------------------------------------------------------------ refusals


def window(step: Step, **changes: object) -> Schedule:
    """A legal schedule for `three_layers` with one thing changed in its window."""
    given = {"id": 0, "start": 6, "stop": 6, "ops": (1,), "retain": (X1,)} | changes
    return Schedule(held=(X0, X2), windows=(msgspec.convert(given, Window),))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ops": (2,)}, "window 0, op 2, value 2, storage 2: .* neither made in this replay nor retained"),
        ({"ops": ()}, "window 0, storage 2: it is retained, but no op of the window makes it"),
        ({"ops": (1, 1)}, "not in ascending order"),
        ({"ops": (1, 7)}, "window 0, op 7: it runs only after the window starts at 6"),
        ({"ops": (1, 99)}, "no such op"),
        ({"retain": ()}, "value 2, storage 2: it is dropped and read at 6, where no window retains it"),
        ({"retain": (X1, X1)}, "lists one twice"),
        ({"retain": (X1, 99)}, "names the unknown 99"),
        ({"start": 7, "stop": 7}, "window 0 retains it but starts later, at 7"),
        ({"start": 7}, "span"),
        ({"stop": 99}, "span"),
        ({"parent": 0}, "does not come before it"),
        ({"id": 1}, "has id 1"),
        ({"copies": (1,)}, "no op of the window reads the copy"),
    ],
)
def test_refused_windows(changes: dict[str, object], message: str) -> None:
    step = three_layers()
    simulate(step, window(step))
    with pytest.raises(ScheduleError, match=message):
        simulate(step, window(step, **changes))


def test_refused_decisions() -> None:
    step = three_layers()
    with pytest.raises(ScheduleError, match="held lists one twice"):
        simulate(step, Schedule(held=(X0, X1, X2, X1)))
    with pytest.raises(ScheduleError, match="unknown storage"):
        simulate(step, Schedule(held=(X0, X1, X2, 99)))


def test_refused_nesting() -> None:
    step = three_layers()
    first = Window(id=0, start=5, stop=6, ops=(1, 2), retain=(X1, X2))
    with pytest.raises(ScheduleError, match="neither encloses the other"):
        simulate(step, Schedule(held=(X0,), windows=(first, Window(id=1, start=6, stop=7, ops=()))))
    with pytest.raises(ScheduleError, match="not inside"):
        simulate(step, Schedule(held=(X0,), windows=(first, Window(id=1, start=6, stop=7, ops=(), parent=0))))


def test_an_unreplayable_op_is_refused() -> None:
    b = StepBuilder()
    x = b.one(b.input(4), size=4, replayable=False)
    step = check_step(b.build(b.one(x, size=4, save=[x])))
    with pytest.raises(ScheduleError, match="not replayable: not repeatable"):
        simulate(step, Schedule(windows=(Window(id=0, start=3, stop=3, ops=(0,), retain=(x.storage,)),)))


def overwritten(*, saved_again: bool = False) -> tuple[Step, dict[str, int]]:
    """y = f(x) is saved; x is then overwritten in place. Storages by name."""
    b = StepBuilder()
    x = b.one(b.input(4), size=4)
    y = b.one(x, size=4, save_outputs=(0,))
    b.write(x, y, save_result=saved_again)
    step = check_step(b.build(b.one(x, y, size=4)))
    return step, {"x": x.storage, "y": y.storage, "x0": x.view}


def test_a_value_that_was_overwritten_is_refused_without_a_copy() -> None:
    step, s = overwritten()
    read = tables_of(step).reads_of[s["y"]][0]
    given = {"id": 0, "start": read.first, "stop": read.last, "ops": (1,), "retain": (s["y"],)}
    with pytest.raises(ScheduleError, match=r"needs version 0, which op 2 overwrote, and no copy"):
        simulate(step, Schedule(held=(s["x"],), windows=(msgspec.convert(given, Window),)))
    copied = msgspec.convert(given | {"copies": (s["x0"],)}, Window)
    assert simulate(step, Schedule(windows=(copied,))).added_seconds == 1.0
    made = msgspec.convert(given | {"ops": (0, 1)}, Window)
    assert simulate(step, Schedule(windows=(made,))).added_seconds == 2.0


def test_a_write_to_what_is_held_is_refused() -> None:
    step, s = overwritten(saved_again=True)
    reads = tables_of(step).reads_of
    first = min(reads[s["x"]][0].first, reads[s["y"]][0].first)
    last = max(reads[s["x"]][-1].last, reads[s["y"]][-1].last)
    given = {"id": 0, "start": first, "stop": last, "ops": (0, 1, 2), "retain": (s["x"], s["y"])}
    simulate(step, Schedule(windows=(msgspec.convert(given, Window),)))
    with pytest.raises(ScheduleError, match="needs version 0, which op 2 overwrote"):
        simulate(step, Schedule(windows=(msgspec.convert(given | {"ops": (1, 2)}, Window),)))
    with pytest.raises(ScheduleError, match="its final version is 1"):
        simulate(step, Schedule(windows=(msgspec.convert(given | {"ops": (0, 1)}, Window),)))
    private = msgspec.convert(given | {"ops": (1, 2), "copies": (s["x0"],)}, Window)
    assert simulate(step, Schedule(windows=(private,))).added_seconds == 2.0


def test_a_tensor_object_that_the_window_does_not_make_is_refused() -> None:
    b = StepBuilder()
    x = b.one(b.input(4), size=4)
    flat = b.view(x)
    step = check_step(b.build(b.one(flat, size=4, save=[flat])))
    given = {"id": 0, "start": 4, "stop": 4, "ops": (0,), "retain": (x.storage,)}
    with pytest.raises(ScheduleError, match=r"op 1.* does not replay the op that returns this tensor object"):
        simulate(step, Schedule(windows=(msgspec.convert(given, Window),)))
    simulate(step, Schedule(windows=(msgspec.convert(given | {"ops": (0, 1)}, Window),)))


def test_a_read_before_the_window_is_named() -> None:
    step = chain(4)
    schedule = get_planner("recompute_everything").plan(step, None)
    w = schedule.windows[0]
    late = msgspec.structs.replace(w, start=w.start + 1, stop=max(w.stop, w.start + 1))
    with pytest.raises(ScheduleError, match=r"retains it but starts later|neither encloses"):
        simulate(step, msgspec.structs.replace(schedule, windows=(late, *schedule.windows[1:])))
