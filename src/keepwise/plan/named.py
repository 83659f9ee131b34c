"""The planners that have a name: fixed policies that do not look at the budget, `auto`, which does, and registered ones.

| name | kept | replayed |
|---|---|---|
| `auto` | what fits at the least time: see `auto.py` | |
| `none` | everything | nothing |
| `full` | the input of every block | each block once, except the last |
| `every:k` | the input of every k-th block, the others whole | every k-th block, except the last |
| `sqrt` | the input of every sqrt(n)-th block | groups of sqrt(n) blocks, except the last (Chen et al. 2016) |
| `recursive` | log2(n) inputs | halves of halves, in nested windows |
| `selective` | inputs of blocks, results of matrix products, convolutions and attention | the rest |
| `boundaries:path,...` | the inputs of the named modules | what lies between them, except the last |
| `recompute_everything` | only what has no recipe | everything, down to the leaves: a stress plan |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from keepwise._errors import UsageError
from keepwise.ir import Phase, Schedule, Step
from keepwise.plan.boundaries import Segment, find_blocks, stretches
from keepwise.plan.build import build
from keepwise.plan.planner import Planner
from keepwise.plan.recursive import plan_recursive
from keepwise.plan.registry import registered_planners
from keepwise.plan.segments import blocks_and_rest, groups_of, hold_everything, joined, plan_groups, span_of

# Overload packets whose results `selective` keeps: what costs time on any device.
_HEAVY = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "convolution", "conv1d", "conv2d", "conv3d", "einsum")
_HEAVY_PREFIXES = (
    "_scaled_dot_product",
    "scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "_scaled_mm",
)

# `recompute_everything` replays from the leaves in every window: its time grows with the square of their number.
_STRESS_WINDOWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPlanner:
    """A fixed policy."""

    name: str
    make: Callable[[Step], Schedule]

    def plan(self, step: Step, budget_bytes: int | None = None) -> Schedule:
        """The policy's schedule, whatever the budget."""
        del budget_bytes
        return self.make(step)


def get_planner(name: str) -> Planner:
    """The planner of that name (`NAMES` lists the forms; `register_planner` adds others).

    Raises:
        UsageError: no such planner, or its argument is no number or path.
    """
    head, _, argument = name.partition(":")
    if not argument and head in _PLAIN:
        return NamedPlanner(name=name, make=_PLAIN[head])
    if head == "every" and argument.isdecimal() and int(argument) > 0:
        return NamedPlanner(name=name, make=lambda step: _every(step, int(argument), name))
    if head == "boundaries" and argument:
        paths = tuple(p.strip() for p in argument.split(",") if p.strip())
        return NamedPlanner(name=name, make=lambda step: _boundaries(step, paths, name))
    if name == "auto":
        from keepwise.plan.auto import AutoPlanner  # it builds on this module

        return AutoPlanner()
    own = registered_planners()
    if name in own:
        return own[name]
    raise UsageError(f"no planner is called {name!r}; there are {', '.join((*NAMES, *own))}")


def _none(step: Step) -> Schedule:
    return hold_everything(step, planner="none", why="everything is kept, as in the plain step")


def _full(step: Step) -> Schedule:
    blocks, alone = blocks_and_rest(step)
    return plan_groups(step, groups_of(blocks, alone), planner="full", why=f"inputs of {len(blocks)} blocks are kept")


def _every(step: Step, k: int, name: str) -> Schedule:
    blocks, alone = blocks_and_rest(step)
    groups = groups_of(blocks, alone, lambda i: i % k == k - 1)
    return plan_groups(step, groups, planner=name, why=f"every block of {k} is replayed from its input")


def _sqrt(step: Step) -> Schedule:
    blocks, alone = blocks_and_rest(step)
    size = max(1, round(math.sqrt(len(blocks))))
    last = max(0, min(alone, len(blocks) - size))
    groups = joined(blocks, [*range(0, last, size), last]) + joined(blocks, [last, len(blocks)], replay=False)
    return plan_groups(step, groups, planner="sqrt", why=f"inputs of groups of {size} blocks are kept")


