"""What a target is: a model, its data, and how its loss is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keepwise._errors import KeepwiseError

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of one call of a model."""


class TargetFailed(KeepwiseError):  # noqa: N818 - public name
    """The user's own function raised. The original exception is the `__cause__`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A model in training mode with what it needs to run a step: `loss(model(*args, **kwargs)).backward()`."""

    name: str
    """Built-in name, or the `file.py:function` that it was loaded from."""
    model: nn.Module
    """The model, on the CPU, in the mode (train or eval) in which it is to be trained."""
    args: tuple[Any, ...]
    """Positional arguments of the first batch."""
    kwargs: dict[str, Any]
    """Keyword arguments of the first batch."""
    loss: Callable[[Any], Tensor] | None = None
    """Output -> scalar; None where the output is the loss or has it as `.loss`."""
    description: str = ""
    """One line: the model and the size of its batch."""
    tokens: int | None = None
    """Tokens of text, pictures or other samples in one batch: what `tokens per second` counts; None where not known."""
    blocks: tuple[str, ...] = ()
    """Module paths that a user would wrap in checkpointing by hand, in the order in which they run."""
    batches: Callable[[int], Batch] | None = None
    """The i-th batch of a training run (same shapes, other data); None where there is just the one batch."""

    def batch(self, index: int) -> Batch:
        """The `index`-th batch for multi-step training, as `(args, kwargs)`; a user's target has one batch only."""
        if self.batches is None:
            return self.args, self.kwargs
        return self.batches(index)

    def scalar(self, output: Any) -> Tensor:
        """The loss out of a model's output: `loss(output)`, the output itself, or its `.loss` or `["loss"]`.

        Raises:
            KeepwiseError: the output holds no loss.
        """
        if self.loss is not None:
            return self.loss(output)
        if hasattr(output, "backward") and getattr(output, "ndim", 1) == 0:
            return output
        if isinstance(output, Mapping) and output.get("loss") is not None:
            return output["loss"]
        found = getattr(output, "loss", None)
        if found is None:
            raise KeepwiseError(
                f"target {self.name}: the output, a {type(output).__name__}, is no scalar and has no `.loss`; "
                "return a loss function as the fourth element of the target"
            )
        return found

    def step(self, index: int | None = None) -> Tensor:
        """Forward and backward over one batch (the first one without `index`); returns the loss, detached."""
        args, kwargs = (self.args, self.kwargs) if index is None else self.batch(index)
        loss = self.scalar(self.model(*args, **kwargs))
        loss.backward()
        return loss.detach()
