"""The proof that a planned step changes nothing but memory and time.

From one state, the plain step runs twice and the planned step once. Loss, outputs, gradients, buffers, generator states and
parameters after `optimizer.step()` are compared by digest. If plain differs from plain there is no verdict about the plan from that
side; what is left is `recomputed_identical`: every replay against its own original, which holds for any step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from keepwise._errors import MismatchError
from keepwise.runtime.digest import strong_digest

Tensor = torch.Tensor
COMPARED = ("loss", "outputs", "gradients", "buffers", "rng", "parameters")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """Outcome of `keepwise.verify`, or of the planned step that `fit` made (`plan.proof`)."""

    identical: bool | None
    """Whether everything compared is equal bit for bit; None where the plain step does not repeat."""
    recomputed_identical: bool
    """Whether every replay equals the tensor that it replaces."""
    repeatable: bool
    """Whether the plain step equals itself."""
    compared: tuple[str, ...]
    """What was compared."""
    first_difference: str
    """The first thing that differs, empty if none does."""
    num_steps: int
    num_compared: int
    """Tensors and states compared, over all steps."""
    num_replays_compared: int
    """Replayed tensors whose digest was compared with the original."""
    digests: tuple[str, ...] = ()
    """One digest of everything compared, for each step of the planned run."""

    @property
    def holds(self) -> bool:
        """Whether nothing speaks against the plan."""
        return self.recomputed_identical and self.identical is not False

    def __str__(self) -> str:
        what = ", ".join(self.compared)
        replays = f"{self.num_replays_compared} replayed tensors equal their originals"
        if not self.recomputed_identical:
            return f"not identical: {self.first_difference}"
        if not self.repeatable:
            return f"the plain step is not repeatable ({self.first_difference}): no verdict from comparing steps; {replays}"
        if self.identical:
            steps = "1 step" if self.num_steps == 1 else f"{self.num_steps} steps"
            return f"identical bit for bit over {steps}: {what} ({self.num_compared} compared); {replays}"
        return f"not identical: {self.first_difference}"


@dataclasses.dataclass(slots=True)
class Observation:
    """Digests of everything that a step leaves behind."""

    items: dict[str, int]
    """`gradients/h.0.attn.weight` -> digest, in a fixed order."""

    def difference(self, other: Observation) -> str:
        """The first key whose digests differ, in words; empty if none."""
        for key in dict.fromkeys((*self.items, *other.items)):
            if self.items.get(key) != other.items.get(key):
                kind, _, name = key.partition("/")
                return f"{kind} differ: {name}" if name else f"{kind} differs"
        return ""

    def digest(self) -> str:
        """One digest of all."""
        h = hashlib.blake2b(digest_size=8)
        for key, value in self.items.items():
            h.update(f"{key}={value};".encode())
        return h.hexdigest()


def observe(
    model: nn.Module | None,
    result: Any,
    generators: Iterable[torch.Generator] = (),
    *,
    gradients: Mapping[str, int | None] | None = None,
    parameters: bool = True,
) -> Observation:
    """Digest what a step left behind: its result (loss or outputs), gradients, buffers, parameters, generators.

    Args:
        model: whose tensors.
        result: what the step returned: the loss first, if it is a scalar.
        generators: others than the global ones.
        gradients: their digests by name, where they are known already.
        parameters: whether the step may change parameters.
    """
    items: dict[str, int] = {}
    for i, leaf in enumerate(_pytree.tree_leaves(result)):
        if isinstance(leaf, Tensor):
            items["loss" if i == 0 and leaf.numel() == 1 else f"outputs/{i}"] = strong_digest(leaf)
    if model is not None:
        for name, p in model.named_parameters():
            if gradients is not None:
                items[f"gradients/{name}"] = gradients.get(name) or 0
            else:
                items[f"gradients/{name}"] = 0 if p.grad is None else strong_digest(p.grad)
        for name, b in model.named_buffers():
            items[f"buffers/{name}"] = strong_digest(b)
        for name, p in model.named_parameters() if parameters else ():
            items[f"parameters/{name}"] = strong_digest(p)
    items["rng/cpu"] = strong_digest(torch.get_rng_state())
    if torch.cuda.is_available():
        for i, state in enumerate(torch.cuda.get_rng_state_all()):
            items[f"rng/cuda:{i}"] = strong_digest(state)
    items["rng/python"] = _number(repr(random.getstate()))
    items["rng/numpy"] = _number(repr([x.tolist() if isinstance(x, np.ndarray) else x for x in np.random.get_state()]))
    for i, generator in enumerate(generators):
        items[f"rng/own generator {i}"] = strong_digest(generator.get_state())
    return Observation(items)


def _number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def prove(
    *,
    run: Callable[[], Any],
    model: nn.Module | None,
    planned: Callable[[], Any],
    restore: Callable[[], None],
    num_steps: int,
    num_audited: Callable[[], int],
    progress: Callable[[str], None] | None = None,
) -> Proof:
    """Compare plain steps with planned ones from the same state.

    Args:
        run: one plain step on the model; returns loss and outputs.
        model: whose gradients, buffers and parameters are observed.
        planned: the same step under the plan, with the audit on.
        restore: puts the state before the first step back.
        num_steps: steps to run from that state, one after the other.
        num_audited: how many replays the audit compared in the last planned step.
        progress: told what happens.

    Returns:
        The proof. The state is as before when it returns.
    """
    say = progress or (lambda _: None)
    say("plain step" if num_steps == 1 else f"{num_steps} plain steps")
    first = _series(run, model, restore, num_steps)
    say("the same again: does it repeat?")
    second = _series(run, model, restore, num_steps)
    repeat_difference = _first(first, second)
    say("planned, every replay audited")
    audited = 0
    replay_difference = ""
    third: list[Observation] = []
    restore()
    try:
        for i in range(num_steps):
            _clear_gradients(model, i)
            third.append(observe(model, planned()))
            audited += num_audited()
    except MismatchError as error:
        replay_difference = str(error)
    finally:
        restore()
    repeatable = not repeat_difference
    difference = replay_difference or (repeat_difference if not repeatable else _first(first, third))
    return Proof(
        identical=None if not repeatable else not difference,
        recomputed_identical=not replay_difference,
        repeatable=repeatable,
        compared=_compared(first),
        first_difference=difference,
        num_steps=num_steps,
        num_compared=sum(len(o.items) for o in third),
        num_replays_compared=audited,
        digests=tuple(o.digest() for o in third),
    )


def proof_of_one(
    plain: Observation, planned: Observation, *, repeats: bool, repeat_difference: str, num_replays: int
) -> Proof:
    """The proof from one plain and one planned step whose replays all equal their originals.

    Args:
        plain: left behind by the plain step.
        planned: left behind by the planned one.
        repeats: whether the plain step equals itself.
        repeat_difference: what differs where it does not.
        num_replays: replayed tensors that were compared.
    """
    difference = plain.difference(planned) if repeats else repeat_difference
    return Proof(
        identical=not difference if repeats else None,
        recomputed_identical=True,
        repeatable=repeats,
        compared=_compared([plain]),
        first_difference=difference,
        num_steps=1,
        num_compared=len(planned.items),
        num_replays_compared=num_replays,
        digests=(planned.digest(),),
    )


def _compared(plain: list[Observation]) -> tuple[str, ...]:
    present = {key.partition("/")[0] for o in plain for key in o.items}
    return tuple(c for c in COMPARED if c in present)


def _series(
    run: Callable[[], Any], model: nn.Module | None, restore: Callable[[], None], num: int
) -> list[Observation]:
    restore()
    seen = []
    try:
        for i in range(num):
            _clear_gradients(model, i)
            seen.append(observe(model, run()))
    finally:
        restore()
    return seen


def _clear_gradients(model: nn.Module | None, i: int) -> None:
    if model is not None and i:
        model.zero_grad(set_to_none=True)


def _first(a: list[Observation], b: list[Observation]) -> str:
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        d = x.difference(y)
        if d:
            return f"step {i}: {d}" if len(a) > 1 else d
    return ""
