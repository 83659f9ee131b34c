"""`validate` finds what is wrong: each alteration of a sound step is reported."""

from __future__ import annotations

from typing import Any

import pytest

from keepwise.ir import Read, Step
from keepwise.ir.validate import validate
from tests.steps import gpt_like, in_place_stream, msgspec_replace, unet_like


def altered(step: Step, table: str, i: int, **changes: Any) -> Step:
    """The step with one entry of `ops`, `values`, `storages` or `saves` changed."""
    rows = list(getattr(step, table))
    rows[i] = msgspec_replace(rows[i], **changes)
    return msgspec_replace(step, **{table: tuple(rows)})


def first(rows: Any, condition: Any) -> int:
    return next(i for i, row in enumerate(rows) if condition(row))


GPT = gpt_like(2, dropout=True, optimizer=True)
STREAM = in_place_stream(2)
LAST = len(GPT.ops) - 1
READ_SAVE = first(GPT.saves, lambda s: s.reads)
MADE = first(GPT.values, lambda v: v.producer > 5)
ACTIVATION = first(GPT.storages, lambda s: s.birth > 5 and s.saved_until > 0)
WRITER = first(STREAM.ops, lambda op: op.writes and op.phase == "forward")
FRESH = first(GPT.ops, lambda op: op.index > 3 and not op.is_view)


def test_sound_steps_have_no_findings() -> None:
    for step in (GPT, STREAM, unet_like(2), Step()):
        assert validate(step) == []


@pytest.mark.parametrize(
    ("step", "finding"),
    [
        (altered(GPT, "storages", 3, id=4), "storage at position 3 has id 4"),
        (altered(GPT, "values", 3, id=4), "value at position 3 has id 4"),
        (altered(GPT, "values", 3, storage=9999), "unknown storage 9999"),
        (altered(GPT, "values", 3, view=9999), "unknown object"),
        (altered(GPT, "values", 3, producer=9999), "unknown producer"),
        (altered(GPT, "ops", 3, index=4), "op at position 3 has index 4"),
        (altered(GPT, "ops", 3, inputs=(9999,)), "op 3 names unknown value 9999"),
        (altered(GPT, "ops", 3, writes=(9999,)), "op 3 writes unknown storage 9999"),
        (altered(GPT, "saves", 3, index=4), "save at position 3 has index 4"),
        (altered(GPT, "saves", 3, value=9999), "save 3 names unknown value 9999"),
        (altered(GPT, "storages", ACTIVATION, nbytes=-1), "has -1 bytes"),
        (altered(GPT, "storages", ACTIVATION, birth=9999), "born at unknown op"),
        (altered(GPT, "storages", ACTIVATION, held_until=0), "but held until 0"),
        (altered(GPT, "storages", ACTIVATION, saved_until=9999), "after the last op"),
        (altered(GPT, "storages", ACTIVATION, versions=3), "says 3 versions, 0 ops write it"),
        (altered(GPT, "storages", ACTIVATION, saved_until=-1), "which says that autograd never saves it"),
        (altered(GPT, "values", MADE, version=1), "at version 1 of storage"),
        (altered(GPT, "values", MADE, view=0), "its object 0 on storage"),
        (altered(GPT, "values", MADE, producer=2), "neither returns it nor writes its version"),
        (altered(GPT, "ops", 3, inputs=(GPT.ops[20].outputs[0],)), "op 3 reads value"),
        (altered(GPT, "ops", LAST, inputs=(GPT.ops[4].outputs[0],)), "dead after"),
        (altered(GPT, "ops", FRESH, writes=(GPT.values[GPT.ops[FRESH].outputs[0]].storage,)), "its own fresh output"),
        (altered(STREAM, "ops", WRITER, writes=STREAM.ops[WRITER].writes * 2), "lists a written storage twice"),
        (altered(STREAM, "ops", WRITER, writes=()), "says 3 versions, 1 ops write it"),
        (altered(GPT, "ops", FRESH, is_view=True), "called a view"),
        (altered(GPT, "ops", 3, seconds=-1.0), "negative seconds"),
        (altered(GPT, "ops", 3, replayable=False), "does not say why"),
        (altered(GPT, "saves", READ_SAVE, at=9999), "is packed at 9999"),
        (altered(GPT, "saves", READ_SAVE, reads=(Read(first=1, last=0),)), "is read from 1 to 0"),
        (altered(GPT, "saves", READ_SAVE, reads=(Read(first=3, last=3),)), "in phase forward"),
        (altered(GPT, "saves", READ_SAVE, reads=(Read(first=LAST - 1, last=LAST),)), "in phase optimizer"),
    ],
)
def test_each_alteration_is_found(step: Step, finding: str) -> None:
    assert any(finding in sentence for sentence in validate(step))


def test_a_save_of_a_version_that_is_gone_before_it_is_read_is_found() -> None:
    i = first(STREAM.saves, lambda s: STREAM.storages[STREAM.values[s.value].storage].versions > 1)
    save = STREAM.saves[i]
    early = first(STREAM.values, lambda v: v.storage == STREAM.values[save.value].storage and v.version == 0)
    found = validate(altered(STREAM, "saves", i, value=early))
    assert any("which it is at neither then nor when read" in sentence for sentence in found)
