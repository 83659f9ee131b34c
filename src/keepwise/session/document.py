"""A plan on disk: one JSON document with a version and a published schema. Nothing in it is executed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from keepwise._errors import PlanMismatch, UsageError
from keepwise.ir import Schedule, Step
from keepwise.ir.validate import validate
from keepwise.session.fingerprint import Fingerprint
from keepwise.session.sizes import Key

PLAN_VERSION = 1


class PlanDocument(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a plan is."""

    kind: str = "keepwise.plan"
    version: int = PLAN_VERSION
    fingerprint: Fingerprint
    step: Step
    schedule: Schedule
    status: str
    """Name of a `Status`."""
    budget: str
    """As the user wrote it."""
    budget_bytes: int | None
    plain_peak_bytes: int
    peak_bytes: int
    floor_bytes: int
    added_seconds: float
    """Of all replays."""
    bound_seconds: float
    """Dual bound on `added_seconds`."""
    saved_seconds: float = 0.0
    """What writing results into dead memory saves."""
    overhead_seconds: float = 0.0
    """What a planned step takes besides the prices of its replays; see `overheads`."""
    restarts: bool
    """Whether the recorded step begins with the model's forward (else with the user's own step)."""
    scales: bool = False
    """Whether batches of other sizes get plans of their own, for the same budget."""
    batch_key: Key = ()
    """Places and shapes of the tensors in the recorded batch."""
    batch_scales: tuple[tuple[Key, float], ...] = ()
    """Other batches that were seen, and their activations as a multiple of the recorded ones."""
    proven: tuple[int, ...] | None = None
    """Views whose replay was compared with its original; None: nobody asked for a proof."""
    variants: tuple[PlanDocument, ...] = ()
    """Plans for batches that have other tensors."""
    tokens: int | None = None
    """Of the recorded batch, where the user said so."""
    notes: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()


def write_document(document: PlanDocument, path: Path, *, force: bool) -> None:
    """Write a plan.

    Raises:
        UsageError: the file exists and `force` is off.
    """
    if path.exists() and not force:
        raise UsageError(f"{path} exists; pass force=True to overwrite it")
    path.write_bytes(msgspec.json.encode(document))


def read_document(path: Path) -> PlanDocument:
    """Read a plan.

    Raises:
        PlanMismatch: malformed, no plan, or another version.
        FileNotFoundError: there is no such file.
    """
    data = path.read_bytes()
    try:
        head: Any = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise PlanMismatch(
            f"{path} is no plan: its {len(data)} bytes are not JSON ({error}). The file may be truncated; write it again with plan.save"
        ) from None
    if not isinstance(head, dict) or head.get("kind") != "keepwise.plan":
        raise PlanMismatch(f"{path} is JSON but no plan; plans are written by plan.save or `keepwise fit --save`")
    if head.get("version") != PLAN_VERSION:
        raise PlanMismatch(
            f"{path} is a plan of version {head.get('version')}, this release reads version {PLAN_VERSION}. Run keepwise.fit again"
        )
    try:
        document = msgspec.json.decode(data, type=PlanDocument)
    except msgspec.ValidationError as error:
        raise PlanMismatch(f"{path} is a damaged plan: {error}. Write it again with plan.save") from None
    for part in (document, *document.variants):
        found = validate(part.step)
        if found:
            raise PlanMismatch(f"{path} is a damaged plan: {found[0]}. Write it again with plan.save")
    return document


def schema() -> dict[str, Any]:
    """JSON schema of plan files."""
    return msgspec.json.schema(PlanDocument)
