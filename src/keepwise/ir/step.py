"""`Step`: one training step, written down.

The clock. Moment `t` is the execution of `Step.ops[t]`; ops of all phases (forward, backward, optimizer) share one clock. A
storage is live during the moments `birth <= t <= death`, both inclusive: `birth` is the op that allocated it (`NO_OP` when it
existed before the step), `death` the last op that ran while it existed.

Two deaths. `held_until` is the last moment at which anything *but* autograd's saved tensors holds the storage (a local
variable, a feature hook, the engine's gradient buffers); `saved_until` the last moment at which autograd holds it in the plain
step. Plain memory charges a storage until the later of the two; a dropped storage is charged until `held_until` only.

Versions. A storage is written by its birth op (version 0) and once more by each op that lists it in `writes`. A `Value` is
one version of one tensor object (`view`); an in-place op returns the same object, hence the same `view` and the next version.
`Storage.versions` is the number of versions at the end of the step; `version == versions - 1` is the *final* version. A version
can be held by reference until the op that writes the next one: what is read after that must be copied or computed again.
"""

from __future__ import annotations

import functools
from enum import StrEnum
from typing import Literal

import msgspec

NO_OP = -1
"""Index of no op: the producer of a leaf, the birth of what existed before the step."""

STEP_VERSION = 1


class Phase(StrEnum):
    """The part of a step that an op belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Category(StrEnum):
    """What a storage is for."""

    PARAMETER = "parameter"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"
    BUFFER = "buffer"
    INPUT = "input"
    ACTIVATION = "activation"
    TEMPORARY = "temporary"

    @property
    def is_static(self) -> bool:
        """Whether such storages exist before and after the step, whatever is planned."""
        return self in (Category.PARAMETER, Category.GRADIENT, Category.OPTIMIZER, Category.BUFFER, Category.INPUT)


class Storage(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation."""

    id: int
    """Index in `Step.storages`."""
    nbytes: int
    """Allocated size in bytes."""
    device: str
    """`cpu`, `cuda:0`, ..."""
    category: Category
    birth: int
    """Op that allocated it; `NO_OP` if it existed before the step."""
    held_until: int
    """Last moment at which someone other than autograd's saved tensors holds it (>= birth);
    the last moment of the step if it outlives it."""
    saved_until: int = NO_OP
    """Last moment at which a saved tensor holds it in the plain step; `NO_OP` if autograd never saves it."""
    versions: int = 1
    """1 + number of ops that write it after its birth."""
    name: str = ""
    """Parameter or buffer name, else empty."""
    holder: str = ""
    """Who holds it beyond autograd, in words, where known."""
    keep_reason: str = ""
    """Why it must not be dropped (empty: it may be). Static and caller-held storages need no reason: they are free to keep."""
    packed_bytes: int = 0
    """Bytes of a smaller lossless form; 0 where none was seen."""
    pack_seconds: float = 0.0
    """Time to make that form and to expand it."""
    copied: bool = False
    """Whether replays read a copy that forward took: a small leaf that autograd does not save, which may legally be written before
    backward is over."""

    @property
    def death(self) -> int:
        """Last moment at which it is live in the plain step."""
        return max(self.held_until, self.saved_until)


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """One version of one tensor object over a storage."""

    id: int
    """Index in `Step.values`."""
    storage: int
    version: int
    """Version of the storage at which it is read or produced."""
    view: int
    """Identity of the tensor object: the id of the first value of that object."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """Storage offset in elements."""
    dtype: str
    """Without prefix: `float32`, `bfloat16`, `int64`."""
    producer: int
    """Op that returned this tensor object at this version (or, for an object that was aliased by an in-place op on another view
    of its storage, the op that wrote the version); `NO_OP` for leaves and objects that came from no recorded op."""


class Op(msgspec.Struct, frozen=True, kw_only=True):
    """One dispatcher-level op."""

    index: int
    """Index in `Step.ops`: its moment."""
    target: str
    """`aten.mm.default`"""
    inputs: tuple[int, ...]
    """Value of each tensor argument in flattened order."""
    outputs: tuple[int, ...]
    """Value of each tensor result in flattened order."""
    phase: Phase
    writes: tuple[int, ...] = ()
    """Storages that it writes in place (measured), each gaining one version. Its own fresh outputs are not listed. One that is
    listed here but is no input (running statistics of batch normalisation) is written by the op and not by its replay."""
    is_view: bool = False
    """Whether every output shares an input's storage and nothing is written: no bytes, no FLOPs."""
    random: str = ""
    """Generator that it draws from: empty, `cpu`, `cuda:0` (default generators) or `own`."""
    rng_bytes: int = 0
    """Bytes of the generator state that must be captured to replay it."""
    replayable: bool = True
    """Whether a replay on equal inputs was seen to give equal bits."""
    why_not: str = ""
    """Why it is not replayable."""
    seconds: float = 0.0
    """Warm duration of one execution."""
    flops: int = 0
    workspace_bytes: int = 0
    """High water inside the kernel above inputs and outputs, in bytes."""
    overwrites: bool = False
    """Whether a replay writes its result over an argument of the same geometry that nobody reads afterwards (pointwise ops)."""
    path: str = ""
    """Module path: `h.3.mlp`"""
    source: str = ""
    """`file.py:line`"""
    unpacks: bool = False
    """Whether its replay expands a packed form of its result, `rng_bytes` long, instead of running it (`ir.packing`)."""
    signature: str = ""
    """Key of target, shapes, dtypes, strides and literals: ops with equal keys cost the same."""


