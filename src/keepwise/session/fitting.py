"""`Fitting`: from a step that can be run to a plan that was proved on it. One object for one call of `fit`.

trace ──> time a plain step ──> plan ──> prove ──┬──> the plan
^               │
└── keep what replayed wrongly, and plan again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import nn

from keepwise._errors import KeepwiseError
from keepwise._units import show_bytes
from keepwise.ir import Phase, Step
from keepwise.proof.proof import Observation, Proof, proof_of_one
from keepwise.session.admit import (
    Outcome,
    generators_of,
    not_repeatable,
    observe_step,
    plain_fits,
    prove_plan,
    run_plain,
    traced_observation,
)
from keepwise.session.batch import Batch, Loss, whole_step
from keepwise.session.budget import is_word, parse_budget
from keepwise.session.device import auto_budget, device_bytes
from keepwise.session.document import PlanDocument
from keepwise.session.fingerprint import fingerprint
from keepwise.session.ladder import Ladder
from keepwise.session.overheads import excess_seconds, overheads_of, usual_seconds
from keepwise.session.pins import apply_pins, recomputed_by_pins
from keepwise.session.plan import Plan
from keepwise.session.planning import Planned, decided, plan_step
from keepwise.session.ranks import Ranks
from keepwise.session.sizes import Key, key_of, shapes_in_words
from keepwise.session.step_facts import computed_otherwise, notes_of, only_inside_forward
from keepwise.session.steppers import Steppers
from keepwise.simulate import simulate
from keepwise.trace import Traced, trace_steps
from keepwise.trace.admission import Admission

MAX_PROOFS = 8
"""How often storages whose replay differed are moved to the kept ones before the plan is given up."""
MAX_BATCHES = 8
"""Batches of distinct shapes that a plan is proved on."""


class NotPlannedError(Exception):
    """The step must be left as it is; the text says why."""


@dataclass(kw_only=True)
class Fitting:
    """What one call of `fit` was given, and what it found out so far. Names that are not explained are those of `fit`."""

    model: nn.Module
    """Without a plan on it."""
    batches: list[Batch]
    """Of one structure, the largest first: the first is recorded."""
    shapes: tuple[Key, ...]
    """Places and shapes of all batches that the user gave."""
    step: Callable[[], Any] | None
    loss: Loss | None
    optimizer: torch.optim.Optimizer | None
    """Made already; where the user named none, the one that the step was found to use."""
    steppers: Steppers
    """Puts back the optimizers that the step uses."""
    device: torch.device
    budget: int | float | str
    grads: str
    in_flight: int
    planner: Any
    pin: Mapping[str, str] | None
    on_infeasible: str
    verify: bool
    tokens: int | None
    say: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    """The user's own, that the step draws from."""
    repeats: bool | None = None
    """Whether two plain steps from the same state are equal; None: not known."""
    difference: str = ""
    """Where they first differ."""
    limit: int | None = None
    """The budget in bytes; None: no limit, or not known yet."""

    def __post_init__(self) -> None:
        self.batch = self.batches[0]
        self.run = self.step if self.step is not None else whole_step(self.model, self.batch, self.loss, self.optimizer)
        self.ranks = Ranks(self.model)

    def plan(self) -> Plan:
        """The plan, not applied.

        Raises:
            NotPlannedError: nothing can be dropped, whatever the budget.
            InfeasibleBudget: no plan fits.
            UsageError: a bad argument.
            Exception: whatever the model raises in a plain step.
        """
        traced = self._trace()
        self.traced = traced
        recorded = self._recorded(traced)
        otherwise = computed_otherwise(recorded)
        if otherwise:
            raise NotPlannedError(
                f"singular values or eigenvalues in {otherwise} are computed in another way wherever a dispatch mode watches, so "
                "nothing is dropped: a call of torch.linalg.svdvals, eigvalsh or eigvals of what needs no gradient, or of a "
                "factorization whose vectors are not used"
            )
        forced = recomputed_by_pins(recorded, self.pin)
        recorded, note = self.ranks.with_buckets(recorded, self.model)
        self.notes.extend([note] if note else [])
        plain = simulate(recorded)
        self.expected: Observation = traced_observation(traced)
        self.generators = generators_of(traced)
        self.plain_fits = self.ranks.agree(plain_fits(plain, self.device))
        if self.verify and self.plain_fits:
            recorded = self._time_plain(recorded)
        recorded, note = self.ranks.with_first_prices(recorded)
        self.notes.extend([note] if note else [])
        limit = self.limit = self._limit(plain.peak_bytes, plain.static_bytes)
        packs = True
        for _ in range(MAX_PROOFS + 1):
            step, planned = plan_step(
                recorded,
                self.planner,
                packs=packs,
                budget_bytes=limit,
                on_infeasible=self.on_infeasible,
                want_floor=self.wants_floor,
                progress=self.say,
                forced=forced,
            )
            self.notes.extend(n for n in planned.notes if n not in self.notes)
            document = self._document(step, planned, scales=not forced)
            plan = Plan(document)
            if not self.verify:
                return plan
            if plan.runner.program.drops_nothing:  # plans for other sizes may drop something
                return Plan(msgspec.structs.replace(document, proven=()), self._proof_of_plain())
            outcome, bad, proven = self._prove(plan)
            if not bad and outcome.observed is not None:
                return self._proved(plan, outcome, outcome.observed, proven)
            if step is not recorded:
                packs, bad = False, frozenset(s for s in bad if s < len(recorded.storages))
            if outcome.observed is None:  # what comes before it in backward is not known yet, and hangs on the same
                bad = _and_what_is_made_of(recorded, bad)
            recorded = _keep_also(recorded, bad)
            forced -= bad
            self.notes.append(
                f"kept because their replay differed from the original on the real step: {len(bad)} of the saved tensors"
            )
        raise NotPlannedError(
            f"replays still differ from their originals after {MAX_PROOFS} rounds of keeping the tensors concerned, so nothing "
            "is dropped. Please report this model"
        )

    # ------------------------------------------------------------------ the recorded step

    def _trace(self) -> Traced:
        """Two recorded steps.

        Raises:
            NotPlannedError: the step works, but not where it is watched.
        """
        self.say("recording two steps")
        try:
            traced = self._trace_once(None)
            if self.optimizer is None and self.steppers.only is not None:
                self.steppers.restore()
                self.optimizer = self.steppers.only
                self.say("recording again, with the optimizer that the step uses")
                traced = self._trace_once(traced.admission)
        except Exception as error:
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                raise NotPlannedError(
                    "the step uses torch.func transforms, under which torch allows no hooks on saved tensors: nothing is dropped"
                ) from None
            if isinstance(error, torch.OutOfMemoryError | KeepwiseError):
                raise
            self.steppers.restore()
            works = self._works()
            self.steppers.restore()
            if not works:
                raise
            raise NotPlannedError(
                f"the step works, but not where a dispatch mode watches it, so nothing is dropped: {error}"
            ) from None
        self.steppers.restore()
        return traced

    def _trace_once(self, admission: Admission | None) -> Traced:
        return trace_steps(
            self.run,
            model=self.model,
            inputs=(self.batch.args, self.batch.kwargs),
            optimizer=self.optimizer,
            grads="held" if self.grads == "held" else "fresh",
            device=self.device,
            admission=admission,
            observe=observe_step(self.model, self.optimizer),
        )

    def _works(self) -> bool:
        """Whether a plain step ends without an error."""
        try:
            run_plain(self.model, self.run, self.batch, [], self.optimizer)
        except Exception:
            return False
        return True

    def _recorded(self, traced: Traced) -> Step:
        """The step that is planned, with what is known to be kept in any case."""
        recorded = traced.recording.step
        self.notes = [*notes_of(traced), *self.steppers.notes]
        if not any(op.phase == Phase.BACKWARD for op in recorded.ops):
            self.notes.append(
                "the step ran no backward, so nothing reads what was saved and nothing is planned: let step= call backward"
            )
        if self.step is None:
            recorded = only_inside_forward(recorded, traced.recording.inside)
        return msgspec.structs.replace(apply_pins(recorded, self.pin), in_flight=self.in_flight)

    def _plain(self) -> tuple[float, Observation]:
        """Seconds of a plain step, and what it leaves behind."""
        found = run_plain(self.model, self.run, self.batch, self.generators, self.optimizer)
        self.steppers.restore()
        return found

    def _time_plain(self, recorded: Step) -> Step:
        """The step with the duration of a plain one, which also shows whether steps repeat."""
        self.say("timing a plain step")
        seconds, again = self._plain()
        difference = self.ranks.first_text(self.expected.difference(again))
        if (
            difference
        ):  # what was recorded may be the odd one: a first step, or one that an operator makes otherwise when watched
            self.expected = again
            difference = self.ranks.first_text(again.difference(self._plain()[1]))
            if difference:
                self.notes.append(not_repeatable(self.traced, difference))
        self.repeats, self.difference = not difference, difference
        return msgspec.structs.replace(recorded, seconds=seconds)

    # ------------------------------------------------------------------ the plan

    @property
    def wants_floor(self) -> bool:
        """Whether the user asked for the smallest peak."""
        return is_word(self.budget, "min")

    def _limit(self, plain_peak_bytes: int, static_bytes: int) -> int | None:
        """The budget in bytes."""
        auto, auto_text = auto_budget(self.device, static_bytes)
        if is_word(self.budget, "auto"):
            self.notes.append(auto_text)
        limit = parse_budget(
            self.budget,
            plain_peak_bytes=plain_peak_bytes,
            floor_bytes=None,
            device_bytes=device_bytes(self.device),
            auto_bytes=auto,
        )
        return self.ranks.least(limit)

    def _document(self, step: Step, planned: Planned, *, scales: bool) -> PlanDocument:
        return PlanDocument(
            fingerprint=fingerprint(self.model),
            **decided(step, planned, self.budget, self.limit, overheads_of(planned.timeline)),
            restarts=self.step is None,
            scales=self.step is None and self.planner == "auto" and scales,
            batch_key=self.shapes[0],
            tokens=self.tokens,
            notes=tuple(self.notes),
            shapes=tuple(map(shapes_in_words, self.shapes)),
        )

    # ------------------------------------------------------------------ the proof

    def _proof_of_plain(self) -> Proof | None:
        """What is known where the plan changes nothing."""
        if self.repeats is None:
            return None
        return proof_of_one(
            self.expected, self.expected, repeats=self.repeats, repeat_difference=self.difference, num_replays=0
        )

    def _run_planned(self, plan: Plan, run: Callable[[], Any], batch: Batch) -> Outcome:
        """A planned step; a second one where the first only saw what hooks of the user's give back, and dropped nothing under them."""
        outcome = self._run_planned_once(plan, run, batch)
        if not self.ranks.agree(not plan.runner.checked.trust.has_grown):
            outcome = self._run_planned_once(plan, run, batch)
        return outcome

    def _run_planned_once(self, plan: Plan, run: Callable[[], Any], batch: Batch) -> Outcome:
        outcome = prove_plan(
            plan, self.model, run, batch, self.generators, self.optimizer, uses_context=self.step is not None
        )
        self.steppers.restore()
        return outcome

    def _prove(self, plan: Plan) -> tuple[Outcome, frozenset[int], frozenset[int]]:
        """Planned steps, with every replay compared with its original and the whole with the plain one.

        Returns:
            What the step of the recorded batch showed; storages whose replay differs, views whose replay is right, for all batches.

        Raises:
            NotPlannedError: every replay is right, and yet the step differs from a plain one.
        """
        self.say("proving the plan on a real step")
        outcome = self._run_planned(plan, self.run, self.batch)
        bad, proven = self.ranks.union(outcome.bad_storages), outcome.audited
        complete = self.ranks.agree(outcome.observed is not None)
        if bad or not complete or outcome.observed is None:
            return outcome, bad, proven
        found = self.ranks.first_text(self.expected.difference(outcome.observed))
        if found and self.repeats is None:
            self.expected = self._plain()[1]
            self.difference = self.expected.difference(self._plain()[1])
            self.repeats = not self.difference
            found = self.expected.difference(outcome.observed)
        if found and self.repeats:  # what changes every few steps only (the growth of a loss scale) shows late
            self.difference = self.expected.difference(self._plain()[1])
            second = self._run_planned(plan, self.run, self.batch)
            if not self.difference and second.observed is not None:
                self.difference = outcome.observed.difference(second.observed)
            self.repeats = not self.difference
            if self.repeats:
                raise NotPlannedError(_unexplained(found))
            self.notes.append(not_repeatable(self.traced, self.difference))
        for other in self.batches[1:MAX_BATCHES]:
            self.say(f"proving the plan for {shapes_in_words(key_of(other.args, other.kwargs))}")
            another = self._prove_other(plan, other)
            bad |= another.bad_storages
            proven |= another.audited
        return outcome, bad, proven

    def _prove_other(self, plan: Plan, batch: Batch) -> Outcome:
        """A real step of a batch that the plan was not made for, from which the plan learns the size of its activations.

        Raises:
            NotPlannedError: as `_prove` does.
        """
        run = whole_step(self.model, batch, self.loss, self.optimizer)

        def plain() -> Observation:
            return run_plain(self.model, run, batch, self.generators, self.optimizer)[1]

        expected = plain() if self.plain_fits and self.repeats is not False else None
        outcome = self._run_planned(plan, run, batch)
        if expected is not None and outcome.observed is not None and not outcome.bad_storages:
            difference = expected.difference(outcome.observed)
            if difference and not expected.difference(plain()):
                raise NotPlannedError(_unexplained(difference))
        if outcome.num_deviations:
            note = (
                f"a batch of {shapes_in_words(key_of(batch.args, batch.kwargs))} takes another path than the recorded one: "
                f"{outcome.num_deviations} tensors ({show_bytes(outcome.deviation_bytes)}) that the plan drops are kept there"
            )
            if note not in self.notes:
                self.notes.append(note)
        return outcome

    def _proved(self, plan: Plan, outcome: Outcome, observed: Observation, proven: frozenset[int]) -> Plan:
        """The plan with its proof, and with what its replays took."""
        proof = proof_of_one(
            self.expected,
            observed,
            repeats=self.repeats is not False,
            repeat_difference=self.difference,
            num_replays=outcome.num_audited,
        )
        chooser, document = plan.runner.chooser, plan.document
        took = usual_seconds(document.step, document.schedule, outcome.replays) + outcome.packing_seconds
        measured = self.ranks.gathered(took)[0]
        document = msgspec.structs.replace(
            document,
            overhead_seconds=document.overhead_seconds
            + excess_seconds(document.step, document.added_seconds, measured),
            notes=tuple(self.notes),
            proven=tuple(sorted(proven)),
            batch_scales=chooser.scales if isinstance(chooser, Ladder) else (),
        )
        return Plan(document, proof)


def _unexplained(difference: str) -> str:
    return (
        f"under the plan {difference} from the plain step although every replay is right, so nothing is dropped. Some operators of "
        "PyTorch are carried out in another way wherever a dispatch mode is active (torch.linalg.svdvals of what needs no gradient); "
        "if the model has none of them, please report it"
    )


def _and_what_is_made_of(step: Step, storages: frozenset[int]) -> frozenset[int]:
    """These storages and every saved one that forward computed from them."""
    found = set(storages)
    for op in step.ops:
        if op.phase == Phase.FORWARD and any(step.values[v].storage in found for v in op.inputs):
            found.update(step.values[v].storage for v in op.outputs if v >= 0)
    return storages | (found & set(step.saved_storages))


def _keep_also(step: Step, storages: frozenset[int]) -> Step:
    new = [
        msgspec.structs.replace(s, keep_reason="its replay differed from the original on the real step")
        if s.id in storages
        else s
        for s in step.storages
    ]
    return msgspec.structs.replace(step, storages=tuple(new))
