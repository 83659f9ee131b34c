"""Targets on the command line, and one whole training step of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from keepwise._errors import UsageError
from keepwise.targets import Batch, Target, load

if TYPE_CHECKING:
    from torch.optim import Optimizer

DEVICE = click.option("--device", metavar="DEVICE", help="Move model and data there first, e.g. cuda.")
OPTIMIZER = click.option(
    "--optimizer", metavar="NAME", help="A class of torch.optim, e.g. AdamW: its state and its step then count."
)
GRADS = click.option(
    "--grads",
    type=click.Choice(["held", "fresh"]),
    default="held",
    show_default=True,
    help="Whether gradient buffers exist during the whole step, or appear in backward.",
)


def load_target(spec: str, device: str | None = None) -> Target:
    """The target that `spec` names, on `device` if one is given.

    Raises:
        UsageError: there is no such target or device.
        TargetFailed: the user's function raised.
    """
    target = load(spec)
    if device is None:
        return target
    import torch
    from torch.utils import _pytree

    try:
        where = torch.device(device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"there is no device {device!r} here: {str(error).splitlines()[0]}") from None

    def moved(batch: Any) -> Any:
        return _pytree.tree_map(lambda x: x.to(where) if isinstance(x, torch.Tensor) else x, batch)

    batches = target.batches
    args, kwargs = moved((target.args, target.kwargs))
    return dataclasses.replace(
        target,
        model=target.model.to(where),
        args=args,
        kwargs=kwargs,
        batches=None if batches is None else lambda index: moved(batches(index)),
    )


def make_optimizer(name: str | None, target: Target, *, rate: float = 1e-3) -> Optimizer | None:
    """An optimizer of torch's over the trainable parameters; None without a name (or for "none").

    Raises:
        UsageError: torch.optim has no such class.
    """
    if name is None or name.lower() == "none":
        return None
    import torch

    classes: dict[str, Any] = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    found = classes.get(name.lower())
    if found is None:
        listed = ", ".join(sorted(c.__name__ for c in classes.values()))
        raise UsageError(f"torch.optim has no optimizer {name!r}: there are {listed}")
    return found([p for p in target.model.parameters() if p.requires_grad], lr=rate)


def whole_step(target: Target, optimizer: Optimizer | None, *, grads: str = "held") -> Callable[[], None]:
    """Forward, loss, backward and, with an optimizer, its step, over the first batch."""

    def step() -> None:
        if grads == "fresh":
            target.model.zero_grad(set_to_none=True)
        target.step()
        if optimizer is not None:
            optimizer.step()

    return step


def as_one(target: Target, batch: Batch) -> Any:
    """Both kinds of arguments as one thing: a tuple, or a mapping with the positional ones under their names.

    Raises:
        UsageError: there are both kinds and `forward` does not name the positional ones.
    """
    args, kwargs = batch
    if not kwargs:
        return args
    if not args:
        return kwargs
    bound = inspect.signature(target.model.forward).bind(*args)
    named = dict(bound.arguments)
    for name in named:
        if bound.signature.parameters[name].kind not in (
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
            inspect.Parameter.KEYWORD_ONLY,
        ):
            raise UsageError(
                f"target {target.name}: pass all arguments by name (kwargs); {name} can only be passed by place"
            )
    return {**named, **kwargs}
