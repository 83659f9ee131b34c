"""`Plan`: a decision for one model's step, and the handle to apply, inspect, save and audit it."""

from __future__ import annotations

import contextlib
import difflib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from keepwise._errors import PlanMismatch, UsageError
from keepwise._units import SIZES, show_bytes, show_number, unit_of
from keepwise.cost import DeviceProfile, device_of
from keepwise.ir import Phase, Schedule, Step
from keepwise.plan.optimal import memory_price
from keepwise.proof.proof import Proof
from keepwise.runtime.apply import Runner, attach, detach, models_of
from keepwise.runtime.program import compile_program
from keepwise.runtime.stats import StepStats
from keepwise.session.budget import check_budget
from keepwise.session.decisions import Decision, Keep, Offload, Pack, Recompute, decisions_of, explained
from keepwise.session.document import PlanDocument, read_document, write_document
from keepwise.session.fingerprint import check_fingerprint
from keepwise.session.ladder import Ladder
from keepwise.session.overheads import Overheads
from keepwise.session.pins import matches
from keepwise.session.replan import replan
from keepwise.session.sizes import structure
from keepwise.session.status import Status
from keepwise.session.switch import Branch, Switch
from keepwise.simulate import ScheduleError, Timeline, simulate, spare_of


class Plan:
    """What `keepwise.fit` returns. See the attributes for the numbers, `explain` for the reasons."""

    def __init__(self, document: PlanDocument, proof: Proof | None = None) -> None:
        self.document = document
        self.proof = proof
        """What `fit` proved on a real step; None where it was asked not to, or where the plan comes from a file."""
        self.timeline: Timeline = simulate(document.step, document.schedule)
        """The simulated step under the schedule."""
        self._decisions: tuple[Decision, ...] | None = None
        self._contexts = threading.local()
        own = _branch(document, self.timeline)
        self.runner = Runner(own.program, restarts=document.restarts, budget_bytes=document.budget_bytes)
        self.runner.chooser = own.ladder
        if document.variants:
            self.runner.chooser = Switch(
                own, {structure(v.batch_key): _branch(v, simulate(v.step, v.schedule)) for v in document.variants}
            )

    def __reduce__(self) -> Any:
        """A copy, by pickle or `copy`, is the decision alone: it is applied to nothing and has no statistics."""
        return type(self), (self.document, self.proof)

    # What was planned.

    @property
    def status(self) -> Status:
        """How planning ended; the value is a sentence."""
        return Status[self.document.status]

    @property
    def step(self) -> Step:
        """The recorded step."""
        return self.document.step

    @property
    def schedule(self) -> Schedule:
        """What is done differently from it."""
        return self.document.schedule

    @property
    def budget_bytes(self) -> int | None:
        """The budget in bytes; None for no limit."""
        return self.document.budget_bytes

    @property
    def plain_peak_bytes(self) -> int:
        """Predicted peak of the step without Keepwise, in bytes."""
        return self.document.plain_peak_bytes

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of the step under the plan, in bytes."""
        return self.document.peak_bytes

    @property
    def floor_bytes(self) -> int:
        """Smallest peak that any plan found reaches, in bytes."""
        return self.document.floor_bytes

    @property
    def static_bytes(self) -> int:
        """Parameters, gradients, optimizer state, buffers and inputs, in bytes."""
        return self.timeline.static_bytes

    @property
    def added_seconds(self) -> float:
        """Predicted seconds that the plan adds to a step: `replay_seconds` + `overhead_seconds` - `saved_seconds`, at least 0."""
        return self._overheads.added(self.replay_seconds)

    @property
    def replay_seconds(self) -> float:
        """Predicted seconds of all replays, by the prices of their ops."""
        return self.document.added_seconds

    @property
    def saved_seconds(self) -> float:
        """Predicted seconds that a step gains because results are written into memory of dead ones; 0 where new memory is free."""
        return self.document.saved_seconds

    @property
    def overhead_seconds(self) -> float:
        """Predicted seconds that a planned step takes besides its replays; 0 where a device hides them.

        That is the op guard, the hooks on saved tensors, memory that is given back to the system twice, and by how much the replays took
        longer than their ops alone in the step that proved the plan (below 0 where they took less).
        """
        return self.document.overhead_seconds

    @property
    def step_seconds(self) -> float:
        """Seconds of the plain step."""
        return self.step.seconds

    @property
    def bound_seconds(self) -> float:
        """Dual bound on `replay_seconds` within the family of windows that was searched, put in its place in `added_seconds`."""
        return self._overheads.added(self.document.bound_seconds)

    @property
    def _overheads(self) -> Overheads:
        return Overheads(saved_seconds=self.saved_seconds, overhead_seconds=self.overhead_seconds)

    @property
    def gap(self) -> float:
        """(replays - bound on them) / max(that bound, 1 % of the step)."""
        bound = self.document.bound_seconds
        return (self.replay_seconds - bound) / max(bound, 0.01 * self.step_seconds, 1e-12)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """What happens to each activation that autograd saves."""
        if self._decisions is None:
            self._decisions = decisions_of(self.step, self.schedule)
        return self._decisions

    def _total(self, kind: type[Decision]) -> int:
        return sum(d.nbytes for d in self.decisions if isinstance(d, kind))

    @property
    def kept_bytes(self) -> int:
        """Bytes of activations that are kept as in the plain step."""
        return self._total(Keep)

    @property
    def dropped_bytes(self) -> int:
        """Bytes of activations that are dropped and replayed."""
        return self._total(Recompute)

    @property
    def packed_bytes(self) -> int:
        """Bytes of activations that are held in a smaller form."""
        return self._total(Pack)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes of activations that are held on the host."""
        return self._total(Offload)

    @property
    def memory_price(self) -> float | None:
        """Seconds of a step that one more GiB would save at this budget; None for plans that `auto` did not make."""
        if self.schedule.planner not in ("optimal", "floor", "none"):
            return None
        return memory_price(self.step, self.peak_bytes if self.budget_bytes is None else self.budget_bytes) * 2**30

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about the step, one sentence each."""
        return self.document.notes

    @property
    def shapes(self) -> tuple[str, ...]:
        """Shapes of the batches that the plan was made for."""
        return self.document.shapes

    # In words.

    def summary(self) -> str:
        """The first line of `str(plan)`."""
        if self.status is Status.INERT:
            return f"keepwise: nothing is planned: {self.notes[0] if self.notes else self.status.value}"
        unit = unit_of(max(self.plain_peak_bytes, self.peak_bytes))
        plain, peak = (show_number(n / SIZES[unit]) for n in (self.plain_peak_bytes, self.peak_bytes))
        limit = self.budget_bytes
        if limit is None:
            budget = self.document.budget
        else:
            budget = show_number(limit / SIZES[unit]) if unit_of(limit) == unit else show_bytes(limit)
        seconds = max(self.step_seconds, 1e-12)
        dropped = sum(isinstance(d, Recompute) for d in self.decisions)
        return (
            f"keepwise: {plain} -> {peak} {unit} (budget {budget}), +{100 * self.added_seconds / seconds:.1f} % time "
            f"(bound +{100 * self.bound_seconds / seconds:.1f} %), {dropped} of {len(self.decisions)} tensors dropped"
        )

    def time_in_words(self) -> str:
        """What the predicted added time is made of, in shares of a step; empty where nothing is replayed."""
        if not self.schedule.windows:
            return ""
        parts = {
            "replays": self.replay_seconds,
            "overhead": self.overhead_seconds,
            "memory used again": -self.saved_seconds,
        }
        shares = {what: round(100 * n / max(self.step_seconds, 1e-12), 1) for what, n in parts.items()}
        return ", ".join(f"{what} {share:+.1f} %" for what, share in shares.items() if share or what == "replays")

    def __str__(self) -> str:
        lines = [self.summary(), f"  {self.status.value}"]
        if self.status is Status.INERT:
            return "\n".join([*lines, *(f"  note: {n}" for n in self.notes[1:])])
        if self.schedule.why:
            lines.append(f"  planner {self.schedule.planner or '(own)'}: {self.schedule.why}")
        for title, kind in (("kept", Keep), ("replayed", Recompute), ("packed", Pack), ("offloaded", Offload)):
            found = [d.nbytes for d in self.decisions if isinstance(d, kind)]
            if found:
                lines.append(f"  {title}: {show_bytes(sum(found))} in {len(found)} tensor{'s' * (len(found) > 1)}")
        if self.schedule.windows:
            lines.append(f"  time: {self.time_in_words()}")
        if self.document.tokens is not None:
            plain, planned = (self.document.tokens / max(s, 1e-12) for s in (self.step_seconds, self._planned_seconds))
            lines.append(f"  speed: {planned:,.0f} tokens a second predicted (plain {plain:,.0f})")
        reasons: dict[str, list[Decision]] = {}
        for d in self.decisions:
            if d.is_forced:
                reasons.setdefault(d.why, []).append(d)
        for why, ds in sorted(reasons.items(), key=lambda r: -sum(d.nbytes for d in r[1]))[:6]:
            paths = sorted({d.path for d in ds if d.path})
            where = f" ({', '.join(paths[:4])}{', ...' if len(paths) > 4 else ''})" if paths else ""
            lines.append(f"  must be kept: {show_bytes(sum(d.nbytes for d in ds))}: {why}{where}")
        lines.extend(f"  note: {n}" for n in self.notes)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return self.summary()

    def decisions_in(self, path: str) -> tuple[Decision, ...]:
        """Decisions about what a module, or one inside of it, made.

        Args:
            path: module path, or a pattern such as `h.*.mlp`; empty for the whole model.
        """
        return tuple(d for d in self.decisions if not path or matches(d.path, path))

    def explain(self, path: str = "") -> str:
        """Why each activation of a module (and of those inside it) is kept, recomputed, packed or offloaded.

        Args:
            path: module path, or a pattern such as `h.*.mlp`; empty for the whole model.

        Raises:
            UsageError: the step has no tensor there.
        """
        if self.status is Status.INERT:
            return str(self)
        found = self.decisions_in(path)
        if not found:
            known = sorted({d.path for d in self.decisions if d.path})
            close = difflib.get_close_matches(path, known, n=3)
            hint = f" (did you mean {' or '.join(close)}?)" if close else ""
            more = f" and {len(known) - 12} more" if len(known) > 12 else ""
            raise UsageError(
                f"no saved activation was made in {path!r}{hint}. Modules that made some: {', '.join(known[:12]) or 'none'}{more}. (What a "
                "linear layer saves, its input, was made by the module before it.)"
            )
        return explained(found, self.memory_price)

    # At work.

    def apply(self, model: nn.Module) -> Plan:
        """Let a model of the same architecture run under this plan; returns the plan.

        Raises:
            PlanMismatch: another architecture, torch version or pattern of `requires_grad`; the message names the first difference.
            KeepwiseError: a plan is applied to the model already.
        """
        check_fingerprint(self.document.fingerprint, model)
        if self.status is not Status.INERT and os.environ.get("KEEPWISE") != "0":
            attach(model, self.runner)
        return self

    def replan(
        self,
        budget: int | float | str,
        *,
        device: DeviceProfile | str | None = None,
        planner: Any = "auto",
        on_infeasible: str = "raise",
    ) -> Plan:
        """The recorded step planned again, without the model: for another budget, or with the prices of another machine.

        Args:
            budget: as for `fit`.
            device: a machine that is not here: a profile, the name of one (`"h100"`), or the path of its JSON file. Each op is
                priced by its roofline, which is good for comparing plans, and not as a clock. None: the prices that were measured.
            planner: as for `fit`.
            on_infeasible: as for `fit`.

        Returns:
            A plan that is applied to nothing and was not run. Where it drops tensors whose replay was never compared with its
            original, its first steps are audited.

        Raises:
            InfeasibleBudget: no plan fits.
            UsageError: a bad argument, or a step that cannot be planned.
        """
        check_budget(budget)
        if on_infeasible not in ("raise", "floor"):
            raise UsageError(f"on_infeasible must be 'raise' or 'floor', got {on_infeasible!r}")
        profile = device_of(device) if isinstance(device, str) else device
        return Plan(replan(self.document, budget, device=profile, planner=planner, on_infeasible=on_infeasible))

    def remove(self) -> None:
        """Take the plan off every model; they run as before."""
        for model in models_of(self.runner):
            detach(model)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Models run as before inside this context."""
        self.runner.num_paused += 1
        try:
            yield
        finally:
            self.runner.num_paused -= 1

    def __enter__(self) -> Plan:
        stack = getattr(self._contexts, "stack", None)
        if stack is None:
            stack = self._contexts.stack = []
        exits = contextlib.ExitStack()
        if self.runner.is_active():
            models = models_of(self.runner)
            exits.enter_context(self.runner.guard(models[0] if models else None))
        stack.append(exits)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._contexts.stack.pop().__exit__(*exc)

    def audit(self, every: int = 1) -> None:
        """Compare the digest of each dropped tensor with its replay in every `every`-th step from now on; 0 switches it off.

        A difference raises `MismatchError` in backward, naming the tensor.
        """
        if every < 0:
            raise UsageError(f"every must be 0 (off) or a positive number of steps, got {every}")
        self.runner.audit_every = every
        self.runner.num_steps = 0

    @property
    def stats(self) -> StepStats:
        """Counters of the last step: one forward pass of the model and its backward, or one `with plan:`.

        What the device counts (`peak_bytes`) is read now: ask right after the step.
        """
        return self.runner.last_stats()

    def metrics(self) -> dict[str, float]:
        """Numbers for a logger, under `keepwise/`."""
        stats = self.stats
        tokens = self.document.tokens
        speed = {} if tokens is None else {"keepwise/predicted_tokens_per_second": tokens / self._planned_seconds}
        return {
            "keepwise/plain_peak_bytes": float(self.plain_peak_bytes),
            "keepwise/peak_bytes": float(self.peak_bytes),
            "keepwise/budget_bytes": float(self.budget_bytes or 0),
            "keepwise/added_seconds": self.added_seconds,
            "keepwise/saved_tensors": float(stats.num_saved),
            "keepwise/dropped_tensors": float(stats.num_dropped),
            "keepwise/dropped_bytes": float(stats.dropped_bytes),
            "keepwise/replays": float(stats.num_replays),
            "keepwise/replayed_ops": float(stats.num_ops_replayed),
            "keepwise/replay_seconds": stats.replay_seconds,
            "keepwise/deviations": float(stats.num_deviations),
            "keepwise/over_budget": float(stats.over_budget),
            **speed,
        }

    @property
    def _planned_seconds(self) -> float:
        """Predicted seconds of a step under the plan."""
        return max(self.step_seconds + self.added_seconds, 1e-12)

    # On disk.

    def save(self, path: str | os.PathLike[str], *, force: bool = True) -> None:
        """Write the plan as JSON."""
        write_document(self.document, Path(path), force=force)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanMismatch: the file is truncated, no plan, of another version, or names an op that is not registered here.
            FileNotFoundError: there is no such file.
        """
        document = read_document(Path(path))
        try:
            return Plan(document)
        except ScheduleError as error:
            raise PlanMismatch(f"{path} is a damaged plan: {error}. Write it again with plan.save") from None
        except AttributeError as error:
            raise PlanMismatch(
                f"{path}: {error}. Import the package that defines it before loading the plan, or run keepwise.fit again"
            ) from None

    def report(self, path: str | os.PathLike[str], *, force: bool = True) -> None:
        """Write the report as one HTML page that needs no network.

        Raises:
            UsageError: the file exists and `force` is off.
        """
        from keepwise.report import build_report, render_html

        target = Path(path)
        if target.exists() and not force:
            raise UsageError(f"{target} exists; pass force=True to overwrite it")
        report = build_report(self, plain=simulate(self.step), title=self.document.fingerprint.model)
        target.write_text(render_html(report), encoding="utf-8")

    @property
    def num_forward_ops(self) -> int:
        """Ops of the recorded forward."""
        return sum(op.phase == Phase.FORWARD for op in self.step.ops)


def _branch(document: PlanDocument, timeline: Timeline) -> Branch:
    """The programs of one recorded structure."""
    proven = None if document.proven is None else set(document.proven)
    program = compile_program(document.step, document.schedule, spare_of(timeline), proven)
    if not document.scales or document.budget_bytes is None:
        return Branch(program=program, ladder=None)
    ladder = Ladder(
        document.step,
        document.budget_bytes,
        program,
        document.batch_key,
        document.peak_bytes,
        document.batch_scales,
        proven,
    )
    return Branch(program=program, ladder=ladder)
