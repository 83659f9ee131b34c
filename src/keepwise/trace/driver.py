"""`trace_steps`: consecutive real steps of a model that is left as it was.

The first step admits ops and makes gradients and optimizer state exist; the second is the steady one and is written down. DDP is
steady one step later: at the start of the second it exchanges its buckets for others, in the order in which gradients came.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from keepwise.runtime.digest import strong_digest
from keepwise.trace.admission import Admission
from keepwise.trace.quiet import quiet
from keepwise.trace.record import Recording, record
from keepwise.trace.saved_state import SavedState
from keepwise.trace.state import tensors_of
from keepwise.trace.static import Leaf
from keepwise.trace.timing import timings_for
from keepwise.trace.values import storage_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Traced:
    """What `trace_steps` found."""

    recording: Recording
    """The steady step."""
    first: Recording
    """The first step, made with no gradients there."""
    gradients: dict[str, int | None]
    """Digest (`runtime.digest.strong_digest`) of each gradient that the first step made, by parameter name, for the proof."""
    observed: Any
    """What `observe` returned after the first step."""
    admission: Admission
    """What is known about each distinct op."""
    left: tuple[str, ...]
    """Attributes that a step may change and that cannot be put back."""
    hooked: tuple[str, ...]
    """Modules with hooks, which ran."""


def trace_steps(
    run: Callable[[], Any],
    *,
    model: nn.Module | None,
    inputs: Any = (),
    optimizer: torch.optim.Optimizer | None = None,
    grads: Literal["held", "fresh"] = "held",
    admission: Admission | None = None,
    spill: bool = True,
    device: torch.device | str | None = None,
    observe: Callable[[Any, list[torch.Generator]], Any] | None = None,
) -> Traced:
    """Record the steady step that `run` makes.

    Args:
        run: one whole step: forward, loss, backward and, where its memory is to count, `optimizer.step()`. What it returns is held
            to the end of the step: return the loss, detached.
        model: its parameters, buffers, gradients and attributes are put back, bit for bit and object for object; so are those of other
            modules that `run` reaches.
        inputs: pytree of the tensors that `run` reads; their bytes and `.grad` are put back.
        optimizer: its state is put back.
        grads: whether gradient buffers exist during the whole recorded step, or are made by its backward.
        admission: what is known from earlier traces; None: the prices that earlier processes left on disk.
        spill: see `record`.
        device: see `record`.
        observe: called after the first step with its result and the user's generators that it drew from.

    Raises:
        Exception: whatever `run` raises, after everything was put back.
    """
    admission = admission if admission is not None else Admission(timings_for(device if device is not None else "cpu"))
    state = SavedState(model, inputs, optimizer, run=run, to_disk=spill, accumulates=False)

    def one(leaves: tuple[Leaf, ...]) -> Recording:
        return record(
            run,
            model=model,
            optimizer=optimizer,
            inputs=inputs,
            admit=admission,
            spill=spill,
            leaves=leaves,
            device=device,
            generators=state.own_generators,
        )

    try:
        state.clear_gradients()
        first = one(())
        with quiet():
            gradients = _digests(model)
            observed = observe(first.result, [g for g, _ in first.generators]) if observe is not None else None
        if grads == "fresh":
            state.clear_gradients()
        sorted_before = _sorted_buckets(model)
        second = one(_left_by(first))
        if _sorted_buckets(model) != sorted_before:  # that was not the steady one
            if grads == "fresh":
                state.clear_gradients()
            second = one((*_left_by(first), *_left_by(second)))
    finally:
        state.restore()
    admission.timings.save()
    return Traced(
        recording=second,
        first=first,
        gradients=gradients,
        observed=observed,
        admission=admission,
        left=tuple(state.attributes.left),
        hooked=tuple(state.attributes.hooked),
    )


def _digests(model: nn.Module | None) -> dict[str, int | None]:
    """Of the gradients that are there."""
    named = model.named_parameters() if model is not None else ()
    return {name: strong_digest(p.grad) if p.grad is not None else None for name, p in named}


def _left_by(step: Recording) -> tuple[Leaf, ...]:
    """What somebody still holds of what a step made, but for its result, which is ours."""
    ours = {t.untyped_storage()._cdata for t in tensors_of(step.result) if storage_of(t) is not None}
    return tuple(ref for ref in step.leaves if getattr(ref(), "_cdata", None) not in ours)


def _sorted_buckets(model: nn.Module | None) -> list[bool]:
    """Which modules in DDP have sorted their buckets anew, by the order in which gradients came."""
    return [getattr(m, "_has_rebuilt_buckets", False) for m in model.modules()] if model is not None else []
