"""An optimizer may step between forward and backward: what it writes is copied first, if a replay reads it.

Plain autograd allows that for every parameter that it did not save: an embedding, a bias, what only another loss reads. A replay may read
those, and where the step is taken outside of what we watch, their new values would come too soon.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from keepwise.runtime.replay import protect

_installed: Any = None


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    with torch._C.DisableTorchFunction():  # no mode of the user's sees it
        protect([p for group in optimizer.param_groups for p in group["params"] if isinstance(p, torch.Tensor)])


def install() -> None:
    """Be told of steps of any optimizer of the process; once is enough. Costs nothing while no replay is due."""
    global _installed
    if _installed is None:
        _installed = register_optimizer_step_pre_hook(_before_step)
