"""Optimizers that a user's `step=` reaches without `fit` or `verify` having been told.

What they change must be put back too, and which they are is known only once the step runs: torch calls a hook before every
`Optimizer.step`, early enough to keep what is there. Schedulers and loss scalers are found from the step (`reach`). What
else a step changes (a file, an iterator) is not put back.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepwise.trace.quiet import quiet
from keepwise.trace.reach import reached
from keepwise.trace.saved_state import OptimizerState
from keepwise.trace.state import Bytes


class Steppers:
    """`with Steppers(model, known) as steppers:` watches the optimizers that step in this thread, and puts them back at the end."""

    def __init__(self, model: nn.Module, known: torch.optim.Optimizer | None, run: Any = None) -> None:
        """`known`: an optimizer that is put back by others; `run`: the step, from which is found what it trains beside the model."""
        modules, leaves, training = reached(run, model)
        self._parameters = {id(p) for p in model.parameters()}
        self._beside = {id(p) for p in leaves} | {id(p) for m in modules for p in m.parameters()}
        self._thread = threading.get_ident()
        self._known = known
        rated = {id(o): o for t in training if (o := getattr(t, "optimizer", None)) is not None and o is not known}
        with quiet():
            self._early = {key: (o, OptimizerState(o)) for key, o in rated.items()}
        """Optimizers of schedulers: those may set rates before the optimizer steps, or where it does not."""
        self._seen: dict[int, tuple[torch.optim.Optimizer, OptimizerState, Bytes]] = {}
        self._foreign = 0
        self._lost: dict[str, int] = {}

    @property
    def only(self) -> torch.optim.Optimizer | None:
        """The one optimizer that stepped, if it is one and trains the model alone."""
        found = [optimizer for optimizer, _, _ in self._seen.values()]
        return found[0] if len(found) == 1 and not self._foreign else None

    @property
    def notes(self) -> tuple[str, ...]:
        """What was not put back, one sentence each."""
        return tuple(
            f"the step also trains {count} tensors that were found neither in the model nor from the step ({name}): their values were put "
            "back, their gradients and their modules' buffers were not. Pass a module that holds all that is trained"
            for name, count in self._lost.items()
        )

    def restore(self) -> None:
        """Put all of it back to what it was before the first step here."""
        with quiet():
            for _, state, foreign in self._seen.values():
                state.restore()
                foreign.restore()
            for key in self._early.keys() - self._seen.keys():
                self._early[key][1].restore()

    def __enter__(self) -> Self:
        self._handle = register_optimizer_step_pre_hook(self._look)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.remove()
        self.restore()

    def _look(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        if optimizer is self._known or id(optimizer) in self._seen or threading.get_ident() != self._thread:
            return
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        foreign = [p for p in trained if id(p) not in self._parameters]
        self._foreign += len(foreign)
        lost = [p for p in foreign if id(p) not in self._beside]
        if lost:
            self._lost[type(optimizer).__name__] = len(lost)
        with quiet():
            early = self._early.get(id(optimizer))
            state = early[1] if early is not None else OptimizerState(optimizer)
            self._seen[id(optimizer)] = (optimizer, state, Bytes(foreign))
