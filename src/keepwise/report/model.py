"""What a report says, as plain data: made by `build`, shown by `terminal`, `html` and `trace`.

Bytes are those of the step's device, seconds those of one step.
"""

from __future__ import annotations

import msgspec


class Curve(msgspec.Struct, frozen=True, kw_only=True):
    """Memory over the step: the axis of time is cut into equal bins, each with the highest level inside it."""

    bin_seconds: float
    """Width of a bin in seconds; in ops where `timed` is false."""
    timed: bool
    """Whether the axis is time; else the ops have no durations and each counts as one."""
    plain: tuple[int, ...]
    """Bytes of the plain step, one a bin; shorter than `plan` where replays make the planned step longer."""
    plan: tuple[int, ...]
    """Bytes of the planned step."""
    phases: tuple[tuple[str, int, int], ...]
    """(phase, first bin, one past its last bin) of the planned step."""


class Category(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one kind at the two peaks."""

    name: str
    plain_bytes: int
    plan_bytes: int
    reduced: str
    """Whether checkpointing reduces it: `yes`, `no`, `not directly`, or `its price`."""
    note: str
    """What it is, in a few words."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One saved tensor's decision, in one block of a group."""

    path: str
    """Module, relative to the block."""
    op: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    kind: str
    """`keep`, `recompute`, `pack` or `offload`."""
    saved_by: str
    why: str


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that are alike: same tensors, same decisions. Sums are over all of them."""

    name: str
    """`transformer.h.0-5`"""
    count: int
    """Blocks folded into this row."""
    num_tensors: dict[str, int]
    """Kind of decision -> tensors."""
    nbytes: dict[str, int]
    """Kind of decision -> bytes."""
    replay_seconds: float
    replayed: tuple[tuple[str, int, float], ...]
    """(op, times, seconds) of what runs again, longest first."""
    reasons: tuple[tuple[str, int], ...]
    """(reason, bytes) of what is kept, largest first."""
    items: tuple[Item, ...]
    """Of the first block."""


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """Equal tensors of equal modules, folded."""

    name: str
    op: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    """Of one of them."""
    count: int
    kind: str
    """What happens to it; for what is live at the peak: what it is."""


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Outcome of comparing the planned step with the plain one."""

    text: str
    identical: bool | None
    """None where the plain step does not repeat."""
    recomputed_identical: bool
    repeatable: bool
    compared: tuple[str, ...]
    num_steps: int
    num_compared: int
    num_replays_compared: int
    digests: tuple[str, ...]


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The same two steps, run and measured in turn."""

    pairs: int
    plain_peak_bytes: int
    plan_peak_bytes: int
    plain_seconds: float
    """Median."""
    plan_seconds: float
    """Median."""
    ratio: float
    """Median of planned by plain time over the pairs."""
    ratio_low: float
    """Lower quartile."""
    ratio_high: float
    """Upper quartile."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that is said about a plan."""

    title: str
    description: str
    headline: str
    """The first line of `str(plan)`."""
    status: str
    """Name of the status."""
    status_text: str
    """What it means, a sentence."""
    planner: str
    budget_bytes: int | None
    """None: no limit."""
    plain_peak_bytes: int
    peak_bytes: int
    floor_bytes: int
    static_bytes: int
    step_seconds: float
    added_seconds: float
    """What the plan adds to a step, predicted."""
    time_text: str
    """What that is made of, in shares of a step; empty where nothing is replayed."""
    replay_seconds: float
    bound_seconds: float
    gap: float
    device: str
    torch_version: str
    num_ops: int
    num_replays: int
    num_saved: int
    """Activations that autograd saves."""
    num_tensors: dict[str, int]
    """Kind of decision -> tensors."""
    nbytes: dict[str, int]
    """Kind of decision -> bytes."""
    plain_peak_at: str
    """Where the plain step is highest, in words."""
    plan_peak_at: str
    curve: Curve
    categories: tuple[Category, ...]
    groups: tuple[Group, ...]
    largest: tuple[Tensor, ...]
    """Largest saved activations."""
    at_peak: tuple[Tensor, ...]
    """What is live at the plan's peak, largest first."""
    notes: tuple[str, ...]
    shapes: tuple[str, ...]
    proof: Proof | None = None
    measured: Measured | None = None

    @property
    def saved_bytes(self) -> int:
        """How much lower the plan's peak is, in bytes."""
        return self.plain_peak_bytes - self.peak_bytes


KINDS = ("keep", "recompute", "pack", "offload")
