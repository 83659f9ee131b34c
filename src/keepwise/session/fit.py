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

from keepwise._errors import UsageError
from keepwise._rank import logger, rank
from keepwise.ir import Schedule, Step
from keepwise.runtime.apply import attach, detach, runner_of
from keepwise.session.batch import (
    Batch,
    Loss,
    as_batch,
    check_devices,
    check_in_flight,
    largest_first,
    make_optimizer,
)
from keepwise.session.budget import check_budget
from keepwise.session.cache import PlanCache, code_of
from keepwise.session.document import PlanDocument
from keepwise.session.fingerprint import fingerprint
from keepwise.session.fitting import Fitting, NotPlannedError
from keepwise.session.pins import check_pins
from keepwise.session.plan import Plan
from keepwise.session.sizes import key_of, structure
from keepwise.session.status import Status
from keepwise.session.steppers import Steppers
from keepwise.trace.arena import ARENA


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
            It runs several times; the model, optimizers, torch's schedulers and loss scalers, and generators are put back after it,
            other things that it changes (a file, an iterator) are not.
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
        tokens: tokens of the batch: `plan.metrics()` and `str(plan)` then say how many a second are predicted.
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
        model=model,
        args=args,
        kwargs=kwargs,
        loss=loss,
        step=step,
        batches=batches,
        grads=grads,
        in_flight=in_flight,
        disk=disk,
        on_infeasible=on_infeasible,
        cache=cache,
        tokens=tokens,
    )
    check_pins(pin)
    if host_budget is not None:
        warnings.warn("keepwise.fit: host_budget= has no effect yet: nothing is offloaded", stacklevel=2)
    ARENA.use(None if disk is None else os.fspath(disk))
    all_batches = largest_first(batches) if batches is not None else [as_batch(args, kwargs)]
    if os.environ.get("KEEPWISE") == "0":
        return _inert(model, "KEEPWISE=0 is set: the model runs as it is")
    _check_is_made(model)
    device = check_devices(model, all_batches[0] if step is None else None)
    made_optimizer = make_optimizer(optimizer, model)

    store = PlanCache(cache) if cache is not None else None
    shapes = tuple(dict.fromkeys(key_of(b.args, b.kwargs) for b in all_batches))
    how = (type(made_optimizer).__name__, str(device), _autocast(device), code_of(step), code_of(loss), verify)
    key = (budget, planner, pin, grads, in_flight, on_infeasible, shapes, how)
    options: dict[str, Any] = {
        "loss": loss,
        "grads": grads,
        "in_flight": in_flight,
        "planner": planner,
        "pin": pin,
        "on_infeasible": on_infeasible,
        "verify": verify,
        "tokens": tokens,
    }
    same, *strays = _by_structure(all_batches)
    previous = runner_of(model)
    detach(model)
    try:
        found = store.find(model, key) if store is not None else None
        if found is not None:
            say("reusing a cached plan")
            return _told(found.apply(model))
        steppers = Steppers(model, made_optimizer, step)
        with steppers if step is not None else contextlib.nullcontext():
            fitting = Fitting(
                model=model,
                batches=same,
                shapes=shapes,
                step=step,
                optimizer=made_optimizer,
                steppers=steppers,
                device=device,
                budget=budget,
                say=say,
                **options,
            )
            plan = fitting.plan()
        if strays:
            options |= {"optimizer": fitting.optimizer, "disk": disk, "progress": progress}
            limit = budget if fitting.limit is None or fitting.wants_floor else fitting.limit
            variants = [fit(model, batches=others, budget=limit, **options) for others in strays]
            plan = _with_variants(plan, [v for v in variants if v.status is not Status.INERT])
            detach(model)
    except NotPlannedError as why:
        return _inert(model, str(why))
    except BaseException:
        detach(model)
        if previous is not None:
            attach(model, previous)
        raise
    finally:
        torch.clear_autocast_cache()  # else the next step under the same `with torch.autocast` would begin with weights that are cast
    plan.apply(model)
    if store is not None:
        store.add(plan, key)
    return _told(plan)


def _autocast(device: torch.device) -> str:
    """The type to which ops on a device are cast here; empty if they are not."""
    return str(torch.get_autocast_dtype(device.type)) if torch.is_autocast_enabled(device.type) else ""


def _told(plan: Plan) -> Plan:
    """The plan, after it was logged, by the first process only."""
    if rank() == 0:
        logger.info("%s", plan)
    return plan


def _check_options(**given: Any) -> None:
    """Raises UsageError for the first argument of `fit` that is none."""
    if not isinstance(given["model"], nn.Module):
        raise UsageError(f"model must be an nn.Module, got {type(given['model']).__name__}")
    if given["kwargs"] is not None and not isinstance(given["kwargs"], Mapping):
        raise UsageError(f"kwargs must map names to arguments, got {type(given['kwargs']).__name__}")
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
    tokens, disk = given["tokens"], given["disk"]
    if tokens is not None and not (isinstance(tokens, int) and tokens > 0):
        raise UsageError(f"tokens must be a whole number above 0, got {tokens!r}")
    if disk is not None and not os.path.isdir(disk):
        raise UsageError(f"disk= must be a folder that exists; {os.fspath(disk)} is none")
    has_args = given["args"] is not None or bool(given["kwargs"])
    if given["batches"] is not None and (has_args or given["step"] is not None):
        raise UsageError("pass batches= alone, without args, kwargs or step=")
    if given["step"] is not None and has_args:
        raise UsageError("pass either args or step=, not both")


def _check_is_made(model: nn.Module) -> None:
    lazy = [name for name, p in model.named_parameters() if nn.parameter.is_lazy(p)]
    if lazy:
        raise UsageError(
            f"{lazy[0]} has no shape yet: run the model once on a batch, so that its lazy modules know theirs"
        )


def _by_structure(batches: list[Batch]) -> list[list[Batch]]:
    """One batch of each shape, in order, those with the same tensors together."""
    distinct = list({key_of(b.args, b.kwargs): b for b in reversed(batches)}.values())[::-1]
    found: dict[tuple[str, ...], list[Batch]] = {}
    for b in distinct:
        found.setdefault(structure(key_of(b.args, b.kwargs)), []).append(b)
    return list(found.values())


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
