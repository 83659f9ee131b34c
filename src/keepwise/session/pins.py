"""Decisions that the user makes: `pin={"h.*.attn": "keep"}`."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import msgspec

from keepwise._errors import UsageError
from keepwise.ir import Step

ACTIONS = ("keep", "recompute", "offload")


def check_pins(pin: Mapping[str, str] | None) -> None:
    """Raise for pins of another form.

    Raises:
        UsageError: an unknown action.
    """
    for pattern, action in (pin or {}).items():
        if action not in ACTIONS:
            raise UsageError(f"pin[{pattern!r}] is {action!r}; accepted: {', '.join(ACTIONS)}")


def matches(path: str, pattern: str) -> bool:
    """Whether a module path lies at or below a pattern."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + ".*")


def apply_pins(step: Step, pin: Mapping[str, str] | None) -> Step:
    """The step with pinned tensors marked as kept.

    Raises:
        UsageError: a pattern matches no module that makes a saved tensor, or an action that no planner carries out.
    """
    if not pin:
        return step
    marks: dict[int, str] = {}
    for pattern, action in pin.items():
        found = [
            s
            for s in step.saved_storages
            if step.storages[s].birth >= 0 and matches(step.ops[step.storages[s].birth].path, pattern)
        ]
        if not found:
            paths = sorted(
                {step.ops[step.storages[s].birth].path for s in step.saved_storages if step.storages[s].birth >= 0}
            )
            raise UsageError(
                f"pin pattern {pattern!r} matches no module that saves a tensor; there are: {', '.join(paths[:12])}"
            )
        if action != "keep":
            raise UsageError(
                f"pin[{pattern!r}] is {action!r}: only 'keep' can be pinned; to force replays use planner='boundaries:...'"
            )
        marks.update(dict.fromkeys(found, f"pinned by the user ({pattern})"))
    storages = tuple(msgspec.structs.replace(s, keep_reason=marks[s.id]) if s.id in marks else s for s in step.storages)
    return msgspec.structs.replace(step, storages=storages)
