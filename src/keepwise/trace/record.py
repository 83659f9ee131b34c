"""`record`: run one step for real and write it down."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from keepwise.ir import Step
from keepwise.trace.admission import Admission
from keepwise.trace.assemble import assemble
from keepwise.trace.calibration import dispatch_seconds
from keepwise.trace.paths import PathTracker, compiled_regions
from keepwise.trace.quiet import quiet
from keepwise.trace.recorder import Recorder
from keepwise.trace.static import Leaf, classify, main_device, register

Tensor = torch.Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """One recorded step."""

    step: Step
    result: Any
    """What `run` returned."""
    inside: tuple[range, ...] = ()
    """Indices of what was saved in each call of the model's forward."""
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()
    """The user's own generators that were drawn from, with their states before the first draw."""
    functorch_paths: tuple[str, ...] = ()
    """Modules in which `torch.func` transforms ran: no hooks on saved tensors are possible there."""
    compiled: tuple[str, ...] = ()
    """Modules that are `torch.compile`d."""
    foreign_hooks: tuple[str, ...] = ()
    """Modules in which the user's own hooks on saved tensors were active."""
    checkpoints: tuple[str, ...] = ()
    """Modules in which `torch.utils.checkpoint` was active."""
    leaves: tuple[Leaf, ...] = ()
    """Storages that no recorded op made, where still alive: those that live on existed before the next step."""


def record(
    run: Callable[[], Any],
    *,
    model: nn.Module | None,
    optimizer: torch.optim.Optimizer | None = None,
    inputs: Any = (),
    admit: Admission | None = None,
    spill: bool = True,
    leaves: Iterable[Leaf] = (),
    device: torch.device | str | None = None,
    generators: dict[int, tuple[torch.Generator, Tensor]] | None = None,
) -> Recording:
    """Run a step and write it down.

    Args:
        run: performs one whole step: forward, loss, backward and, if wanted, `optimizer.step()`.
        model: names parameters and buffers, and the module path of each op.
        optimizer: its state counts as static; ops inside of its `step` belong to the optimizer phase.
        inputs: pytree with the tensors that the caller holds during the step.
        admit: measures each distinct op when it is first seen, and knows those seen before; without it only schemas count.
        spill: put saved tensors into files (else into memory) meanwhile.
        leaves: `Recording.leaves` of an earlier step: storages that existed before this one.
        device: what `Step.device` shall be; by default that of the first parameter or input.
        generators: filled with the user's own generators and their first states, by `_cdata`, also where `run` raises.

    Raises:
        Exception: whatever `run` raises; no hook, mode or handler stays behind.
    """
    paths = PathTracker(model)
    recorder = Recorder(paths=paths, admit=admit, spill=spill, generators=generators)
    with quiet():
        held = register(recorder.table, model=model, optimizer=optimizer, inputs=inputs, leaves=leaves)
    calls: list[list[int]] = []

    def on_root(begins: bool) -> None:
        if begins:
            calls.append([len(recorder.saved.saves), -1])
            if recorder.saved.model_begins():
                recorder.foreign_hooks[""] = None
            return
        recorder.saved.model_ends()
        if calls:
            calls[-1][1] = len(recorder.saved.saves)

    paths.on_root = on_root
    began = time.perf_counter()
    try:
        result = _run_under(recorder, run)
    finally:
        paths.on_root = (
            None  # a cycle: what it leads to, weak references to parameters among it, would wait for the collector
        )
    wall = time.perf_counter() - began
    recorder.table.close()
    with quiet():
        classify(recorder.table, model=model, optimizer=optimizer)
        del held
        where = device if device is not None else main_device(model, inputs)
    overhead = recorder.table.overhead + len(recorder.ops) * dispatch_seconds()
    return Recording(
        step=assemble(recorder, device=str(where), seconds=max(wall - overhead, 0.0)),
        result=result,
        inside=tuple(range(a, b if b >= 0 else len(recorder.saved.saves)) for a, b in calls),
        generators=tuple(recorder.generators.values()),
        functorch_paths=tuple(recorder.functorch_paths),
        compiled=compiled_regions(model) if model is not None else (),
        foreign_hooks=tuple(recorder.foreign_hooks),
        checkpoints=tuple(recorder.checkpoints),
        leaves=recorder.table.leaves_alive(),
    )


def _run_under(recorder: Recorder, run: Callable[[], Any]) -> Any:
    def outside(closure: Callable[[], Any]) -> Callable[[], Any]:
        """A closure given to `optimizer.step` runs forward and backward: no part of the optimizer's phase."""

        def call() -> Any:
            depth, recorder.optimizer_depth = recorder.optimizer_depth, 0
            try:
                return closure()
            finally:
                recorder.optimizer_depth = depth

        return call

    def enter(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        recorder.optimizer_depth += 1
        given = [outside(a) if k and callable(a) else a for k, a in enumerate(args)]
        return tuple(given), {k: outside(v) if k == "closure" and callable(v) else v for k, v in kwargs.items()}

    def leave(*_: Any) -> None:
        recorder.optimizer_depth = max(recorder.optimizer_depth - 1, 0)

    handles = [register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)]
    recorder.paths.install()
    try:
        # What autocast has cached of an earlier step would not be cast in this one.
        torch.clear_autocast_cache()
        with recorder.saved.installed(), recorder:
            return run()
    finally:
        torch.clear_autocast_cache()
        recorder.paths.remove()
        for handle in handles:
            handle.remove()
