"""Random programs as data: a list of instructions that a module carries out.

The values of a running program are a pool of two-dimensional float tensors. An instruction takes its operands from the pool by
number (modulo what is there) and adds its results, or writes in place. So every list of instructions is a program, and
hypothesis can shorten a failing one by leaving instructions out. Some programs raise in plain autograd, because something
that was saved is overwritten later: the planned run has to raise as well.

Each entry of `OPS` stands for a kind of effect (`EFFECTS` lists them); `specs()` draws lists of them.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from . import fuzz_ops as fuzz_ops  # fills the table of instructions
from . import fuzz_wild_ops as fuzz_wild_ops
from .fuzz_forms import AROUND, FORMS, MAY_REFUSE, RARE_FORMS, abandoning, other_settings, written_outputs
from .fuzz_machine import EFFECTS, OPS, WIDTH, Instruction, Machine
from .parts import Module
from .program import Case, Program, case

__all__ = ["EFFECTS", "FORM_NAMES", "OPS", "SIZES", "SKIPPED", "Instruction", "Spec", "program_of", "specs"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A whole program."""

    blocks: tuple[tuple[Instruction, ...], ...]
    """What each block does."""
    order: tuple[int, ...]
    """Which blocks run, one after the other: a block may run twice or not at all."""
    sizes: tuple[int, ...]
    """Batch size of each step."""
    num_outputs: int
    """How many of the newest values the loss reads."""
    form: str = ""
    """How the step is taken: a name in `FORMS`, `RARE_FORMS` or `AROUND`, "written outputs", or empty: forward, loss, backward."""
    in_place: bool = False
    """Whether blocks are joined by writing into what the last one made."""
    skipped: tuple[int, ...] = ()
    """For each step the place in `order` that is left out; beyond its end: none."""
    abandoned: bool = False
    """Whether a forward without backward comes before each step."""
    from_args: bool = False
    """Whether the plan is made from arguments, although the step is the user's own."""
    alone: bool = False
    """Whether such a step is not taken inside `with plan:`: only the model's forward is watched."""
    mixed: bool = False
    """Whether the second block that runs does so under other settings of the process."""

    def __str__(self) -> str:
        lines = [
            f"    {n}: " + ", ".join(f"{i.op}({i.a}, {i.b}, {i.k}{f', when {i.when}' * bool(i.when)})" for i in b)
            for n, b in enumerate(self.blocks)
        ]
        return "\n".join(
            [
                f"order {self.order}, sizes {self.sizes}, outputs {self.num_outputs}, form {self.form!r}, "
                f"in place {self.in_place}, skipped {self.skipped}, abandoned {self.abandoned}, "
                f"from args {self.from_args}, alone {self.alone}, mixed {self.mixed}",
                *lines,
                repr(self),
            ]
        )


