"""The state of a training step, saved and put back: for running steps that leave a model, its optimizer and everything else as they were.

The parts are in `state` (tensors' contents, gradients, global generators) and `python_state` (attributes, containers, closures).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepwise.trace.python_state import PythonState
from keepwise.trace.quiet import quiet
from keepwise.trace.reach import reached
from keepwise.trace.state import Bytes, Generators, Gradients, tensors_of
from keepwise.trace.static import optimizer_tensors


class SavedState:
    """Parameters, gradients, buffers, arguments, generators, optimizer and the modules' attributes, as they were when this was made.

    Attributes:
        own_generators: the user's own generators with their states, by `_cdata`; whoever sees others drawn from adds them.
        attributes: what was found in Python, and what of it cannot be put back.
    """

    def __init__(
        self,
        model: nn.Module | None,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,
        generators: Iterable[torch.Generator] = (),
        *,
        run: Any = None,
        to_disk: bool = True,
        accumulates: bool = True,
    ) -> None:
        """Save it.

        Args:
            model: whose parameters, gradients, buffers and attributes.
            inputs: pytree of the tensors that the steps read.
            optimizer: whose state and groups.
            generators: the user's own ones, as far as they are known.
            run: the function that makes the steps; modules and leaves that it reaches beside the model are saved like the model.
            to_disk: put contents into files rather than into memory.
            accumulates: the steps may add to the gradients that exist, so that their contents are saved too.
        """
        with quiet():
            given = tensors_of(inputs)
            beside, trained, training = reached(run, model)
            modules = [m for m in (model, *beside) if m is not None]
            buffers = [b for m in modules for b in m.buffers()]
            leaves = [*(p for m in modules for p in m.parameters()), *trained, *given]
            self._gradients = Gradients(leaves)
            grads = [t.grad for t in leaves if accumulates and t.is_leaf and t.grad is not None]
            self._values = [(grad, grad.detach().clone()) for grad in grads]
            self.attributes = PythonState(model, beside, training)
            self._generators = Generators()
            self.own_generators = {g._cdata: (g, g.get_state()) for g in generators}  # type: ignore[attr-defined]
            self._contents = Bytes([*leaves, *buffers, *self.attributes.tensors], to_disk=to_disk)
            self._optimizer = OptimizerState(optimizer)

    def restore(self) -> None:
        """Put everything back, bit for bit and object for object; what fails does not keep the rest from it."""
        with contextlib.ExitStack() as last_to_first, quiet():
            last_to_first.callback(self._restore_own_generators)
            last_to_first.callback(self._generators.restore)
            last_to_first.callback(self.attributes.restore)
            last_to_first.callback(self._contents.restore)
            last_to_first.callback(self._optimizer.restore)
            last_to_first.callback(self._restore_gradients)

    def clear_gradients(self) -> None:
        """Take the gradients off until `restore`."""
        self._gradients.clear()

    def _restore_gradients(self) -> None:
        self._gradients.restore()
        with torch.no_grad():
            for grad, value in self._values:
                if grad.layout is torch.strided and grad.shape == value.shape:
                    grad.copy_(value)

    def _restore_own_generators(self) -> None:
        for generator, state in self.own_generators.values():
            generator.set_state(state)


class OptimizerState:
    """State and groups of an optimizer, objects and bytes."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer
        if optimizer is None:
            return
        self._bytes = Bytes(optimizer_tensors(optimizer))
        self._state = {p: dict(s) for p, s in optimizer.state.items()}
        self._groups = [(g, {k: list(v) if k == "params" else v for k, v in g.items()}) for g in optimizer.param_groups]
        self._called = optimizer.__dict__.get("_opt_called", self)
        """Whether `step()` was called, as a learning rate scheduler asks; this object where nobody does."""

    def restore(self) -> None:
        """Put all of it back."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        self._bytes.restore()
        for p in [p for p in optimizer.state if p not in self._state]:
            del optimizer.state[p]
        for p, saved in self._state.items():
            now = optimizer.state[p]
            now.clear()
            now.update(saved)
        optimizer.param_groups[:] = [group for group, _ in self._groups]
        for group, saved in self._groups:
            group.clear()
            group.update(saved)
        if self._called is not self:
            optimizer.__dict__["_opt_called"] = self._called
        else:
            optimizer.__dict__.pop("_opt_called", None)
