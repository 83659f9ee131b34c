"""Runs a program plain and planned and lists what differs.

    python -m tests.kinds.harness [--plain] [--stock] [--how everything|min|0.6x] [--only TEXT] [--list]

A check goes through these stages; each starts from instances that are built from the same seed:

1. *plain*: the reference, `num_steps` steps. Weights move and inputs change from step to step, so that a recipe that still
   holds a number, weight or input of the step it was recorded from is found out.
2. *fit*: parameters, gradients, buffers, flags, generators and the arguments' bytes have to be as before.
3. *fitted*: the instance that was planned on takes the same steps (unless planning moved its Python state).
4. *applied*: the plan on another instance: loss, gradients (of arguments too), buffers, parameters, everything the program
   watches, generator states and warnings have to equal the plain ones after each step, strides and NaNs included.

`--plain` puts a plan that does nothing through all of this: what differs then is the program's fault. `--stock` does the
same with `torch.utils.checkpoint` around the whole model, to see which programs it gets wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from keepwise import KeepwiseError

from .compare import difference, frozen, generator_states, mapping_differences
from .program import Case, Program, Record

HOWS = ("everything", "min", "0.6x")
AUDITED = " audited"
"""Ends the name of a way in which every step's replays are compared with their originals."""
RATE = 0.02


