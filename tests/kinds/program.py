"""What a program is: a model, its inputs, how it is stepped and what is watched beside its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

Loss = Callable[[Any], Any]
Step = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Loss], Any]


def mean_square(out: Any) -> torch.Tensor:
    """The loss of most programs."""
    return out.square().mean()


class Case(NamedTuple):
    """A fresh instance of a program."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss


def case(model: nn.Module, *args: Any, loss: Loss = mean_square, **kwargs: Any) -> Case:
    """Write a `Case` as a call of its model."""
    return Case(model, args, kwargs, loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """All that one step left behind, copied."""

    loss: Any
    """What the step returned."""
    raised: BaseException | None
    """The error that the step ended in, if any."""
    grads: dict[str, Any]
    """By name: gradients of parameters, and of arguments that ask for one."""
    tensors: dict[str, Any]
    """By name: buffers and parameters."""
    observed: dict[str, Any]
    """What the program's `observe` returned."""
    generators: dict[str, Any]
    """States of the global generators of torch, Python and NumPy."""
    warned: frozenset[str]
    """First lines of the warnings that the step gave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One thing that people do to a model, small enough to run in milliseconds."""

    name: str
    """Unique in its kind."""
    kind: str
    """The line of the list of kinds that it stands for."""
    build: Callable[[], Case]
    """Makes a fresh instance; the harness has seeded every generator before."""
    why: str
    """One line: what goes wrong in a tool that is not made for it."""
    step: Step | None = None
    """One whole step; without it: forward, loss, backward. It runs inside `with plan:`."""
    observe: Callable[[nn.Module], Mapping[str, Any]] | None = None
    """More state to compare after each step: counters, own generators, lists."""
    between: Callable[[nn.Module, int], None] | None = None
    """Runs before step i (i >= 1): freezing, replacing, scheduling."""
    inputs: Callable[[int, Case], tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """Inputs of step i; without it floating tensors are scaled anew in each step."""
    around: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    """Made anew around `fit` and around forward and loss of each step: autocast, modes, backends."""
    num_steps: int = 3
    """Steps that are compared."""
    from_args: bool = False
    """Plan from the arguments although there is a `step`."""
    alone: bool = False
    """Take the steps not inside `with plan:` although there is a `step`."""
    may_refuse: bool = False
    """A step may end in a KeepwiseError instead; what comes after it is not compared."""
    ops: tuple[str, ...] = ()
    """Parts of names of dispatcher ops that the plain steps must run: proof that the effect takes place."""
    shows: Callable[[Sequence[Record]], bool] | None = None
    """True if the plain steps show the effect."""
    update: bool = True
    """Take a small step along the gradient between steps, so that replays from old weights are found."""
    same_inputs: bool = False
    """Pass the very same argument objects in each step."""
    may_drop_nothing: bool = False
    """The stress plan may find nothing that it can replay."""
    not_repeatable: bool = False
    """Plain differs from plain: the plan has to say so."""
    plain_raises: type[BaseException] | None = None
    """Some step of the plain run ends in this error; the planned one must, too."""
    python_state: bool = False
    """Planning runs forward and so moves Python state of the model; the fitted instance itself is not compared."""
    restored: frozenset[str] = frozenset()
    """Observed names that `fit` must leave as they were (own generators)."""
    at_most: frozenset[str] = frozenset()
    """Observed numbers that may become less, never more."""
    slack: Mapping[str, int] = field(default_factory=dict)
    """How much more than plain `at_most` may be, by name."""
    not_compared: frozenset[str] = frozenset()
    """Observed names that legally differ."""
    clear_error: str | None = None
    """`fit` may refuse with a KeepwiseError that holds this text."""
    not_finite: bool = False
    """NaNs and infinities are what it is about."""
    opaque: bool = False
    """Runs no dispatch mode well: its ops are not listed."""
    slow: bool = False
    """Takes seconds: left to `make test-all`."""
    heavy: bool = False
    """Planning it for a budget takes seconds: with budgets it is left to `make test-all`."""

    @property
    def id(self) -> str:
        """Kind and name, as pytest shows it."""
        return f"{self.kind}-{self.name}"


@dataclass(slots=True)
class Collection:
    """Programs of one kind, filled by decorated functions."""

    kind: str
    programs: list[Program] = field(default_factory=list)
    is_wild: bool = False
    """Planning these for a budget is left to `make test-all`."""

    def add(self, why: str, **options: Any) -> Callable[[Callable[[], Case]], Program]:
        """Turn a function that builds a `Case` into a program named after it."""

        def register(build: Callable[[], Case]) -> Program:
            name = build.__name__.strip("_")
            assert name not in {known.name for known in self.programs}, f"two programs called {name}"
            made = Program(name=name, kind=self.kind, build=build, why=why, **options)
            self.programs.append(made)
            return made

        return register

    def vary(self, base: Program, name: str, **changes: Any) -> Program:
        """Add a copy of `base` with other fields."""
        made = replace(base, name=name, **changes)
        self.programs.append(made)
        return made
