"""`keepwise.fit`: trace, plan, prove, apply."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from torch import nn

from keepwise._errors import KeepwiseError, UsageError
from keepwise._rank import logger, rank
from keepwise._units import show_bytes
from keepwise.ir import Phase, Schedule, Step
from keepwise.proof.proof import proof_of_one
from keepwise.runtime.apply import attach, detach, runner_of
from keepwise.session.admit import (
    Outcome,
    generators_of,
    not_repeatable,
    observe_step,
    prove_plan,
    run_plain,
    traced_observation,
)
from keepwise.session.batch import (
    Batch,
    Loss,
    as_batch,
    check_devices,
    check_in_flight,
    largest_first,
    make_optimizer,
    whole_step,
)
from keepwise.session.budget import check_budget, parse_budget
from keepwise.session.cache import PlanCache
from keepwise.session.device import auto_budget, device_bytes, free_bytes
from keepwise.session.document import PlanDocument
from keepwise.session.fingerprint import fingerprint
from keepwise.session.ladder import Ladder
from keepwise.session.pages import saved_seconds
from keepwise.session.pins import apply_pins, check_pins, recomputed_by_pins
from keepwise.session.plan import Plan
from keepwise.session.planning import Planned, plan_step
from keepwise.session.ranks import Ranks
from keepwise.session.sizes import Key, key_of, shapes_in_words, structure
from keepwise.session.status import Status
from keepwise.session.step_facts import notes_of, only_inside_forward
from keepwise.session.steppers import Steppers
from keepwise.simulate import simulate
from keepwise.trace import Traced, trace_steps
from keepwise.trace.admission import Admission
from keepwise.trace.arena import ARENA

MAX_PROOFS = 8
"""How often storages whose replay differed are moved to the kept ones before the plan is given up."""
MAX_BATCHES = 8
"""Batches of distinct shapes that a plan is proved on."""


def fit(
    model: nn.Module,
    args: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    budget: int | float | str = "auto",
    loss: Loss | None = None,
    step: Callable[[], Any] | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    batches: Any = None,
    grads: str = "held",
    in_flight: int = 1,
    host_budget: int | float | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    planner: Any = "auto",
    pin: Mapping[str, str] | None = None,
    on_infeasible: str = "raise",
    cache: str | os.PathLike[str] | None = None,
    tokens: int | None = None,
    verify: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Plan:
    """Make the training step of a model fit a memory budget at the least cost in time, and apply that plan to the model.

    It trains nothing: parameters, gradients, buffers, generators, the optimizer and the arguments are as before when it returns.

    Args:
        model: the model; it runs under the plan afterwards.
        args: a tuple for `model(*args)`, a mapping for `model(**args)`, or a tensor for one argument.
        kwargs: keyword arguments besides.
        budget: peak of the whole step in bytes allocated on the model's device: an int, `"20GiB"`, `"80%"`, `"0.6x"`, `"auto"`,
            `"min"` or `"max"`.
        loss: model output -> scalar tensor; by default the output itself if it is a scalar, else its `.loss` or `["loss"]`.
        step: instead of `args`: a callable without arguments that runs one whole step of any form. Use `with plan:` around later steps.
            It runs several times; the model, optimizers and generators are put back after it, other things that it changes (a
            scheduler, a file) are not.
        optimizer: an instance or a class: its state and its `step()` count in the peak.
        batches: several representative batches, largest first: one plan set for all of them, proved on each shape.
        grads: `"held"`: gradient buffers exist during the whole step; `"fresh"`: they appear in backward.
        in_flight: micro-batches whose forward runs before the first backward: what each of them leaves for its backward counts.
        host_budget: host memory for offloaded tensors; None: no offload.
        disk: folder for the trace's spilled tensors; by default the system's temporary folder.
        planner: a name or an object with `plan(step, budget_bytes) -> Schedule`.
        pin: module pattern -> `"keep"` or `"recompute"` for what it saves (`"offload"` is not there yet).
        on_infeasible: `"raise"`, or `"floor"` to apply the plan with the smallest peak instead.
        cache: folder with plans: a matching one is reused, a new one is written.
        tokens: tokens of the batch, for reports.
        verify: run the planned step once, compare every replay with its original and the step with the plain one.
        progress: told what happens, a short sentence at a time.

    Returns:
        The plan, applied to the model; it is also logged at INFO by the logger `keepwise`.

    Raises:
        UsageError: a bad argument; nothing was changed.
        InfeasibleBudget: no plan fits.
        Exception: whatever the model raises in a plain step.
    """
    say = progress or (lambda _: None)
    check_budget(budget)
    _check_options(
        grads=grads,
        in_flight=in_flight,
        on_infeasible=on_infeasible,
        step=step,
        args=args,
        batches=batches,
        loss=loss,
        cache=cache,
    )
    check_pins(pin)
    if host_budget is not None:
        warnings.warn("keepwise.fit: host_budget= has no effect yet: nothing is offloaded", stacklevel=2)
    if disk is not None:
        ARENA.folder = os.fspath(disk)
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be an nn.Module, got {type(model).__name__}")
    if step is not None and (args is not None or kwargs):
        raise UsageError("pass either args or step=, not both")
    all_batches = largest_first(batches) if batches is not None else [as_batch(args, kwargs)]
    batch = all_batches[0]
    if os.environ.get("KEEPWISE") == "0":
        return _inert(model, "KEEPWISE=0 is set: the model runs as it is")
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} has no shape yet: run the model once on a batch, so that its lazy modules know theirs"
        )
    device = check_devices(model, batch if step is None else None)
    if not any(p.requires_grad for p in model.parameters()) and step is None and loss is None:
        raise UsageError(
            "every parameter is frozen: there is nothing to train, so backward saves nothing; unfreeze some"
        )
    made_optimizer = make_optimizer(optimizer, model)

    previous = runner_of(model)
    detach(model)
    steppers = Steppers(model, made_optimizer)
    afterwards = contextlib.ExitStack()
    if step is not None:
        afterwards.enter_context(steppers)
    try:
        run = step if step is not None else whole_step(model, batch, loss, made_optimizer)
        store = PlanCache(cache) if cache is not None else None
        shapes = tuple(dict.fromkeys(key_of(b.args, b.kwargs) for b in all_batches))
        key = (budget, planner, pin, grads, in_flight, on_infeasible, shapes)
        if store is not None:
            found = store.find(model, key)
            if found is not None:
                say("reusing a cached plan")
                return _told(found.apply(model))
        say("recording two steps")

        def tracing(admission: Admission | None = None) -> Traced:
            return trace_steps(
                run,
                model=model,
                inputs=(batch.args, batch.kwargs),
                optimizer=made_optimizer,
                grads="held" if grads == "held" else "fresh",
                device=device,
                admission=admission,
                observe=observe_step(model, made_optimizer),
            )

        try:
            traced = tracing()
            if made_optimizer is None and steppers.only is not None:
                steppers.restore()
                made_optimizer = steppers.only
                say("recording again, with the optimizer that the step uses")
                traced = tracing(traced.admission)
        except Exception as error:
            if isinstance(error, RuntimeError) and "saved tensor hooks" in str(error):
                return _inert(
                    model,
                    "the step uses torch.func transforms, under which torch allows no hooks on saved tensors: nothing is dropped",
                )
            if isinstance(error, torch.OutOfMemoryError | KeepwiseError):
                raise
            steppers.restore()
            if not _works(model, run, batch, made_optimizer):
                raise
            steppers.restore()
            return _inert(
                model, f"the step works, but not where a dispatch mode watches it, so nothing is dropped: {error}"
            )
        recorded = traced.recording.step
        steppers.restore()
        notes = [*notes_of(traced), *steppers.notes]
        if not any(op.phase == Phase.BACKWARD for op in recorded.ops):
            notes.append(
                "the step ran no backward, so nothing reads what was saved and nothing is planned: let step= call backward"
            )
        if step is None:
            recorded = only_inside_forward(recorded, traced.recording.inside)
        recorded = msgspec.structs.replace(apply_pins(recorded, pin), in_flight=in_flight)
        forced = recomputed_by_pins(recorded, pin)
        plain = simulate(recorded)
        expected, generators = traced_observation(traced), generators_of(traced)
        repeats: bool | None = None
        difference = ""
        ranks = Ranks(model)
        plain_fits = ranks.agree(plain.peak_bytes - plain.static_bytes < 0.8 * free_bytes(device))
        if verify and plain_fits:
            say("timing a plain step")
            seconds, again = run_plain(model, run, batch, generators, made_optimizer)
            steppers.restore()
            difference = ranks.first_text(expected.difference(again))
            recorded = msgspec.structs.replace(recorded, seconds=seconds)
            if difference:  # what was recorded may be the odd one: a first step, or one that an operator makes otherwise when watched
                expected = again
                third = run_plain(model, run, batch, generators, made_optimizer)[1]
                difference = ranks.first_text(again.difference(third))
                steppers.restore()
            repeats = not difference
            if difference:
                notes.append(not_repeatable(traced, difference))
        recorded, note = ranks.with_first_prices(recorded)
        notes.extend([note] if note else [])
        auto, auto_text = auto_budget(device, plain.static_bytes)
        if isinstance(budget, str) and budget.strip().lower() == "auto":
            notes.append(auto_text)
        limit = parse_budget(
            budget,
            plain_peak_bytes=plain.peak_bytes,
            floor_bytes=None,
            device_bytes=device_bytes(device),
            auto_bytes=auto,
        )
        limit = ranks.least(limit)
        want_floor = isinstance(budget, str) and budget.strip().lower() == "min"
        attempt = 0
        packs = True
        same, *strays = _by_structure(all_batches)
        while True:
            planned_step, planned = plan_step(
                recorded,
                planner,
                packs=packs,
                budget_bytes=limit,
                on_infeasible=on_infeasible,
                want_floor=want_floor,
                progress=progress,
                forced=forced,
            )
            notes.extend(n for n in planned.notes if n not in notes)
            document = _document(
                model,
                planned_step,
                planned,
                budget,
                None if limit is None or want_floor else limit,
                step is None,
                notes,
                shapes,
                scales=step is None and planner == "auto" and not forced,
            )
            plan = Plan(document)
            if not verify:
                break
            if plan.runner.program.drops_nothing:
                plan = Plan(msgspec.structs.replace(document, proven=()))  # plans for other sizes may drop something
                if repeats is not None:
                    plan.proof = proof_of_one(
                        expected, expected, repeats=repeats, repeat_difference=difference, num_replays=0
                    )
                break
            say("proving the plan on a real step")
            outcome = prove_plan(plan, model, run, batch, generators, made_optimizer, uses_context=step is not None)
            steppers.restore()
            bad, proven = ranks.union(outcome.bad_storages), outcome.audited
            if ranks.agree(outcome.observed is not None) and outcome.observed is not None and not bad:
                found = ranks.first_text(expected.difference(outcome.observed))
                if found and repeats is None:
                    expected = run_plain(model, run, batch, generators, made_optimizer)[1]
                    steppers.restore()
                    difference = expected.difference(run_plain(model, run, batch, generators, made_optimizer)[1])
                    steppers.restore()
                    repeats = not difference
                    found = expected.difference(outcome.observed)
                if found and repeats:  # what changes every few steps only (the growth of a loss scale) shows late
                    difference = expected.difference(run_plain(model, run, batch, generators, made_optimizer)[1])
                    steppers.restore()
                    second = prove_plan(
                        plan, model, run, batch, generators, made_optimizer, uses_context=step is not None
                    )
                    steppers.restore()
                    if not difference and second.observed is not None:
                        difference = outcome.observed.difference(second.observed)
                    repeats = not difference
                    if repeats:
                        return _inert(model, _unexplained(found))
                    notes.append(not_repeatable(traced, difference))
                proof = proof_of_one(
                    expected,
                    outcome.observed,
                    repeats=repeats is not False,
                    repeat_difference=difference,
                    num_replays=outcome.num_audited,
                )
                for other in same[1:MAX_BATCHES]:
                    say(f"proving the plan for {shapes_in_words(key_of(other.args, other.kwargs))}")
                    found, other_outcome, note = _prove_other(
                        plan, model, other, loss, generators, made_optimizer, plain=plain_fits and repeats is not False
                    )
                    bad |= other_outcome.bad_storages
                    proven |= other_outcome.audited
                    if found:
                        return _inert(model, _unexplained(found))
                    if note and note not in notes:
                        notes.append(note)
                if not bad:
                    chooser = plan.runner.chooser
                    plan = Plan(
                        msgspec.structs.replace(
                            document,
                            notes=tuple(notes),
                            proven=tuple(sorted(proven)),
                            batch_scales=chooser.scales if isinstance(chooser, Ladder) else (),
                        ),
                        proof,
                    )
                    break
            if attempt == MAX_PROOFS:
                return _inert(
                    model,
                    f"replays still differ from their originals after {MAX_PROOFS} rounds of keeping the tensors concerned, so nothing "
                    "is dropped. Please report this model",
                )
            attempt += 1
            if planned_step is not recorded:
                packs, bad = False, frozenset(s for s in bad if s < len(recorded.storages))
            if outcome.observed is None:  # what comes before it in backward is not known yet, and hangs on the same
                bad = _and_what_is_made_of(recorded, bad)
            recorded = _keep_also(recorded, bad)
            forced -= bad
            notes.append(
                f"kept because their replay differed from the original on the real step: {len(bad)} of the saved tensors"
            )
    except BaseException:
        if previous is not None and runner_of(model) is None:
            attach(model, previous)
        raise
    finally:
        afterwards.close()
        torch.clear_autocast_cache()  # else the next step under the same `with torch.autocast` would begin with weights that are cast
    if strays:
        try:
            variants = [
                fit(
                    model,
                    batches=others,
                    budget=budget if limit is None or want_floor else limit,
                    loss=loss,
                    optimizer=made_optimizer,
                    grads=grads,
                    planner=planner,
                    pin=pin,
                    on_infeasible=on_infeasible,
                    verify=verify,
                    progress=progress,
                )
                for others in strays
            ]
            variants = [v for v in variants if v.status is not Status.INERT]
        except BaseException:
            if previous is not None:
                detach(model)
                attach(model, previous)
            raise
        plan = _with_variants(plan, variants)
        detach(model)
    plan.apply(model)
    if store is not None:
        store.add(plan, key)
    return _told(plan)


def _told(plan: Plan) -> Plan:
    """The plan, after it was logged, by the first process only."""
    if rank() == 0:
        logger.info("%s", plan)
    return plan


def _check_options(**given: Any) -> None:
    for name, example in (("loss", "a function from the output to a scalar"), ("step", "a function without arguments")):
        if given[name] is not None and not callable(given[name]):
            raise UsageError(f"{name}= must be {example}, got {type(given[name]).__name__}")
    if given["cache"] is not None and os.path.isfile(given["cache"]):
        raise UsageError(f"cache= must be a folder; {os.fspath(given['cache'])} is a file")
    if given["grads"] not in ("held", "fresh"):
        raise UsageError(f"grads must be 'held' or 'fresh', got {given['grads']!r}")
    if given["on_infeasible"] not in ("raise", "floor"):
        raise UsageError(f"on_infeasible must be 'raise' or 'floor', got {given['on_infeasible']!r}")
    check_in_flight(given["in_flight"])
    if given["batches"] is not None and (given["args"] is not None or given["step"] is not None):
        raise UsageError("pass batches= alone, without args or step=")
    if given["batches"] is not None and not given["batches"]:
        raise UsageError("batches= is empty; pass representative batches, the largest first")


def _by_structure(batches: list[Batch]) -> list[list[Batch]]:
    """One batch of each shape, in order, those with the same tensors together."""
    distinct = list({key_of(b.args, b.kwargs): b for b in reversed(batches)}.values())[::-1]
    found: dict[tuple[str, ...], list[Batch]] = {}
    for b in distinct:
        found.setdefault(structure(key_of(b.args, b.kwargs)), []).append(b)
    return list(found.values())


def _prove_other(
    plan: Plan,
    model: nn.Module,
    batch: Batch,
    loss: Loss | None,
    generators: list[torch.Generator],
    optimizer: torch.optim.Optimizer | None,
    *,
    plain: bool,
) -> tuple[str, Outcome, str]:
    """A real step of a batch that the plan was not made for, from which the plan learns the size of its activations.

    Returns:
        What differs from a plain step though every replay is right, what the step showed, a note for the user.
    """
    run = whole_step(model, batch, loss, optimizer)
    expected = run_plain(model, run, batch, generators, optimizer)[1] if plain else None
    outcome = prove_plan(plan, model, run, batch, generators, optimizer, uses_context=False)
    difference = ""
    if expected is not None and outcome.observed is not None and not outcome.bad_storages:
        difference = expected.difference(outcome.observed)
        if difference and expected.difference(run_plain(model, run, batch, generators, optimizer)[1]):
            difference = ""
    note = ""
    if outcome.num_deviations:
        note = (
            f"a batch of {shapes_in_words(key_of(batch.args, batch.kwargs))} takes another path than the recorded one: "
            f"{outcome.num_deviations} tensors ({show_bytes(outcome.deviation_bytes)}) that the plan drops are kept there"
        )
    return difference, outcome, note


def _with_variants(plan: Plan, variants: list[Plan]) -> Plan:
    """The plan with those of other structures beside it."""
    notes = [
        f"batches of {', '.join(v.shapes)} take another path and have a plan of their own: {v.summary()}"
        for v in variants
    ]
    document = msgspec.structs.replace(
        plan.document, variants=tuple(v.document for v in variants), notes=(*plan.notes, *notes)
    )
    return Plan(document, plan.proof)


def _works(model: nn.Module, run: Callable[[], Any], batch: Batch, optimizer: torch.optim.Optimizer | None) -> bool:
    """Whether a plain step ends without an error."""
    try:
        run_plain(model, run, batch, [], optimizer)
    except Exception:
        return False
    return True


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


def _document(
    model: nn.Module,
    step: Step,
    planned: Planned,
    budget: int | float | str,
    budget_bytes: int | None,
    restarts: bool,
    notes: list[str],
    shapes: tuple[Key, ...],
    *,
    scales: bool,
) -> PlanDocument:
    return PlanDocument(
        fingerprint=fingerprint(model),
        step=step,
        schedule=planned.schedule,
        status=planned.status.name,
        budget=str(budget),
        budget_bytes=budget_bytes,
        plain_peak_bytes=planned.plain.peak_bytes,
        peak_bytes=planned.timeline.peak_bytes,
        floor_bytes=planned.floor_bytes,
        added_seconds=planned.timeline.added_seconds,
        bound_seconds=planned.bound_seconds,
        saved_seconds=saved_seconds(planned.timeline),
        restarts=restarts,
        scales=scales,
        batch_key=shapes[0],
        notes=tuple(notes),
        shapes=tuple(map(shapes_in_words, shapes)),
    )


def _inert(model: nn.Module, why: str) -> Plan:
    """A plan that changes nothing."""
    plan = Plan(
        PlanDocument(
            fingerprint=fingerprint(model),
            step=Step(),
            schedule=Schedule(planner="none"),
            status=Status.INERT.name,
            budget="max",
            budget_bytes=None,
            plain_peak_bytes=0,
            peak_bytes=0,
            floor_bytes=0,
            added_seconds=0.0,
            bound_seconds=0.0,
            restarts=True,
            notes=(why,),
        )
    )
    return _told(plan)
