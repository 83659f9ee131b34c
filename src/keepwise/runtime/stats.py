"""What happened in the last step: one forward pass of the model and its backward, or one `with plan:`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from keepwise._errors import MismatchError


@dataclass(slots=True)
class StepStats:
    """Counters of one step, filled by the runtime."""

    num_saved: int = 0
    """Tensors that autograd saved under the plan."""
    saved_bytes: int = 0
    """Bytes of the saved tensors that are no parameters or inputs, each time one is saved."""
    num_dropped: int = 0
    """Saved tensors that were dropped."""
    dropped_bytes: int = 0
    """Bytes of the storages of dropped saved tensors, each storage once a window."""
    num_replays: int = 0
    """Windows replayed."""
    num_replayed: int = 0
    """Tensors that replays made for those who read them: saved tensors, and what windows inside of a window read."""
    num_ops_replayed: int = 0
    replay_seconds: float = 0.0
    packing_seconds: float = 0.0
    """Time that forward took to pack what replays expand."""
    recycled_bytes: int = 0
    """Bytes of results of forward that were written into memory of dead ones."""
    recycled_bytes_in_replays: int = 0
    num_deviations: int = 0
    """Saved tensors that the plan drops and that were kept because the step differed from the recorded one."""
    deviation_bytes: int = 0
    """Their bytes, and those of other tensors that had to be held for that reason."""
    first_difference: str = ""
    """Where the step first differed from the recorded one."""
    num_ops: int = 0
    """Ops that the guard saw."""
    num_unknown_ops: int = 0
    """Ops that did not match the recording."""
    num_audited: int = 0
    """Replayed tensors whose digest was compared with the original."""
    foreign_bytes: int = 0
    """Bytes of kept tensors that passed through the user's own saved-tensor hooks."""
    peak_bytes: int | None = None
    """On CUDA the most bytes that the allocator had given out at once, since its peak statistics were last reset and until
    `plan.stats` was asked. Nothing of ours resets them: after `torch.cuda.reset_peak_memory_stats()` before a step it is that step's
    peak, otherwise an upper bound of it. None on the CPU, whose allocator counts nothing: `keepwise.measure` runs a step and counts."""
    counted_before: int | None = None
    """The same when the step began."""
    over_budget: bool = False
    """Whether the step is known to be over the budget: it was predicted from what the step saved and what it had to hold because
    it differs, or CUDA's allocator counted a new peak above the budget during the step. False is no proof that it was within."""
    auditing: bool = False
    modes: frozenset[type] = frozenset()
    """The user's dispatch modes under which no step was seen before; such a step is audited."""
    audited: set[int] = field(default_factory=set)
    """Views whose replay equals the original."""
    collecting: bool = False
    """Whether an audit notes mismatches instead of raising, and each replay's time."""
    replays: list[tuple[int, float]] = field(default_factory=list)
    """Window and seconds of each replay, in order; only where they are collected."""
    mismatched: list[int] = field(default_factory=list)
    """Views whose replay differs from the original."""
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def dropped(self) -> int:
        """Saved tensors that were dropped."""
        return self.num_dropped

    @property
    def replayed(self) -> int:
        """Tensors that were replayed."""
        return self.num_replayed

    @property
    def ops_replayed(self) -> int:
        """Ops that were replayed."""
        return self.num_ops_replayed

    @property
    def seconds(self) -> float:
        """Time that replays took."""
        return self.replay_seconds

    @property
    def deviations(self) -> int:
        """Saved tensors kept because the step differed from the recorded one."""
        return self.num_deviations

    def note_peak(self, highest: int | None, budget_bytes: int | None) -> None:
        """Take over what the device has counted up to now; nothing where it did not count when the step began."""
        if highest is None or self.counted_before is None:
            return
        self.peak_bytes = highest
        # An old peak says nothing about this step.
        if budget_bytes is not None and highest > budget_bytes and highest != self.counted_before:
            self.over_budget = True

    def add_replay(self, window: int, num_tensors: int, num_ops: int, seconds: float) -> None:
        """Count one replay."""
        with self.lock:
            if self.collecting:
                self.replays.append((window, seconds))
            self.num_replays += 1
            self.num_replayed += num_tensors
            self.num_ops_replayed += num_ops
            self.replay_seconds += seconds

    def differs(self, what: str) -> None:
        """Note where the step differs from the recorded one."""
        self.first_difference = self.first_difference or what

    @property
    def kept_share(self) -> float:
        """Share of the bytes to be dropped that had to be kept because the step differed."""
        return self.deviation_bytes / max(self.deviation_bytes + self.dropped_bytes, 1)

    def compare(self, original: int, replayed: int, view: int, path: str) -> None:
        """Compare the digests of a dropped tensor and of its replay.

        Raises:
            MismatchError: they differ.
        """
        with self.lock:
            self.num_audited += 1
            if original == replayed:
                self.audited.add(view)
        if original != replayed:
            with self.lock:
                self.mismatched.append(view)
            if self.collecting:
                return
            where = f" in {path}" if path else ""
            if self.modes:
                names = ", ".join(sorted(m.__name__ for m in self.modes))
                raise MismatchError(
                    f"the replay of tensor {view}{where} differs from the original. The dispatch mode {names} was not active when "
                    "the plan was made, and it changes what ops return: use plan.paused() around such steps, or run "
                    "keepwise.fit under it."
                )
            raise MismatchError(
                f"the replay of tensor {view}{where} differs from the original. Keep it with pin= or run keepwise.fit again; "
                "please report the op that made it."
            )

    def moved(self, views: list[int]) -> None:
        """These views cannot be replayed in a step that plainly works: what their replay reads counts as written.

        Raises:
            MismatchError: always.
        """
        with self.lock:
            self.mismatched.extend(views)
        raise MismatchError("what a replay reads counts as written since it was captured")

    def missing(self, view: int, path: str) -> None:
        """A replay did not return a tensor that its original returned.

        Raises:
            MismatchError: always.
        """
        with self.lock:
            self.mismatched.append(view)
        where = f" in {path}" if path else ""
        raise MismatchError(
            f"the replay made no tensor {view}{where}, which the original made. Keep it with pin= or run keepwise.fit again; "
            "please report the op that made it."
        )
