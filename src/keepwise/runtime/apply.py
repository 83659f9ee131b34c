"""Putting a program onto a model, and taking it off.

Notes:
1. In the model's class `forward` is replaced, as long as a plan is on one of its instances, by one that runs the user's, for the
   planned instances under a guard. The class stays what it is, as user code counts on it, keeps tables by it and compares it. A copy
   (EMA, checkpoint, pickle) is a plain model that computes with its own weights. A `forward` that is an attribute of the model
   hides its class's, so that one is replaced instead.
2. What decides is whether gradients are recorded, never `model.training`. Under `no_grad`, `inference_mode`, a functorch
   transform or a compiler's trace, forward runs as if nothing had been applied.
3. Which runner belongs to which model stands in a weak table, not on the model: state_dict, pickles and `__dict__` stay the user's.
4. A dispatch mode of the user's around the model may change what ops return, and a replay runs without it. Every step under one is
   audited: the next step may drop what this one did not, and a mode, which costs more than a digest, may change something else then.
5. Sharding a planned model (FSDP, tensor parallel) exchanges its parameters for sharded ones, whose storage is gone when a replay
   needs it. That is refused before the step.
6. A plan for batches of another size may drop what the plan that `fit` proved keeps, and the step that proved it may have taken
   another branch. The first steps that drop something whose replay was never compared with its original are audited.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import types
import weakref
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from keepwise._errors import KeepwiseError, PlanMismatch
from keepwise._units import show_bytes
from keepwise._warn import warn
from keepwise.runtime import optimizers
from keepwise.runtime.allocated import highest_allocated
from keepwise.runtime.guard import Guard
from keepwise.runtime.program import Program
from keepwise.runtime.stats import StepStats
from keepwise.runtime.watch import can_watch, foreign_modes

KEPT_SHARE = 0.05
"""Share of the planned bytes kept against the plan above which a warning says so."""

# By identity: a model may have an `__eq__` of its own.
_RUNNERS: MutableMapping[nn.Module, Runner] = WeakIdKeyDictionary()
_CLASSES: MutableMapping[type, _Installed] = WeakIdKeyDictionary()
"""Classes of planned models (note 1)."""
_MODULES: MutableMapping[nn.Module, list[weakref.ref[nn.Module]]] = WeakIdKeyDictionary()


class Chooser(Protocol):
    """Picks the program for a batch, and learns from the step that it ran."""

    def choose(self, args: Any, kwargs: Any) -> tuple[Program, Any, bool]:
        """The program, a key of the batch's shapes, and whether even this program is over the budget."""
        ...

    def knows(self, key: Any) -> bool:
        """Whether a forward of that key was seen."""
        ...

    def learn(self, key: Any, saved_bytes: int, extra_bytes: int) -> bool:
        """Told what a forward of that key saved and what it held besides because it differs; whether that is over the budget."""
        ...