class PlanLike(Protocol):
    """What the harness uses of a plan."""

    @property
    def dropped_bytes(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def offloaded_bytes(self) -> int: ...
    def apply(self, model: nn.Module) -> Any: ...
    def remove(self) -> Any: ...
    def audit(self) -> Any: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


Fit = Callable[..., PlanLike]


def options(how: str) -> dict[str, Any]:
    """Arguments of `fit` for each way of checking; `planner NAME` is one of the named planners."""
    how = how.removesuffix(AUDITED)
    if how == "everything":
        return {"planner": "recompute_everything", "budget": "max"}
    if how.startswith("planner "):
        return {"planner": how.removeprefix("planner "), "budget": "max"}
    return {"budget": how, "on_infeasible": "floor"}


def seed_all(seed: int = 4321) -> None:
    """Seed the three global generators."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def fresh(program: Program) -> Case:
    """Build an instance from a fixed seed."""
    seed_all()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a library says while it builds a model
        return program.build()


def _scaled(value: Any, factor: float) -> Any:
    if type(value) is torch.Tensor and value.dtype.is_floating_point and value.layout is torch.strided:
        return (value.detach() * factor).requires_grad_(value.requires_grad)
    return value


def inputs(program: Program, built: Case, i: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of step i."""
    if program.inputs is not None:
        return program.inputs(i, built)
    if i == 0 or program.same_inputs:
        return built.args, built.kwargs
    return tree_map(functools.partial(_scaled, factor=1 + i / 8), (built.args, built.kwargs))


def plain_step(program: Program, case: Case) -> Any:
    """Forward, loss and backward, or the program's own step."""
    model, args, kwargs, loss_fn = case
    if program.step is not None:
        return program.step(model, args, kwargs, loss_fn)
    with program.around():
        loss = loss_fn(model(*args, **kwargs))
    loss.backward()
    return loss


def _named_args(args: Any, kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for k, leaf in enumerate(tree_flatten((args, kwargs))[0]):
        if isinstance(leaf, torch.Tensor):
            yield f"argument {k}", leaf


def gradients(case: Case, of_arguments: bool = True) -> dict[str, Any]:
    """Gradients of parameters and arguments, copied."""
    leaves: list[tuple[str, torch.Tensor]] = list(case.model.named_parameters())
    if of_arguments:
        leaves.extend(_named_args(case.args, case.kwargs))
    return {name: frozen(leaf.grad) for name, leaf in leaves if leaf.is_leaf}


def tensors(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers, copied."""
    return {name: frozen(t) for name, t in [*model.named_parameters(), *model.named_buffers()]}


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            grad = p.grad
            if grad is not None and grad.layout is torch.strided and p.dtype.is_floating_point and not grad.is_nested:
                p.add_(grad, alpha=-RATE)


def steps(program: Program, built: Case, plan: PlanLike | None = None, meter: Any = None) -> list[Record]:
    """Take the program's steps and record each."""
    out: list[Record] = []
    model = built.model
    for _, leaf in _named_args(built.args, built.kwargs):
        if leaf.is_leaf:
            leaf.grad = None  # a step that was planned on may have left one; `fit` does not know what `step` holds
    seed_all(99)
    for i in range(program.num_steps):
        if i:
            failed = out[-1].raised is not None  # what is in .grad then depends on how far backward came
            if program.update and not failed:
                _descend(model)
            model.zero_grad(set_to_none=failed or i % 2 == 1)
            if program.between is not None:
                program.between(model, i)
        now = Case(model, *inputs(program, built, i), built.loss)
        raised, loss = None, None
        own = contextlib.nullcontext() if plan is None or program.step is None or program.alone else plan
        with warnings.catch_warnings(record=True) as warned, own, meter or contextlib.nullcontext():
            warnings.simplefilter("always")
            try:
                loss = plain_step(program, now)
            except BaseException as error:
                refused = program.may_refuse and isinstance(error, KeepwiseError)
                if not refused and (program.plain_raises is None or not isinstance(error, program.plain_raises)):
                    raise
                raised = error.with_traceback(None)
        out.append(
            Record(
                loss=frozen(loss),
                raised=raised,
                grads=gradients(now),
                tensors=tensors(model),
                observed={} if program.observe is None else {k: frozen(v) for k, v in program.observe(model).items()},
                generators=generator_states(),
                warned=frozenset(str(w.message).splitlines()[0] for w in warned),
            )
        )
        del loss, now
    return out


def differences(program: Program, plain: Sequence[Record], got: Sequence[Record], whole: bool = True) -> list[str]:
    """What differs between two runs; `whole` compares observed values, generators and warnings too."""
    found = []
    for i, (a, b) in enumerate(zip(plain, got, strict=True)):
        here = []
        if program.may_refuse and isinstance(b.raised, KeepwiseError):
            break
        if a.raised is not None or b.raised is not None:
            if a.raised is None or b.raised is None or not isinstance(b.raised, type(a.raised)):
                here.append(f"plain raised {a.raised!r:.120}, now {b.raised!r:.120}")
            found += [f"step {i}: {text}" for text in here]
            continue  # what a failed backward leaves in .grad depends on how far it came
        if text := difference(a.loss, b.loss):
            here.append(f"loss: {text}")
        here += [f"gradient of {text}" for text in mapping_differences(a.grads, b.grads)]
        here += [f"tensor {text}" for text in mapping_differences(a.tensors, b.tensors)]
        if whole:
            skip = program.not_compared | program.at_most
            seen = {k: v for k, v in a.observed.items() if k not in skip}
            here += [f"observed {text}" for text in mapping_differences(seen, {k: b.observed.get(k) for k in seen})]
            here += [
                f"observed {k}: {b.observed[k]} is more than {a.observed[k]}"
                for k in program.at_most
                if not np.all(np.asarray(b.observed[k]) <= np.asarray(a.observed[k]) + program.slack.get(k, 0))
            ]
            here += [f"generator {text}" for text in mapping_differences(a.generators, b.generators)]
            fresh_warnings = [text for text in b.warned - a.warned if "keepwise" not in text.lower()]
            here += [f"warns: {text}" for text in fresh_warnings]
        found += [f"step {i}: {text}" for text in here]
    return found


def untouched(program: Program, built: Case) -> dict[str, Any]:
    """What `fit` must leave as it was."""
    model = built.model
    seen = {} if program.observe is None or not program.restored else dict(program.observe(model))
    return {
        "gradients": gradients(built, of_arguments=program.step is None),
        "tensors": tensors(model),
        "arguments": {name: frozen(t) for name, t in _named_args(built.args, built.kwargs)},
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()},
        "training": {name: m.training for name, m in model.named_modules()},
        "generators": generator_states(),
        "modes": {
            "grad": torch.is_grad_enabled(),
            "inference": torch.is_inference_mode_enabled(),
            "autocast": torch.is_autocast_enabled("cpu"),
            "dtype": torch.get_default_dtype(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            "threads": torch.get_num_threads(),
        },
        "restored": {k: frozen(seen[k]) for k in program.restored},
    }


def fit_program(program: Program, built: Case, fit: Fit, how: str) -> PlanLike:
    """Call `fit` as a user would."""
    model, args, kwargs, loss_fn = built
    with program.around():
        if program.step is not None and not program.from_args:
            return fit(model, step=functools.partial(program.step, *built), **options(how))
        return fit(model, args, kwargs, loss=loss_fn, **options(how))


def _raises_outside(program: Program, kind: type[Exception]) -> bool:
    """Whether plain forward and backward end in such an error without what the program's own step has around them."""
    model, args, kwargs, loss_fn = fresh(program)
    try:
        loss_fn(model(*args, **kwargs)).backward()
    except kind:
        return True
    return False


def check(program: Program, how: str = "everything", fit: Fit | None = None) -> list[str]:
    """Differences between plain and planned, in words; an empty list is a pass.

    `fit` stands in for `keepwise.fit`.
    """
    import keepwise

    used: Fit = keepwise.fit if fit is None else fit
    plain = steps(program, fresh(program))
    raises = next((record.raised for record in plain if record.raised is not None), None)
    built = fresh(program)
    before = untouched(program, built)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = fit_program(program, built, used, how)
    except Exception as error:
        if plain[0].raised is not None and isinstance(error, type(plain[0].raised)):
            return []
        if program.from_args and program.step is not None and _raises_outside(program, type(error)):
            return []
        clear = program.clear_error
        if clear is not None and isinstance(error, keepwise.KeepwiseError) and clear in str(error):
            return []
        raise
    found = [f"after fit: {text}" for text in mapping_differences(before, untouched(program, built))]
    if program.not_repeatable:
        said = "repeat" in str(plan).lower()
        return found if said else [*found, "the plan does not say that the plain step is not repeatable"]
    if not program.python_state and not program.same_inputs and raises is None:
        again = steps(program, built, plan)
        found += [f"fitted, {text}" for text in differences(program, plain, again, whole=False)]
    plan.remove()
    built = fresh(program)
    plan.apply(built.model)
    if how.endswith(AUDITED):
        plan.audit()
    try:
        got = steps(program, built, plan)
    finally:
        plan.remove()
    found += [f"applied, {text}" for text in differences(program, plain, got)]
    moved = plan.dropped_bytes + plan.packed_bytes + plan.offloaded_bytes
    if how == "everything" and not moved and not program.may_drop_nothing:
        found.append("the stress plan drops nothing")
    return found


class OpNames(TorchDispatchMode):
    """Counts the dispatcher ops of a plain step by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


def evidence(program: Program) -> list[str]:
    """What a plain run fails to show of the effect that the program is about."""
    found: list[str] = []
    if not program.opaque:
        meter = OpNames()
        steps(program, fresh(program), meter=meter)
        found += [f"never runs {op}" for op in program.ops if not any(op in name for name in meter.seen)]
    records = steps(program, fresh(program))
    values = [("loss", r.loss) for r in records] + [item for r in records for item in r.grads.items()]
    wild = sorted({name for name, value in values if not _finite(value)})
    if wild and not program.not_finite:
        found.append(f"not finite: {', '.join(wild[:3])}")
    if program.shows is not None and not program.shows(records):
        found.append(f"does not show its effect: {[record.observed for record in records]}"[:300])
    if program.plain_raises is not None and all(record.raised is None for record in records):
        found.append(f"plain does not raise {program.plain_raises.__name__}")
    if program.plain_raises is None and not any(g is not None for r in records for g in r.grads.values()):
        found.append("no gradient at all")
    return found


def _finite(value: Any) -> bool:
    usual = isinstance(value, torch.Tensor) and value.layout is torch.strided and not value.is_nested
    return not usual or bool(torch.isfinite(value).all())


class InertPlan:
    """A plan that changes nothing."""

    dropped_bytes = 1
    packed_bytes = offloaded_bytes = 0

    def apply(self, model: nn.Module) -> None: ...
    def remove(self) -> None: ...
    def audit(self) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc: Any) -> None: ...

    def __str__(self) -> str:
        return "plain, said not to be repeatable"


def inert_fit(*args: Any, **kwargs: Any) -> PlanLike:
    """A `fit` that plans nothing, to check the programs themselves."""
    return InertPlan()


class StockPlan(InertPlan):
    """`torch.utils.checkpoint` around the whole model: what the harness has to find fault with."""

    def __init__(self) -> None:
        self.wrapped: list[nn.Module] = []

    def apply(self, model: nn.Module) -> None:
        from torch.utils.checkpoint import checkpoint

        inner = model.forward
        model.forward = lambda *a, **k: checkpoint(inner, *a, use_reentrant=False, **k)
        self.wrapped.append(model)

    def remove(self) -> None:
        for model in self.wrapped:
            del model.forward
        self.wrapped.clear()


def stock_fit(model: nn.Module, *args: Any, **kwargs: Any) -> PlanLike:
    """A `fit` that checkpoints the whole model, as users do by hand."""
    plan = StockPlan()
    plan.apply(model)
    return plan


def programs() -> list[Program]:
    """Every program of every kind."""
    from . import kinds

    return [program for collection in kinds() for program in collection.programs]


def main(argv: Sequence[str] | None = None) -> int:
    """Run programs from a terminal; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", action="store_true", help="check the programs themselves")
    parser.add_argument("--stock", action="store_true", help="torch.utils.checkpoint around each model")
    parser.add_argument("--how", default="everything", help=" or ".join(HOWS))
    parser.add_argument("--only", default="", help="part of a program's kind and name")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--trace", action="store_true", help="print tracebacks")
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    out, failed, passed = sys.stdout, 0, 0
    for program in programs():
        if asked.only not in program.id:
            continue
        if asked.list:
            out.write(f"{program.id:50s} {program.why}\n")
            continue
        fit = inert_fit if asked.plain else stock_fit if asked.stock else None
        start = time.process_time()
        try:
            found = (evidence(program) if asked.plain else []) + check(program, asked.how, fit)
        except Exception as error:
            text = str(error).splitlines()
            found = [f"raises {type(error).__name__}: {text[0][:200] if text else ''}"]
            if asked.trace:
                traceback.print_exc()
        failed, passed = failed + bool(found), passed + (not found)
        mark = "FAIL" if found else "ok  "
        more = f" (+{len(found) - 4})" if len(found) > 4 else ""
        out.write(f"{mark} {time.process_time() - start:5.2f} s {program.id}: {'; '.join(found[:4])}{more}\n")
        out.flush()
    if not asked.list:
        out.write(f"{passed} passed, {failed} failed\n")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
