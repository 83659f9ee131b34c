"""What a plan was made for: enough of a model to tell another one from it, in words."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from keepwise._errors import PlanMismatch


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Architecture of a model as far as a plan depends on it."""

    model: str
    """Class name, for people."""
    parameters: tuple[tuple[str, tuple[int, ...], str, bool], ...]
    """(name, shape, dtype, requires_grad) of every parameter."""
    buffers: tuple[tuple[str, tuple[int, ...], str], ...]
    """(name, shape, dtype) of every buffer."""
    torch_version: str


def fingerprint(model: nn.Module) -> Fingerprint:
    """Describe a model."""
    return Fingerprint(
        model=type(model).__name__,
        parameters=tuple((n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters()),
        buffers=tuple((n, tuple(b.shape), str(b.dtype)) for n, b in model.named_buffers()),
        torch_version=str(torch.__version__),
    )


def check_fingerprint(plan: Fingerprint, model: nn.Module) -> None:
    """Raise with the first difference between the model that a plan was made for and another one.

    Raises:
        PlanMismatch: they differ.
    """
    now = fingerprint(model)
    if plan.torch_version != now.torch_version:
        raise PlanMismatch(
            f"the plan was made with torch {plan.torch_version}, this is {now.torch_version}: ops may differ. Run keepwise.fit again"
        )
    for a, b in zip(plan.parameters, now.parameters, strict=False):
        if a != b:
            raise PlanMismatch(f"the plan was made for another model: parameter {_show(a)} there, {_show(b)} here")
    if len(plan.parameters) != len(now.parameters):
        longer = plan if len(plan.parameters) > len(now.parameters) else now
        extra = longer.parameters[min(len(plan.parameters), len(now.parameters))]
        where = "the plan's model only" if longer is plan else "this model only"
        raise PlanMismatch(f"the plan was made for another model: parameter {_show(extra)} exists in {where}")
    if plan.buffers != now.buffers:
        a, b = set(plan.buffers), set(now.buffers)
        first = next(iter(sorted((a - b) | (b - a))), None)
        if first is not None:
            raise PlanMismatch(
                f"the plan was made for another model: buffer {first[0]} {list(first[1])} {first[2]} differs"
            )


def _show(p: tuple[str, tuple[int, ...], str, bool]) -> str:
    name, shape, dtype, grad = p
    return f"{name} {list(shape)} {dtype}{'' if grad else ' (frozen)'}"