class Runner:
    """A program at work: makes guards, keeps the statistics of the last step."""

    def __init__(self, program: Program, *, restarts: bool, budget_bytes: int | None = None) -> None:
        self.program = program
        self.device = torch.device("cpu")
        """Device of the model that ran last."""
        self.restarts = restarts
        """Whether the recording begins with the model's forward (else with the user's whole step)."""
        self.budget_bytes = budget_bytes
        self.stats = StepStats()
        self.checked = program
        """The program of the last step."""
        self.num_paused = 0
        self.audit_every = 0
        self.num_steps = 0
        self.chooser: Chooser | None = None
        """Chooses another program for batches of another size; None: one program for all."""
        self.collecting = False
        self.seen: list[StepStats] = []
        """Statistics of the audited steps while `collecting`."""
        self.has_warned = False
        self.local = threading.local()

    def is_active(self) -> bool:
        """Whether a forward that starts now should run under a guard."""
        return self.num_paused == 0 and (not self.program.drops_nothing or self.chooser is not None) and can_watch()

    def begin(self, program: Program, model: nn.Module | None) -> StepStats:
        """New statistics, for a forward pass or a `with plan:` that starts now."""
        self._trust()
        self.num_steps += 1
        self.stats = self._new_stats(model)
        self.stats.modes = foreign_modes()
        self.checked = program
        self.stats.auditing = (
            bool(self.stats.modes)
            or (bool(self.audit_every) and (self.num_steps - 1) % self.audit_every == 0)
            or program.needs_proof()
        )
        self.stats.collecting = self.collecting
        if self.collecting:
            self.seen.append(self.stats)
        return self.stats

    def _new_stats(self, model: nn.Module | None) -> StepStats:
        modules = _with_parameters(model) if model is not None else ()
        with torch._C.DisableTorchFunction():
            self.device = next(
                (p.device for m in modules for p in m._parameters.values() if p is not None), self.device
            )
        return StepStats(counted_before=highest_allocated(self.device))

    def last_stats(self) -> StepStats:
        """Statistics of the last step, with what the device has counted by now."""
        self.stats.note_peak(highest_allocated(self.device), self.budget_bytes)
        return self.stats

    def _trust(self) -> None:
        """Note 6: the last step went well."""
        if self.stats.audited:
            self.checked.proven |= self.stats.audited

    def reset(self) -> None:
        """Forget all statistics."""
        self._trust()
        self.stats = StepStats()
        self.seen = []

    @contextlib.contextmanager
    def guard(self, model: nn.Module | None, program: Program | None = None) -> Iterator[Guard]:
        """Run a piece of a step under a guard."""
        program = program or self.program
        guard = Guard(program, self.begin(program, model), namer_of(model))
        outer = getattr(self.local, "guard", None)
        self.local.guard = guard
        try:
            with guard:
                yield guard
        finally:
            guard.close()
            self.local.guard = outer
        self._warn_of(guard.stats)

    def _warn_of(self, stats: StepStats) -> None:
        """Say once that the plan holds more than it should."""
        if self.has_warned or self.collecting or stats.kept_share <= KEPT_SHARE:
            return
        self.has_warned = True
        where = f" First difference: {stats.first_difference}." if stats.first_difference else ""
        warn(
            f"keepwise: this step differs from the recorded one, so {show_bytes(stats.deviation_bytes)} are held that the plan "
            f"does not hold (it dropped {show_bytes(stats.dropped_bytes)}). Gradients are right, the budget may not hold.{where} "
            "Run keepwise.fit on a batch like this one if it is the usual one"
        )

    def forward(self, model: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        """Run the user's forward.

        Raises:
            PlanMismatch: parameters were sharded since (note 5).
        """
        if not self.is_active():
            return call(*args, **kwargs)
        if model is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
            refuse_sharded(model)
        guard = getattr(self.local, "guard", None)
        if guard is not None and guard.is_entered:  # inside `with plan:`
            if self.restarts:
                guard.restart()
            with guard.on_top():
                return call(*args, **kwargs)
        chooser = self.chooser
        if chooser is None:
            with self.guard(model) as watching:
                result = call(*args, **kwargs)
                watching.returned(result, (args, kwargs))
            return result
        with torch._C.DisableTorchFunction():  # it looks at shapes, which no mode of the user's sees
            program, key, over = chooser.choose(args, kwargs)
        if program.drops_nothing and chooser.knows(key):
            self.stats = self._new_stats(model)
            return call(*args, **kwargs)
        with self.guard(model, program) as watching:
            result = call(*args, **kwargs)
            watching.returned(result, (args, kwargs))
        stats = watching.stats
        stats.over_budget |= chooser.learn(key, stats.saved_bytes, stats.deviation_bytes) or over
        return result


def refuse_sharded(model: nn.Module) -> None:
    """Note 5.

    Raises:
        PlanMismatch: a parameter is sharded.
    """
    modules = _with_parameters(model)
    if any("_is_fsdp_managed_module" in module.__dict__ for module in (model, *modules)):
        raise PlanMismatch(
            f"this {type(model).__name__} was sharded after the plan was applied (FSDP), which is not supported "
            "yet; call plan.remove() before sharding, or use DDP"
        )
    for module in modules:
        for name, p in module._parameters.items():
            if p is not None and type(p) is not nn.Parameter and type(p).__name__ == "DTensor":
                raise PlanMismatch(
                    f"parameter {name} of a {type(module).__name__} was sharded after the plan was applied (FSDP2 or tensor parallel), "
                    "which is not supported yet; call plan.remove() before sharding"
                )


def _with_parameters(model: nn.Module) -> list[nn.Module]:
    """Modules that have parameters of their own; looked up once."""
    found = _MODULES.get(model)
    if found is None:
        found = _MODULES[model] = [weakref.ref(m) for m in model.modules() if m._parameters]
    return [m for ref in found if (m := ref()) is not None]


def namer_of(model: nn.Module | None) -> Any:
    """A function that finds the name of a parameter or buffer, for error messages."""
    if model is None:
        return None
    weak = weakref.ref(model)

    def name(t: torch.Tensor) -> str:
        owner = weak()
        if owner is not None:
            for n, p in (*owner.named_parameters(), *owner.named_buffers()):
                if p is t or (p.layout is torch.strided and p.untyped_storage()._cdata == t.untyped_storage()._cdata):
                    return n
        return ""

    return name


class OwnForward:
    """The planned form of a model's `forward`.

    It does not keep the model alive, and it reduces to the user's own when copied or pickled.
    """

    def __init__(self, model: nn.Module, inner: Any) -> None:
        functools.update_wrapper(self, inner)
        self.inner = inner
        self.model = weakref.ref(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the user's, under the plan that is applied to the model."""
        model = None if torch.compiler.is_compiling() else self.model()
        runner = _RUNNERS.get(model) if model is not None else None
        if model is None or runner is None:
            return self.inner(*args, **kwargs)
        return runner.forward(model, self.inner, args, kwargs)

    def __getattr__(self, name: str) -> Any:  # what compilers ask of a method: its globals, its code
        return getattr(self.__dict__["inner"], name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itself, (self.inner,)


class ClassForward:
    """Stands in a class for what is no function there, but gives a `forward` when an instance is asked: a static method, a property."""

    def __init__(self, kind: type, own: Any) -> None:
        self.kind = kind
        self.own = own

    def __get__(self, model: Any, kind: type) -> Any:
        if model is None or torch.compiler.is_compiling() or model not in _RUNNERS or _is_above(self.kind, kind):
            return self._found(model, kind)
        try:
            inner = self._found(model, kind)
        except AttributeError:  # as Python goes on where a descriptor has nothing to give (scripted modules)
            inner = kind.__getattr__(model, "forward")  # type: ignore[attr-defined]
        return OwnForward(model, inner)

    def _found(self, model: Any, kind: type) -> Any:
        """What the user's class gives."""
        get = getattr(type(self.own), "__get__", None)
        return self.own if get is None else get(self.own, model, kind)


class ClassForwardData(ClassForward):
    """The same for what goes before the attributes of an instance: a property."""

    def __set__(self, model: Any, value: Any) -> None:
        type(self.own).__set__(self.own, model, value)

    def __delete__(self, model: Any) -> None:
        type(self.own).__delete__(self.own, model)


def _watched(kind: type, own: types.FunctionType, is_inherited: bool) -> Any:
    """A method that runs the class's own, for planned instances under their plan.

    A function, as compilers look into nothing else, and in the user's own globals, which they read names from.
    """
    is_compiling, runners, is_above, partial = torch.compiler.is_compiling, _RUNNERS, _is_above, functools.partial

    def above(self: Any, *args: Any, **kwargs: Any) -> Any:
        return super(kind, self).forward(*args, **kwargs)  # type: ignore[attr-defined]

    call = above if is_inherited else own

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        runner = None if is_compiling() else runners.get(self)  # a compiler would trace the lookup
        if runner is None or is_above(kind, type(self)):
            return call(self, *args, **kwargs)
        return runner.forward(self, partial(call, self), args, kwargs)

    made = types.FunctionType(forward.__code__, own.__globals__, own.__name__, None, forward.__closure__)
    return functools.update_wrapper(made, own)


@dataclass(slots=True)
class _Installed:
    """A class whose `forward` was exchanged."""

    own: Any
    """What stood there; None: the class inherited it."""
    ours: Any
    models: MutableMapping[nn.Module, None]
    """Its planned instances."""


def _is_above(kind: type, of: type) -> bool:
    """Whether a planned class below `kind` has called it by `super()`."""
    return next((c for c in of.__mro__ if c in _CLASSES), None) is not kind


def _install(model: nn.Module) -> None:
    """Note 1."""
    kind = type(model)
    found = _CLASSES.get(kind)
    if found is None or kind.__dict__.get("forward") is not found.ours:
        own = inspect.getattr_static(kind, "forward")
        is_inherited = "forward" not in kind.__dict__
        if type(own) is types.FunctionType:
            ours: Any = _watched(kind, own, is_inherited)
        else:
            ours = (ClassForwardData if hasattr(type(own), "__set__") else ClassForward)(kind, own)
        found = _CLASSES[kind] = _Installed(None if is_inherited else own, ours, WeakIdKeyDictionary())
        type.__setattr__(kind, "forward", ours)  # a metaclass may have other ideas
    found.models[model] = None


def _uninstall(model: nn.Module) -> None:
    for kind, found in list(_CLASSES.items()):
        if found.models.pop(model, model) is model or found.models:
            continue
        del _CLASSES[kind]
        if kind.__dict__.get("forward") is not found.ours:  # somebody else exchanged it since
            continue
        if found.own is None:
            type.__delattr__(kind, "forward")
        else:
            type.__setattr__(kind, "forward", found.own)


def itself(x: Any) -> Any:
    """What an object that reduces to `x` is made again by."""
    return x


def runner_of(model: nn.Module) -> Runner | None:
    """The runner that is applied to a model."""
    return _RUNNERS.get(model)


def attach(model: nn.Module, runner: Runner) -> None:
    """Let `model.forward` run under `runner` from now on.

    Raises:
        KeepwiseError: another plan is applied to it.
    """
    if model in _RUNNERS:
        raise KeepwiseError(
            f"a plan is applied to this {type(model).__name__} already; call remove() on it before applying another"
        )
    optimizers.install()
    inner = model.__dict__.get("forward")
    if inner is not None:
        model.__dict__["forward"] = OwnForward(model, inner)
    else:
        _install(model)
    _RUNNERS[model] = runner
    _MODULES.pop(model, None)


def detach(model: nn.Module) -> None:
    """Take the runner off; does nothing where none is applied."""
    if _RUNNERS.pop(model, None) is None:
        return
    forward = model.__dict__.get("forward")
    if isinstance(forward, OwnForward):
        model.__dict__["forward"] = forward.inner
    _uninstall(model)


def models_of(runner: Runner) -> list[nn.Module]:
    """Models that a runner is applied to."""
    return [m for m, r in list(_RUNNERS.items()) if r is runner]