class Read(msgspec.Struct, frozen=True, kw_only=True):
    """One autograd node that unpacks a saved tensor."""

    first: int
    """First op of the node (the saved tensor is needed from here)."""
    last: int
    """Last op of the node (autograd lets go after it)."""


class Save(msgspec.Struct, frozen=True, kw_only=True):
    """The `index`-th tensor that autograd saves for backward."""

    index: int
    """Index in `Step.saves`."""
    value: int
    at: int
    """Number of ops that had begun when it was packed: it was saved after op `at - 1` and before op `at`."""
    node: str = ""
    """Autograd node that reads it: `MmBackward0`"""
    reads: tuple[Read, ...] = ()
    """Where it is unpacked, in order; empty if never."""


class Step(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One steady training step."""

    version: int = STEP_VERSION
    torch_version: str = ""
    device: str = "cpu"
    """Device that the budget is about."""
    ops: tuple[Op, ...] = ()
    values: tuple[Value, ...] = ()
    storages: tuple[Storage, ...] = ()
    saves: tuple[Save, ...] = ()
    seconds: float = 0.0
    """Measured duration of the whole plain step."""
    outside_bytes: int = 0
    """Bytes that exist throughout the step on its device and belong to no listed storage (optimizer state, gradients held)."""
    in_flight: int = 1
    """Micro-batches whose forward runs before the first backward (a pipeline's stage): what one forward leaves for its backward
    is there `in_flight - 1` times more, throughout the step."""
    notes: tuple[str, ...] = ()
    """What the trace wants a user to know, one sentence each."""
    hooks: tuple[tuple[str, bool], ...] = ()
    """Pairs of the user's own hooks on saved tensors that were around the model, and whether they gave back what they were given."""

    def to_json(self) -> bytes:
        """Versioned JSON, stable across releases of the same version."""
        return msgspec.json.encode(self)

    @staticmethod
    def from_json(data: bytes) -> Step:
        """Read what `to_json` wrote.

        Raises:
            ValueError: malformed JSON or another version.
        """
        step = msgspec.json.decode(data, type=Step)
        if step.version != STEP_VERSION:
            raise ValueError(f"step document has version {step.version}, this release reads {STEP_VERSION}")
        return step

    @functools.cached_property
    def writers(self) -> dict[tuple[int, int], int]:
        """(storage, version) -> op that wrote that version; leaves at version 0 are absent."""
        table = {(s.id, 0): s.birth for s in self.storages if s.birth != NO_OP}
        count: dict[int, int] = {}
        for op in self.ops:
            for storage in op.writes:
                count[storage] = count.get(storage, 0) + 1
                table[storage, count[storage]] = op.index
        return table

    @functools.cached_property
    def saved_storages(self) -> dict[int, tuple[Save, ...]]:
        """Storage -> its saves, for storages that autograd saves."""
        table: dict[int, list[Save]] = {}
        for save in self.saves:
            table.setdefault(self.values[save.value].storage, []).append(save)
        return {s: tuple(v) for s, v in table.items()}

    def dependencies(self, value: int) -> tuple[int, ...]:
        """Ops that must have run for `value` to be there: the one that returned the object, and the one that wrote its version.

        Empty for a leaf. Each of those ops reads values of its own (an in-place op lists the version it overwrites among its
        inputs), so that following `dependencies` of `Op.inputs` gives the whole recipe.
        """
        v = self.values[value]
        found = {self.values[v.view].producer, v.producer, self.writers.get((v.storage, v.version), NO_OP)}
        found.discard(NO_OP)
        return tuple(sorted(found))

    def is_final(self, value: int) -> bool:
        """Whether the value is at its storage's last version, so that holding a reference is enough to keep it."""
        v = self.values[value]
        return v.version == self.storages[v.storage].versions - 1

    def span(self, phase: Literal["forward", "backward", "optimizer"]) -> range:
        """Moments from the first to the last op of a phase (they may interleave under gradient accumulation)."""
        found = [op.index for op in self.ops if op.phase == phase]
        return range(found[0], found[-1] + 1) if found else range(0)
