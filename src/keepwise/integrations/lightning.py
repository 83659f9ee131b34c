"""Lightning: a callback that plans on the first batch of training.

Notes:
1. What is planned is the module's `training_step`, loss included, as the forward of a module that holds the user's. Module paths in the
   plan therefore begin with `module.`, as under DDP; what `training_step` itself computes has none.
2. The plan is made inside the first call of `training_step`: the batch is the one that the loader gave, on the device, and the
   precision plugin's contexts are open. Under a strategy that wraps the module, that is inside of the wrapper's forward, where its
   gradient hooks wait for no gradients yet.
3. `self.log` would count the batch once for each run of the step that planning makes, so it is silent meanwhile. What the step sends
   to a logger by other ways is sent several times.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

import keepwise
from keepwise._errors import UsageError
from keepwise._rank import silence

try:
    import lightning.pytorch as lightning  # pyright: ignore[reportMissingImports]
    from lightning.pytorch.utilities import rank_zero_info  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise ImportError("KeepwiseCallback needs the package lightning: pip install 'keepwise[lightning]'") from error


class KeepwiseCallback(lightning.Callback):
    """Makes the steps of a `lightning.Trainer` fit a memory budget: `Trainer(..., callbacks=[KeepwiseCallback(budget="20GiB")])`.

    The plan is made on the first batch and taken off when training ends. It covers `training_step`, so also a loss that is computed there.
    Only automatic optimization can be planned this way.
    """

    def __init__(self, budget: int | float | str = "auto", *, optimizer: bool = True, **options: Any) -> None:
        """Remember what to plan for.

        Args:
            budget: peak of the whole step, as in `keepwise.fit`. `"0.6x"` refers to the first batch, whatever its size.
            optimizer: whether the module's optimizer, its state and its step, counts in the peak.
            options: any other option of `keepwise.fit`. `grads` stays "held": Lightning frees gradients between forward and backward.
                Patterns of `pin` are relative to the user's module.

        Raises:
            UsageError: an option that the callback sets itself.
        """
        super().__init__()
        for name in ("args", "kwargs", "step", "batches", "loss"):
            if name in options:
                raise UsageError(
                    f"{name}= is not for KeepwiseCallback: the first batch's training_step is what is planned"
                )
        self.budget = budget
        self.count_optimizer = optimizer
        self.options = options
        self.plan: keepwise.Plan | None = None
        """The plan, from the first training step on; it can be printed, saved and reported after training too."""
        self._stepping: tuple[nn.Module, Any, Any] | None = None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Put the planned step in the place of `training_step` (notes 1, 2).

        Raises:
            UsageError: the module optimizes by hand.
        """
        self._stop()
        self.plan = None
        if os.environ.get("KEEPWISE") == "0":
            return
        if not pl_module.automatic_optimization:
            raise UsageError(
                "with automatic_optimization=False, training_step runs backward and the optimizer itself: "
                "call keepwise.fit on the network inside of the module instead"
            )
        if not trainer.is_global_zero:
            warnings.filterwarnings("ignore", message="keepwise: ", category=UserWarning)
        own: Any = pl_module.__dict__.get("training_step")
        call = pl_module.training_step
        step = _TrainingStep(pl_module, call)

        @functools.wraps(call)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            if self.plan is None:
                with _without_log(pl_module):
                    self._fit(trainer, step, args, kwargs)
            return step(*args, **kwargs)

        pl_module.__dict__["training_step"] = training_step
        self._stepping = pl_module, training_step, own

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Take the plan off; `plan` stays."""
        self._stop()

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        """Take the plan off."""
        self._stop()

    def _fit(self, trainer: lightning.Trainer, step: nn.Module, args: Any, kwargs: Any) -> None:
        optimizers = [o for o in trainer.optimizers if isinstance(o, torch.optim.Optimizer)]
        options = {
            "optimizer": optimizers[0] if self.count_optimizer and len(optimizers) == 1 else None,
            "progress": rank_zero_info if trainer.is_global_zero else None,
            **self.options,
        }
        pin: Mapping[str, str] | None = options.pop("pin", None)
        if pin is not None:
            options["pin"] = {f"module.{pattern}": decision for pattern, decision in pin.items()}
        with silence():  # Lightning's own logger is told.
            self.plan = keepwise.fit(step, args, kwargs, budget=self.budget, **options)
        if trainer.is_global_zero:
            rank_zero_info(str(self.plan))

    def _stop(self) -> None:
        if self._stepping is not None:
            module, ours, own = self._stepping
            self._stepping = None
            if module.__dict__.get("training_step") is ours:
                if own is None:
                    del module.__dict__["training_step"]
                else:
                    module.__dict__["training_step"] = own
        if self.plan is not None:
            self.plan.remove()


class _TrainingStep(nn.Module):
    """The user's module, with `training_step` as its forward (note 1)."""

    def __init__(self, module: nn.Module, call: Any) -> None:
        super().__init__()
        self.module = module
        self.call = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


@contextlib.contextmanager
def _without_log(module: nn.Module) -> Iterator[None]:
    """Note 3."""
    own: Any = module.__dict__.get("log")
    module.__dict__["log"] = lambda *_, **__: None
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["log"]
        else:
            module.__dict__["log"] = own


__all__ = ["KeepwiseCallback"]
