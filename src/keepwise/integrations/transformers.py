"""Hugging Face `Trainer`: a callback that plans on the first batch of training.

Notes:
1. The plan is made inside the first training forward, not before it: the batch is the Trainer's own (collated, on the device, with
   what `compute_loss` adds to it), autocast is whatever the Trainer made it, and no batch is drawn from the loader for it.
2. For that, `model.forward` is replaced until then by a function of the same signature. A forward pre-hook would not do:
   `nn.Module.__call__` looks up `forward` before it runs the hooks, so the first step would run without the plan.
3. The Trainer's mixed precision is an instance attribute `forward` over the class's own. It is put back before planning and stays below
   the plan: a replay runs the recorded ops, casts included.
4. Models of `transformers` build no attention mask for a batch without padding, and call another form of attention. A step that differs
   from the recorded one loses memory, so after such a step the next batch is planned anew, a few times at most. A plan that was
   made on a padded batch holds for batches without padding too.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import keepwise
from keepwise._errors import UsageError
from keepwise._rank import logger, silence
from keepwise.runtime.apply import itself

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "KeepwiseCallback needs the package transformers: pip install 'keepwise[transformers]'"
    ) from error

MAX_REPLANS = 3
"""How often a step that differs from the recorded one leads to a new plan (note 4)."""

DIFFERENT = 0.05
"""Share of the bytes to be dropped that had to be kept, above which a step is called different."""


class KeepwiseCallback(TrainerCallback):
    """Makes the steps of a `Trainer` fit a memory budget: `Trainer(..., callbacks=[KeepwiseCallback(budget="20GiB")])`.

    The plan is made on the first batch and taken off when training ends. Batches of other lengths get plans of their own for the same
    budget, a handful for all lengths. Under several processes each plans its own batch; only the first of them says so.
    """

    def __init__(self, budget: int | float | str = "auto", *, optimizer: bool = True, **options: Any) -> None:
        """Remember what to plan for.

        Args:
            budget: peak of the whole step, as in `keepwise.fit`. `"0.6x"` refers to the first batch, whatever its length.
            optimizer: whether the Trainer's optimizer, its state and its step, counts in the peak.
            options: any other option of `keepwise.fit`. `loss=` is needed where the model returns none, because the Trainer takes the
                labels away from it (`label_smoothing_factor`, `compute_loss_func`): a function from the model's output to a scalar.
                It serves planning only. `grads` is by default what the Trainer does: "held" if it accumulates, else "fresh".

        Raises:
            UsageError: an option that the callback sets itself.
        """
        for name in ("args", "kwargs", "step", "batches"):
            if name in options:
                raise UsageError(f"{name}= is not for KeepwiseCallback: the Trainer's first batch is what is planned")
        self.budget = budget
        self.count_optimizer = optimizer
        self.options = options
        self.plan: keepwise.Plan | None = None
        """The plan, from the first training step on; it can be printed, saved and reported after training too."""
        self.num_replans = 0
        """How often a step differed so much that the next batch was planned anew."""
        self._waiting: _FirstForward | None = None
        self._defaults: dict[str, Any] = {}
        self._speaks = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait for the first batch (notes 1, 2)."""
        self._stop()
        self.plan, self.num_replans = None, 0
        if os.environ.get("KEEPWISE") == "0":
            return
        self._speaks = speaks = bool(state.is_world_process_zero)
        if not speaks:
            warnings.filterwarnings("ignore", message="keepwise: ", category=UserWarning)
        if getattr(args, "torch_compile", False):
            _warn("torch_compile=True: the compiler decides what is kept; nothing is planned")
            return
        if getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False):
            _warn(
                "the Trainer's own activation checkpointing is on, and what it saves is not planned; set gradient_checkpointing=False"
            )
        self._defaults = {
            "optimizer": _inner(kwargs.get("optimizer")) if self.count_optimizer else None,
            "grads": "held" if args.gradient_accumulation_steps > 1 else "fresh",
            "progress": logger.info if speaks else None,
        }
        self._wait(kwargs["model"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A micro-batch is done (note 4)."""
        self._check(kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A step is done (note 4)."""
        self._check(kwargs["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the plan off; `plan` stays."""
        self._stop()

    def _fit(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._waiting = None
        budget, options = self.budget, {**self._defaults, **self.options}
        if (
            self.plan is not None
        ):  # A relative budget keeps its meaning, and training goes on whatever the next batch needs.
            budget = self.plan.budget_bytes or budget
            options["on_infeasible"] = "floor"
        with contextlib.nullcontext() if self._speaks else silence():
            self.plan = keepwise.fit(model, args, kwargs, budget=budget, **options)

    def _check(self, model: nn.Module) -> None:
        if self.plan is None or self._waiting is not None or self.num_replans == MAX_REPLANS:
            return
        stats = self.plan.stats
        if stats.deviation_bytes > DIFFERENT * (stats.deviation_bytes + stats.dropped_bytes):
            self.num_replans += 1
            self.plan.remove()
            self._wait(model)

    def _wait(self, model: nn.Module) -> None:
        self._waiting = _FirstForward(model, self._fit)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.remove()
            self._waiting = None
        if self.plan is not None:
            self.plan.remove()


class _FirstForward:
    """Calls `plan(model, args, kwargs)` in the next forward pass that trains (note 2); in a copy of the model it is the user's own."""

    def __init__(self, model: nn.Module, plan: Callable[[nn.Module, Any, Any], None]) -> None:
        self.model = model
        self.plan = plan
        self.own: Any = model.__dict__.get("forward")
        self.call = model.forward
        functools.update_wrapper(self, self.call)
        model.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Plan, where this is a step of training, and run `forward`."""
        if not (self.model.training and torch.is_grad_enabled()):
            return self.call(*args, **kwargs)
        self.remove()
        self.plan(self.model, args, kwargs)
        return self.model.forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return itself, (self.call,)

    def remove(self) -> None:
        """Put `forward` back (note 3), unless someone else has replaced it since."""
        attributes = self.model.__dict__
        if attributes.get("forward") is not self:
            return
        if self.own is None:
            del attributes["forward"]
        else:
            attributes["forward"] = self.own


def _warn(text: str) -> None:
    warnings.warn(f"keepwise: {text}", stacklevel=3)


def _inner(optimizer: Any) -> torch.optim.Optimizer | None:
    """The torch optimizer inside of Accelerate's wrapper; None where there is none of a kind that can be planned."""
    inner = getattr(optimizer, "optimizer", optimizer)
    return inner if isinstance(inner, torch.optim.Optimizer) else None


__all__ = ["KeepwiseCallback"]
