"""Each mechanism of the runtime is taken out, one by one: what it is there for fails, every time.

The scenarios pass with the runtime as it is (`test_scenarios`). Should the runtime be rearranged, the functions here are what has
to follow: each names the one place where its mechanism acts.
"""

from __future__ import annotations

import contextlib
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

import keepwise
from keepwise.runtime import apply, aside, clean, guard, holding, leaves, program, replay, watch, wiring

from . import scenarios

Patch = pytest.MonkeyPatch


def nothing(*args: Any, **kwargs: Any) -> None: ...


def version_check(patch: Patch) -> None:
    """Nothing that was written since forward is noticed."""
    for room in (holding, wiring, replay):
        patch.setattr(room, "version_of", lambda t: 0)


def version_of_dropped(patch: Patch) -> None:
    patch.setattr(holding.VersionStub, "check", nothing)


def generator_states(patch: Patch) -> None:
    """Replays draw from wherever the generators are by then."""
    patch.setattr(replay, "call_with_state", lambda func, args, kwargs, random: func(*args, **kwargs))


def generator_restored(patch: Patch) -> None:
    """The default generator stays where a replay left it."""

    def call(func: Any, args: Any, kwargs: Any, random: Any) -> Any:
        if clean.takes_generator(func):
            return clean.call_with_state(func, args, kwargs, random)
        torch.default_generator.set_state(random.state)
        return func(*args, **kwargs)

    patch.setattr(replay, "call_with_state", call)


def wiring_compared(patch: Patch) -> None:
    """Whatever an op gets, it is what the recording says."""
    capture = guard.Guard._captured

    def believe(self: Any, run: Any, use: Any, entry: Any, seen: Any) -> Any:
        return capture(self, run, use, entry, seen._replace(views=list(entry.ins)))

    patch.setattr(guard.Guard, "_captured", believe)


def this_steps_literals(patch: Patch) -> None:
    """Numbers are those of the first step."""
    capture, first = guard.Guard._captured, {}

    def stale(self: Any, run: Any, use: Any, entry: Any, seen: Any) -> Any:
        known = first.setdefault((id(self.program), entry.index), seen.args)
        args = tuple(old if isinstance(old, int | float) else new for old, new in zip(known, seen.args, strict=True))
        return capture(self, run, use, entry, seen._replace(args=args))

    patch.setattr(guard.Guard, "_captured", stale)


def whose_write_it_was(patch: Patch) -> None:
    """Writes that a run did not capture change nothing of what it believes to make."""
    patch.setattr(guard.Guard, "_written", nothing)


def identities_end_with_a_frame(patch: Patch) -> None:
    patch.setattr(watch.Watch, "forget_all", nothing)


def detach_of_kept(patch: Patch) -> None:
    patch.setattr(holding, "alias_in_pack", lambda t: t)


def detach_of_captured(patch: Patch) -> None:
    patch.setattr(wiring, "alias", lambda t: t)


def detach_of_versions(patch: Patch) -> None:
    def hold(self: Any, t: Any) -> None:
        self.version, self.shape, self.alias = t._version, t.shape, t

    patch.setattr(holding.VersionStub, "__init__", hold)


def captured_copies(patch: Patch) -> None:
    """What a replay writes is the original."""
    patch.setattr(wiring, "copy_whole", lambda t: t)


def copies_for_the_next_replay(patch: Patch) -> None:
    """What a replay writes is the captured copy, from which the next one begins."""
    run = replay.WindowRun._run
    patch.setattr(
        replay.WindowRun, "_run", lambda self, call, env, recycler, again: run(self, call, env, recycler, False)
    )


def copies_of_buffers(patch: Patch) -> None:
    patch.setattr(program, "SHARED", program.LEAF)


def copies_of_each_version(patch: Patch) -> None:
    """A leaf's first copy is the leaf for the whole pass."""

    def found(self: Any, key: Any, leaf: Any, version: int) -> Any:
        return self.copies[key].copy() if key in self.copies else None

    patch.setattr(leaves.LeafCopies, "_found", found)
    patch.setattr(leaves.LeafCopies, "forget", nothing)


def copies_compared(patch: Patch) -> None:
    """Whoever writes a leaf moves its version, or is seen."""
    patch.setattr(leaves, "torch", _Overlay(torch, equal=lambda a, b: True))


def protection(patch: Patch) -> None:
    """Captured tensors are overwritten under our eyes."""
    patch.setattr(guard, "protect", nothing)


def protection_of_other_passes(patch: Patch) -> None:
    enter = watch.Watch.__enter__

    def forgetful(self: Any) -> Any:
        replay._HOLDING.clear()
        return enter(self)

    patch.setattr(watch.Watch, "__enter__", forgetful)


def weak_cells(patch: Patch) -> None:
    """A run holds all that it replayed until its last reader is gone."""
    patch.setattr(replay, "weakref", types.SimpleNamespace(ref=weakref.ref, WeakValueDictionary=dict))


