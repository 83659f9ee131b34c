"""Everything that a step may change, saved and put back: for running the same step several times from one state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from keepwise.trace.driver import OptimizerState
from keepwise.trace.python_state import PythonState
from keepwise.trace.state import Bytes, Generators, Gradients, tensors_of


class SavedState:
    """The state of a training step: parameters, gradients, buffers, generators, optimizer, arguments, module attributes."""

    def __init__(
        self,
        model: nn.Module | None,
        inputs: Any,
        optimizer: torch.optim.Optimizer | None,
        generators: Iterable[torch.Generator] = (),
    ) -> None:
        given = tensors_of(inputs)
        parameters = list(model.parameters()) if model is not None else []
        buffers = list(model.buffers()) if model is not None else []
        self.gradients = Gradients([*parameters, *given])
        self.values = [
            (t.grad, t.grad.detach().clone()) for t in (*parameters, *given) if t.is_leaf and t.grad is not None
        ]
        self.attributes = PythonState(model)
        self.generators = Generators()
        self.own = [(g, g.get_state()) for g in generators]
        self.contents = Bytes([*parameters, *buffers, *given, *self.attributes.tensors])
        self.optimizer = OptimizerState(optimizer)

    def restore(self) -> None:
        """Put everything back, bit for bit and object for object."""
        self.gradients.restore()
        with torch.no_grad():
            for grad, value in self.values:
                if grad.layout is torch.strided and grad.shape == value.shape:
                    grad.copy_(value)
        self.optimizer.restore()
        self.contents.restore()
        self.attributes.restore()
        self.generators.restore()
        for generator, state in self.own:
            generator.set_state(state)

    def clear_gradients(self) -> None:
        """Take the gradients off until `restore`."""
        self.gradients.clear()