def _recursive(step: Step) -> Schedule:
    blocks, alone = blocks_and_rest(step)
    why = f"{len(blocks)} blocks are halved again and again"
    return plan_recursive(step, groups_of(blocks, alone), planner="recursive", why=why)


def _selective(step: Step) -> Schedule:
    blocks, alone = blocks_and_rest(step)
    heavy = {s.id for s in step.storages if s.birth >= 0 and is_heavy(step.ops[s.birth].target)}
    why = "inputs of blocks and results of matrix products, convolutions and attention are kept"
    return plan_groups(step, groups_of(blocks, alone), also_held=heavy, planner="selective", why=why)


def is_heavy(target: str) -> bool:
    """Whether an op is a matrix product, a convolution or an attention."""
    packet = target.split(".")[1] if "." in target else target
    return packet in _HEAVY or packet.startswith(_HEAVY_PREFIXES)


def _boundaries(step: Step, paths: tuple[str, ...], name: str) -> Schedule:
    cuts = _module_starts(step, paths)
    forward = [op.index for op in step.ops if op.phase == Phase.FORWARD]
    edges = [*sorted({forward[0], *cuts}), forward[-1] + 1]
    segments = [Segment(start=a, stop=b) for a, b in itertools.pairwise(edges)]
    return plan_groups(step, groups_of(segments, len(segments) - 1), planner=name, why=f"inputs of {len(cuts)} modules")


def _module_starts(step: Step, paths: tuple[str, ...]) -> list[int]:
    """First op of every call of a module whose path matches one of the patterns (`h.*` matches one level)."""
    found: list[int] = []
    missing = set(paths)
    inside = ""
    for op in step.ops:
        if op.phase != Phase.FORWARD:
            continue
        instance = ""
        for pattern in paths:
            prefix = ".".join(op.path.split(".")[: pattern.count(".") + 1])
            if op.path and fnmatchcase(prefix, pattern) and prefix.count(".") == pattern.count("."):
                instance = prefix
                missing.discard(pattern)
        if instance and instance != inside:
            found.append(op.index)
        inside = instance
    if missing:
        raise UsageError(f"no module of the step has the path {', '.join(sorted(missing))}")
    return found


def boundary_names(step: Step, most: int) -> list[str]:
    """Planners `boundaries:...` worth a try: one for the modules of each kind (`h.*.mlp`), then some for single modules.

    Args:
        step: the step.
        most: as many at most of either sort, evenly spread.
    """
    paths = dict.fromkeys(op.path for op in step.ops if op.path and op.phase == Phase.FORWARD)
    prefixes = dict.fromkeys(".".join(p.split(".")[:n]) for p in paths for n in range(1, p.count(".") + 2))
    kinds = dict.fromkeys(".".join("*" if part.isdecimal() else part for part in p.split(".")) for p in prefixes)
    singles = [p for p in prefixes if any(part.isdecimal() for part in p.split("."))]
    return ["boundaries:" + p for sort in (list(kinds), singles) for p in sort[:: -(-len(sort) // most) or 1]]


def _recompute_everything(step: Step) -> Schedule:
    blocks = find_blocks(step)
    n = min(len(blocks), _STRESS_WINDOWS)
    edges = [round(i * len(blocks) / n) for i in range(n + 1)] if n else []
    parts = stretches(step, [g.start for g in joined(blocks, edges)])
    spans = [replace(span_of(step, part), copy_before=0) for part in parts]
    return build(step, held=(), spans=spans, planner="recompute_everything", why="only what has no recipe is kept")


NAMES = (
    "auto",
    "none",
    "full",
    "every:k",
    "sqrt",
    "recursive",
    "selective",
    "boundaries:path,path,...",
    "recompute_everything",
)

_PLAIN: dict[str, Callable[[Step], Schedule]] = {
    "none": _none,
    "full": _full,
    "sqrt": _sqrt,
    "recursive": _recursive,
    "selective": _selective,
    "recompute_everything": _recompute_everything,
}
