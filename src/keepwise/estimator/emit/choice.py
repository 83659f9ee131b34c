"""The choice that all systems share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from keepwise._units import show_bytes
from keepwise.estimator.answer import Estimate
from keepwise.estimator.compute import Estimator
from keepwise.estimator.policy import Policy, parse_policy
from keepwise.estimator.setup import Kernels, Setup
from keepwise.estimator.spec import Architecture, Experts

_TOLERANCE = 0.005  # smaller differences in peak or time are not worth a line


_NEUTRAL = {"tensor_parallel": 1, "context_parallel": 1, "pipeline_parallel": 1, "expert_parallel": 1, "zero": 0}
PARALLEL = tuple(_NEUTRAL)
"""What `System.unwritten` may name."""


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One thing a system can be told."""

    policy: str
    """what it does, in the form that `parse_policy` reads."""
    values: dict[str, Any]
    """how it is said, for the system's own writer."""
    offload: bool = False
    """whether held activations go to the host."""


class System(msgspec.Struct, frozen=True, kw_only=True):
    """What a system can express."""

    title: str
    """its name."""
    options: Callable[[Architecture, Setup], list[Option]]
    """all that it can be told."""
    write: Callable[[Option, Architecture, Setup], str]
    """the chosen option in the system's own words."""
    limits: tuple[str, ...]
    """what it cannot express at all."""
    kernels: Kernels | None = None
    """kernels that it runs, where they are not those of the setup."""
    unwritten: tuple[str, ...] = ()
    """degrees of parallelism that have to be set elsewhere."""
    checked: str = ""
    """version whose sources the names were read from."""
    validate: Callable[[Option, Architecture, Setup], str] | None = None
    """checks an option against the system where it is installed; says what it did."""


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """The nearest setting of one system."""

    system: str
    """name."""
    policy: str
    """what it does, in the form that `parse_policy` reads, with "+ offload" where held activations go to the host."""
    text: str
    """the setting, to be pasted."""
    peak_bytes: int
    """bytes on the fullest rank with it."""
    time_overhead: float
    """seconds that recomputation and offload add, as a share of a step without both."""
    fits: bool
    """whether the wanted peak is kept."""
    ours_peak_bytes: int
    """bytes with our plan for the same wanted peak and kernels."""
    ours_time_overhead: float
    """the same share with our plan."""
    lost: tuple[str, ...]
    """what is lost against our plan, one line each."""
    notes: tuple[str, ...]
    """what to mind."""

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {name: getattr(self, name) for name in self.__struct_fields__}


def choose(name: str, system: System, estimator: Estimator, setup: Setup, budget: int) -> Setting:
    """The fastest option at or under `budget`, else the one with the smallest peak; and the comparison with our plan."""
    base = replace(setup, kernels=system.kernels) if system.kernels is not None else setup
    plain = estimator.run(replace(base, checkpointing=Policy(), offload=base.offload - {"activations"}))
    ours = estimator.run(replace(base, checkpointing=Policy(kind="keepwise", budget_bytes=budget)))
    tried: list[tuple[bool, float, int, Option, Estimate]] = []
    for option in system.options(estimator.architecture, base):
        answer = estimator.run(_with(base, option))
        fits = answer.peak_bytes <= budget
        tried.append((not fits, answer.step_seconds if fits else 0.0, answer.peak_bytes, option, answer))
    _, _, _, option, answer = min(tried, key=lambda t: t[:3])
    notes: list[str] = []
    if system.kernels is not None and system.kernels != setup.kernels:
        notes.append(f"counted with {system.kernels} kernels")
    elsewhere = [f"{name} {getattr(base, name)}" for name in system.unwritten if getattr(base, name) > _NEUTRAL[name]]
    if elsewhere:
        notes.append(f"to be set elsewhere, where the system has it: {', '.join(elsewhere)}")
    if system.checked:
        notes.append(f"names as in {system.checked}")
    if system.validate is not None:
        notes.append(system.validate(option, estimator.architecture, base))
    return Setting(
        system=name,
        policy=option.policy + (" + offload" if option.offload else ""),
        text=system.write(option, estimator.architecture, base),
        peak_bytes=answer.peak_bytes,
        time_overhead=answer.step_seconds / plain.step_seconds - 1,
        fits=answer.peak_bytes <= budget,
        ours_peak_bytes=ours.peak_bytes,
        ours_time_overhead=ours.step_seconds / plain.step_seconds - 1,
        lost=(*_lost(answer, ours, plain, budget), *system.limits),
        notes=tuple(notes),
    )


def _with(setup: Setup, option: Option) -> Setup:
    offload = setup.offload | {"activations"} if option.offload else setup.offload
    return replace(setup, checkpointing=parse_policy(option.policy), offload=offload)


def _lost(theirs: Estimate, ours: Estimate, plain: Estimate, budget: int) -> list[str]:
    lines: list[str] = []
    if theirs.peak_bytes > budget:
        line = f"{show_bytes(theirs.peak_bytes - budget)} over the wanted peak"
        if ours.peak_bytes <= budget:
            line += f"; our plan keeps it at +{ours.step_seconds / plain.step_seconds - 1:.1%} time"
        lines.append(line)
    slower = (theirs.step_seconds - ours.step_seconds) / plain.step_seconds
    if theirs.peak_bytes <= budget and slower > _TOLERANCE:
        lines.append(f"{slower:.1%} of a step: it rebuilds more than the wanted peak asks for")
    unused = budget - theirs.peak_bytes
    if unused > _TOLERANCE * budget and slower > _TOLERANCE:
        lines.append(f"{show_bytes(unused)} of the wanted peak stay unused: there is no step between")
    return lines


def numbered(form: str, layers: int, most: int = 8) -> Sequence[int]:
    """Numbers of layers worth trying for `every` and `nth` (small ones), or for `first` (all)."""
    if form == "first":
        return range(1, layers + 1)
    return range(1, min(most, layers) + 1)


def layers_a_stage(architecture: Architecture, setup: Setup) -> int:
    """Blocks on one pipeline stage, rounded up."""
    return -(-architecture.num_layers // setup.pipeline_parallel)


def has_experts(architecture: Architecture) -> bool:
    """Whether any block is a mixture of experts."""
    return any(isinstance(b.feed_forward, Experts) for s in architecture.stacks for b in s.blocks)


def has_dense(architecture: Architecture) -> bool:
    """Whether any block has a dense feed-forward."""
    return any(not isinstance(b.feed_forward, Experts) for s in architecture.stacks for b in s.blocks)