def clearing(patch: Patch) -> None:
    patch.setattr(replay.WindowRun, "_clear", nothing)


def clean_surroundings(patch: Patch) -> None:
    patch.setattr(replay, "clean", contextlib.nullcontext)


def without_autocast(patch: Patch) -> None:
    patch.setattr(clean, "_NO_AUTOCAST", torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastXPU))


def outside_of_dispatch_modes(patch: Patch) -> None:
    _without(patch, "_DisableTorchDispatch")


def outside_of_function_modes(patch: Patch) -> None:
    _without(patch, "DisableTorchFunction", watch)
    _without(patch, "DisableTorchFunction")


def _without(patch: Patch, name: str, room: Any = clean) -> None:
    """One context fewer."""
    c = _Overlay(torch._C, **{name: contextlib.nullcontext})
    patch.setattr(room, "torch", _Overlay(torch, _C=c))


class _Overlay:
    """An object with some attributes replaced."""

    def __init__(self, base: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced, _base=base)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._base, name)


def ambient_settings(patch: Patch) -> None:
    patch.setattr(replay.Ambient, "active", lambda self: contextlib.nullcontext())


def settings_of_each_call(patch: Patch) -> None:
    """All of a window is replayed under the settings that it began with."""
    patch.setattr(replay.Ambient, "changed", lambda self: None)


def stepping_aside(patch: Patch) -> None:
    patch.setattr(aside, "_take_off", list)


def waiting_for_the_write(patch: Patch) -> None:
    compiled = program.compile_program

    def hasty(*args: Any) -> Any:
        made = compiled(*args)
        made.finished_by.clear()
        return made

    patch.setattr("keepwise.session.plan.compile_program", hasty)


def audit_under_new_modes(patch: Patch) -> None:
    patch.setattr(apply, "foreign_modes", frozenset)


FAULTS: list[tuple[Callable[[Patch], None], tuple[Callable[[], None], ...]]] = [
    (version_check, (scenarios.written_parameter,)),
    (version_of_dropped, (scenarios.written_after_it_was_dropped,)),
    (generator_states, (scenarios.dropout, scenarios.draws_without_generator_argument)),
    (generator_restored, (scenarios.draws_without_generator_argument,)),
    (wiring_compared, (scenarios.crossed_wires,)),
    (this_steps_literals, (scenarios.changed_literal,)),
    (
        whose_write_it_was,
        (
            scenarios.unknown_write_in_place,
            scenarios.unknown_alias_written,
        ),
    ),
    (identities_end_with_a_frame, (scenarios.tensor_of_the_frame_before,)),
    (detach_of_kept, (scenarios.no_leak_without_backward,)),
    (detach_of_captured, (scenarios.no_leak_without_backward,)),
    (detach_of_versions, (scenarios.no_leak_without_backward,)),
    (captured_copies, (scenarios.input_of_a_block_is_written,)),
    (copies_for_the_next_replay, (scenarios.replay_twice_of_a_write,)),
    (copies_of_buffers, (scenarios.buffer_written_between_forward_and_backward,)),
    (copies_of_each_version, (scenarios.leaf_written_between_its_readers,)),
    (copies_compared, (scenarios.leaf_written_by_no_op_between_its_readers,)),
    (
        protection,
        (scenarios.captured_tensor_written_while_watched, scenarios.captured_tensor_written_in_another_pass),
    ),
    (protection_of_other_passes, (scenarios.captured_tensor_written_in_another_pass,)),
    (weak_cells, (scenarios.results_die_with_their_node,)),
    (clearing, (scenarios.cells_without_a_reader_in_this_pass, scenarios.unpacked_outside_of_backward)),
    (clean_surroundings, (scenarios.under_autocast, scenarios.modes_see_what_they_see_plainly)),
    (without_autocast, (scenarios.under_autocast,)),
    (outside_of_dispatch_modes, (scenarios.modes_see_what_they_see_plainly,)),
    (outside_of_function_modes, (scenarios.graph_read_under_a_function_mode,)),
    (ambient_settings, (scenarios.forward_under_other_settings, scenarios.forward_with_another_default_dtype)),
    (settings_of_each_call, (scenarios.part_of_forward_under_another_setting,)),
    (stepping_aside, (scenarios.transforms_inside,)),
    (waiting_for_the_write, (scenarios.saved_before_it_is_written,)),
    (audit_under_new_modes, (scenarios.mode_that_changes_results, scenarios.mode_that_changes_results_later)),
]


@pytest.mark.filterwarnings("ignore:keepwise. this step differs")
@pytest.mark.parametrize(
    ("plant", "scenario"),
    [(plant, scenario) for plant, found_by in FAULTS for scenario in found_by],
    ids=lambda f: f.__name__,
)
def test_what_a_mechanism_is_for_fails_without_it(
    plant: Callable[[Patch], None], scenario: Callable[[], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, keepwise.KeepwiseError, pytest.fail.Exception)):
        scenario()