class Net(Module):
    """Blocks in some order, sharing weights where one runs twice."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Machine(lines) for lines in spec.blocks])
        self.order, self.num_outputs = spec.order, spec.num_outputs
        self.in_place, self.skipped, self.now = spec.in_place, spec.skipped, 0
        self.mixed = spec.mixed
        self.seen: list[Any] = []
        """What modes saw in this step."""
        self.grown = self.alive = 0
        self.held: list[int] = []

    def forward(self, x: torch.Tensor) -> Any:
        x = self.inp(x)
        pool = [x]
        for place, k in enumerate(self.order):
            if self.now < len(self.skipped) and place == self.skipped[self.now]:
                continue
            with other_settings() if self.mixed and place == 1 else contextlib.nullcontext():
                pool = self.blocks[k](x)
            whole = next((t for t in reversed(pool) if t.shape[-1] == WIDTH), x)
            whole = whole.mean(0) if whole.shape != x.shape else whole
            if self.in_place and whole.is_contiguous() and whole.shape == x.shape and whole is not x:
                whole += x
                x = whole
            else:
                x = x * 0.5 + whole
        return (x, *pool[-self.num_outputs :])


SIZES = ((4, 4, 4), (3, 3, 5), (4, 2, 4), (5, 5, 1))
SKIPPED: tuple[tuple[int, ...], ...] = ((), (), (9, 0, 9), (0, 9, 1))
HELD_BYTES = 512
"""What a planned step may hold more than a plain one when its last gradient is made: some tensors of the node that is running."""
FORM_NAMES = (*FORMS, *AROUND, "written outputs")


def instructions() -> st.SearchStrategy[Instruction]:
    """One instruction of any effect."""
    small = st.integers(0, 7)
    name = st.sampled_from(sorted(EFFECTS)).flatmap(lambda effect: st.sampled_from(EFFECTS[effect]))
    return st.builds(Instruction, name, small, small, small, st.sampled_from((0, 0, 0, 0, 0, 1, 2, 3)))


@st.composite
def specs(draw: st.DrawFn, most_lines: int = 8) -> Spec:
    """Programs of one to three blocks that run in any order."""
    blocks = draw(st.lists(st.lists(instructions(), min_size=2, max_size=most_lines), min_size=1, max_size=3))
    order = draw(st.lists(st.integers(0, len(blocks) - 1), min_size=1, max_size=4))
    sizes = draw(st.sampled_from(SIZES))
    form = draw(st.sampled_from([*[""] * len(FORM_NAMES), *FORM_NAMES]))
    skipped = draw(st.sampled_from(SKIPPED))
    in_place = draw(st.integers(0, 3)) == 3
    outputs, abandoned, from_args = draw(st.integers(1, 4)), draw(st.integers(0, 4)) == 4, draw(st.booleans())
    alone, mixed = draw(st.booleans()), draw(st.integers(0, 4)) == 4
    return Spec(
        tuple(map(tuple, blocks)),
        tuple(order),
        sizes,
        outputs,
        form,
        in_place,
        skipped,
        abandoned,
        from_args,
        alone,
        mixed,
    )


def _inputs(spec: Spec, i: int, built: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(spec.sizes[i], WIDTH, generator=torch.Generator().manual_seed(i))
    return (x.requires_grad_(),), {}


def _next_step(model: Any, i: int) -> None:
    model.now = i
    for block in model.blocks:
        block.now = i


def _observed(model: Any) -> dict[str, Any]:
    return {
        "generators": [block.gen.get_state() for block in model.blocks],
        "seen": [dict(seen) for seen in model.seen],
        "grown": model.grown,
        "alive": model.alive,
        "held": max((0, *model.held)),
    }


def _loss(out: Any) -> torch.Tensor:
    return torch.stack([t.sin().mean() for t in out if t.numel()]).sum()


def program_of(spec: Spec) -> Program:
    """The program that carries out a specification."""

    def build() -> Case:
        x = torch.randn(spec.sizes[0], WIDTH, generator=torch.Generator().manual_seed(0))
        loss = written_outputs(_loss) if spec.form == "written outputs" else _loss
        return case(Net(spec).train(), x.requires_grad_(), loss=loss)

    step = (FORMS | RARE_FORMS).get(spec.form)
    if spec.abandoned and spec.form not in AROUND:
        step = abandoning(step)
    return Program(
        name="random",
        kind="fuzz",
        build=build,
        why="hypothesis made it",
        inputs=functools.partial(_inputs, spec),
        step=step,
        from_args=spec.from_args,
        alone=spec.alone and spec.from_args,
        around=AROUND.get(spec.form, contextlib.nullcontext),
        between=_next_step,
        observe=_observed,
        restored=frozenset({"generators"}),
        at_most=frozenset({"grown", "alive", "held"}),
        slack={"held": HELD_BYTES},
        may_refuse=spec.form in MAY_REFUSE,
        plain_raises=RuntimeError,
        may_drop_nothing=True,
        not_finite=True,
    )
