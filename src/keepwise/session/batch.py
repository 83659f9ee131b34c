"""The user's model, batch and loss, as one callable training step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from keepwise._errors import UsageError
from keepwise.session.sizes import growth, key_of, tensors_at

Loss = Callable[[Any], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Arguments of one forward pass."""

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def as_batch(args: Any, kwargs: Mapping[str, Any] | None) -> Batch:
    """Arguments as API users give them: a tuple, a mapping, one tensor, or nothing.

    Raises:
        UsageError: none of these.
    """
    if isinstance(args, Batch):
        return args
    extra = dict(kwargs or {})
    if args is None:
        return Batch(kwargs=extra)
    if isinstance(args, torch.Tensor):
        return Batch(args=(args,), kwargs=extra)
    if isinstance(args, Mapping):
        return Batch(kwargs={**args, **extra})
    if isinstance(args, (tuple, list)):
        return Batch(args=tuple(args), kwargs=extra)
    raise UsageError(
        f"args must be a tuple for model(*args), a mapping for model(**args) or a tensor, got {type(args).__name__}"
    )


def check_in_flight(number: Any) -> None:
    """Raises UsageError where `number` is no positive number of micro-batches."""
    if not isinstance(number, int) or number < 1:
        raise UsageError(f"in_flight must be a positive number of micro-batches, got {number!r}")


def largest_first(batches: Any) -> list[Batch]:
    """Batches in the order given, but the first one is none that another is larger than.

    Raises:
        UsageError: there is none, or what is given is one batch and no sequence of them.
    """
    if isinstance(batches, torch.Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise UsageError(f"batches= must be a sequence of batches, got {type(batches).__name__}; write [batch] for one")
    found = [as_batch(b, None) for b in batches]
    if not found:
        raise UsageError("batches= is empty; pass representative batches, the largest first")
    keys = [key_of(b.args, b.kwargs) for b in found]
    largest = 0
    for i, key in enumerate(keys):
        if growth(keys[largest], key).linear > 1:
            largest = i
    return [found[largest], *found[:largest], *found[largest + 1 :]]


def loss_of(output: Any, loss: Loss | None) -> torch.Tensor:
    """The scalar that backward starts from.

    Raises:
        UsageError: there is none, it is no scalar, or it does not require grad.
    """
    if loss is not None:
        found = loss(output)
        source = "loss(output)"
    elif isinstance(output, torch.Tensor):
        found, source = output, "the model's output"
    elif isinstance(output, Mapping) and "loss" in output:
        found, source = output["loss"], "output['loss']"
    elif (attribute := getattr(output, "loss", None)) is not None:
        found, source = attribute, "output.loss"
    else:
        raise UsageError(
            f"no loss: the model returned {type(output).__name__}, which is no scalar and has no .loss; "
            "pass loss=, a function from the output to a scalar (or labels in the batch)"
        )
    if not isinstance(found, torch.Tensor):
        raise UsageError(
            f"{source} is {type(found).__name__}, not a tensor; pass loss=, a function from output to scalar"
        )
    if found.numel() != 1:
        raise UsageError(
            f"{source} has shape {list(found.shape)}, not a scalar; pass loss=, a function from output to scalar"
        )
    if not found.dtype.is_floating_point:
        raise UsageError(
            f"{source} is {str(found.dtype).removeprefix('torch.')}; backward starts from a real floating-point number"
        )
    if not found.requires_grad:
        raise UsageError(
            f"{source} does not require grad: every parameter is frozen (unfreeze some), or it was computed under no_grad or detached"
        )
    return found


def check_devices(model: nn.Module, batch: Batch | None) -> torch.device:
    """The one device of the model.

    Raises:
        UsageError: no parameters to train, parameters on several devices, or a batch on another device.
    """
    for name, module in model.named_modules():
        if type(module).__name__ in ("FullyShardedDataParallel", "DeepSpeedEngine"):
            raise UsageError(
                f"{type(module).__name__} ({name or 'the model'}) is not supported yet: train without a plan, or use DDP"
            )
    devices: dict[torch.device, str] = {}
    for name, p in model.named_parameters():
        devices.setdefault(p.device, name)
        if type(p.data).__name__ == "DTensor":
            raise UsageError(
                f"parameter {name} is sharded (DTensor: FSDP2 or tensor parallel), which is not supported yet; train without a plan, "
                "or use DDP"
            )
    for name, b in model.named_buffers():
        if type(b).__name__ == "DTensor":
            raise UsageError(f"buffer {name} is a DTensor, which is not supported yet; train without a plan")
        if not devices:
            devices.setdefault(b.device, name)
    if len(devices) > 1:
        listed = ", ".join(f"{device} ({name})" for device, name in devices.items())
        raise UsageError(f"the model lies on {len(devices)} devices: {listed}. Plan one device's part at a time")
    device = next(iter(devices), torch.device("cpu"))
    if device.type == "meta":
        raise UsageError("the model lies on the meta device; move it to a real one (model.to_empty) before planning")
    if batch is not None:
        for where, t in _tensors(batch):
            if type(t).__name__ == "DTensor":
                raise UsageError(f"{where} is a DTensor, which is not supported yet; plan a model of local tensors")
            if t.device != device and t.dim() > 0:
                raise UsageError(
                    f"{where} is on {t.device}, the model on {device}; move the batch with .to('{device}')"
                )
    return device


def _tensors(batch: Batch) -> list[tuple[str, torch.Tensor]]:
    return [*tensors_at(batch.args, "args"), *tensors_at(batch.kwargs, "kwargs")]


def whole_step(
    model: nn.Module, batch: Batch, loss: Loss | None, optimizer: torch.optim.Optimizer | None
) -> Callable[[], Any]:
    """One training step as a callable that returns the loss.

    Raises:
        UsageError: the optimizer cannot make a step by itself.
    """
    if optimizer is not None:
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise UsageError(
                f"{type(optimizer).__name__}.step needs a closure that runs the model again; pass the whole step as step="
            )

    def run() -> torch.Tensor:
        output = model(*batch.args, **batch.kwargs)
        value = loss_of(output, loss)
        del output
        value.backward()
        if optimizer is not None:
            optimizer.step()
        return value.detach()

    return run


def make_optimizer(optimizer: Any, model: nn.Module) -> torch.optim.Optimizer | None:
    """An optimizer from an instance or a class; None stays None.

    Raises:
        UsageError: neither.
    """
    if optimizer is None or isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    if callable(optimizer):
        made = optimizer([p for p in model.parameters() if p.requires_grad])
        if isinstance(made, torch.optim.Optimizer):
            return made
    raise UsageError(f"optimizer must be a torch optimizer or its class, got {optimizer!r}")
