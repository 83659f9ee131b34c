"""Decisions that the user makes: `pin={"h.*.attn": "keep", "h.*.mlp": "recompute"}`.

A kept tensor is marked in the step, so that every planner sees it. A recomputed one is taken out of what a planner holds
(`forced.py`), and windows are added where its reads lie in none.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping

import msgspec

from keepwise._errors import UsageError
from keepwise.ir import Step
from keepwise.plan.droppable import keep_reasons
from keepwise.session.step_facts import OUTSIDE

ACTIONS = ("keep", "recompute", "offload")


def check_pins(pin: Mapping[str, str] | None) -> None:
    """Raise for pins of another form, before any work is done.

    Raises:
        UsageError: no mapping, an unknown action, or one that no planner carries out.
    """
    if pin is None:
        return
    if not isinstance(pin, Mapping):
        raise UsageError(f"pin must be a mapping such as {{'h.*.attn': 'keep'}}, got {type(pin).__name__}")
    for pattern, action in pin.items():
        if action not in ACTIONS:
            raise UsageError(f"pin[{pattern!r}] is {action!r}; accepted: {', '.join(ACTIONS)}")
        if action == "offload":
            raise UsageError(
                f"pin[{pattern!r}] is 'offload', which is not there yet: nothing is moved to the host in this release. "
                "Pin 'keep' or 'recompute', or leave the choice to the planner"
            )


def matches(path: str, pattern: str) -> bool:
    """Whether a module path lies at or below a pattern."""
    return fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + ".*")


def apply_pins(step: Step, pin: Mapping[str, str] | None) -> Step:
    """The step with the tensors marked as kept that are pinned to be.

    Raises:
        UsageError: a pattern matches no module that makes a saved tensor.
    """
    marks: dict[int, str] = {}
    for pattern, action in (pin or {}).items():
        found = _matched(step, pattern)
        if action == "keep":
            marks.update(dict.fromkeys(found, f"pinned by the user ({pattern})"))
    if not marks:
        return step
    storages = tuple(msgspec.structs.replace(s, keep_reason=marks[s.id]) if s.id in marks else s for s in step.storages)
    return msgspec.structs.replace(step, storages=storages)


def recomputed_by_pins(step: Step, pin: Mapping[str, str] | None) -> frozenset[int]:
    """Storages that the user wants recomputed.

    What exists in any case is left out (dropping it frees nothing), and what the loss saves of the model's output (no plan reaches it).

    Args:
        step: as `apply_pins` returned it.
        pin: pattern -> action.

    Raises:
        UsageError: a tensor that only autograd holds cannot be made again; the message says which and why.
    """
    wanted: set[int] = set()
    for pattern, action in (pin or {}).items():
        if action != "recompute":
            continue
        found = [
            s
            for s in _matched(step, pattern)
            if not step.storages[s].category.is_static
            and step.storages[s].held_until < step.storages[s].saved_until
            and step.storages[s].keep_reason != OUTSIDE
        ]
        reasons = keep_reasons(step)
        refused = [s for s in found if reasons[s]]
        if refused:
            first = min(refused, key=lambda s: -step.storages[s].nbytes)
            maker = step.ops[step.storages[first].birth]
            raise UsageError(
                f"pin[{pattern!r}] is 'recompute', but {len(refused)} of its {len(found)} tensors cannot be made again. The largest: "
                f"{step.storages[first].nbytes} bytes of {maker.target} in {maker.path or 'the model'} ({reasons[first]}). "
                "Pin a smaller part of the model"
            )
        wanted.update(found)
    return frozenset(wanted)


def _matched(step: Step, pattern: str) -> list[int]:
    made = {s: step.ops[step.storages[s].birth].path for s in step.saved_storages if step.storages[s].birth >= 0}
    found = [s for s, path in made.items() if matches(path, pattern)]
    if not found:
        paths = sorted({path for path in made.values() if path})
        raise UsageError(
            f"pin pattern {pattern!r} matches no module that saves a tensor; there are: {', '.join(paths[:12]) or 'none'}"
            + (f" and {len(paths) - 12} more" if len(paths) > 12 else "")
        )
    return found
