"""Checkpointing policies: which saved values are held from forward to backward, and which are rebuilt.

A policy turns a stack of blocks into segments. A segment is rebuilt as one: its kept values are held, and when backward reaches
it, the rest is made again and held until backward has passed.

`keepwise` is an estimate of what a plan of this package can do on the operator model: for one block, saved values are given up in
order of seconds a byte (what is rebuilt without a matrix product first); the lower convex hull of the resulting points is the
menu; layers take two neighbouring points of it, so that the peak just fits the budget. The real planner works on a traced step.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from keepwise._errors import UsageError
from keepwise.estimator.graph import Graph, Op

MODULES = (
    "attention", "attention.core", "attention.rotary", "attention.latent_up",
    "mlp", "mlp.activation",
    "moe", "moe.experts", "moe.experts.activation", "moe.shared", "moe.router",
    "norm", "dropout", "pointwise",
)  # fmt: skip
"""What `selective:` accepts, beside dotted paths of operators."""

_DISCARDING = ("norm", "dropout", "pointwise")
"""Parts whose results are rebuilt too, even where an operator outside saves them (as are all that end in `activation`, `rotary`
or `latent_up`); of the others only what lies inside is rebuilt, as when a module is wrapped in a checkpoint."""

SAVABLE = ("query", "key", "value", "qkv", "kernel", "output", "gate", "up", "gate_up", "down")
"""What `save:` accepts: projections by name, and the attention kernel."""

_FORMS = (
    "none, full, every:K, nth:K, first:N, sqrt, selective, selective:PART,..., sac, sac:2, save:RESULT,..., "
    "keepwise or keepwise:BYTES"
)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpointing policy."""

    kind: Literal["none", "full", "every", "sqrt", "nth", "first", "selective", "sac", "save", "keepwise"] = "none"
    """which one."""
    number: int = 1
    """layers in a segment (`every`), how many first layers are rebuilt (`first`), each how manyth layer is (`nth`), or 2 where
    only every second matrix product is kept (`sac`)."""
    modules: tuple[str, ...] = ()
    """parts of a block whose inner values are rebuilt (`selective`), or operators whose results alone are kept (`save`)."""
    budget_bytes: int | None = None
    """bytes that a `keepwise` plan may use on the device, or None for the device's own."""

    def __str__(self) -> str:
        """The text that `parse_policy` reads."""
        if self.kind in ("every", "first", "nth"):
            return f"{self.kind}:{self.number}"
        if self.kind == "sac":
            return "sac" if self.number == 1 else "sac:2"
        if self.kind in ("selective", "save"):
            return f"{self.kind}:{','.join(self.modules)}"
        return f"keepwise:{self.budget_bytes}" if self.budget_bytes else self.kind


def parse_policy(text: str) -> Policy:
    """A policy from its text.

    Raises:
        UsageError: when it is none of the forms.
    """
    from keepwise._units import parse_bytes

    text = text.strip()
    match = re.fullmatch(r"(every|first|nth):(\d+)", text)
    if match and int(match[2]) >= 1:
        return Policy(kind=match[1], number=int(match[2]))  # type: ignore[arg-type]
    if text in ("none", "full", "sqrt", "keepwise"):
        return Policy(kind=text)  # type: ignore[arg-type]
    if text in ("sac", "sac:2"):
        return Policy(kind="sac", number=2 if text.endswith("2") else 1)
    if text == "selective":
        return Policy(kind="selective", modules=("attention.core",))
    if text.startswith("selective:"):
        modules = tuple(part.strip() for part in text.removeprefix("selective:").split(",") if part.strip())
        roots = {name.split(".")[0] for name in MODULES}
        unknown = [name for name in modules if name.split(".")[0] not in roots]
        if modules and not unknown:
            return Policy(kind="selective", modules=modules)
        raise UsageError(f"selective:{','.join(unknown) or '?'} is not known; parts of a block: {', '.join(MODULES)}")
    if text.startswith("save:"):
        names = tuple(part.strip() for part in text.removeprefix("save:").split(",") if part.strip())
        unknown = [name for name in names if name not in SAVABLE]
        if names and not unknown:
            return Policy(kind="save", modules=names)
        raise UsageError(f"save:{','.join(unknown) or '?'} is not known; results of a block: {', '.join(SAVABLE)}")
    if text.startswith("keepwise:"):
        return Policy(kind="keepwise", budget_bytes=parse_bytes(text.removeprefix("keepwise:")))
    raise UsageError(f"checkpointing {text!r} is not known; one of {_FORMS}")


def belongs(op: Op, modules: tuple[str, ...]) -> bool:
    """Whether an operator lies inside one of these parts. A bare name takes all parts of that name at any depth.

    `pointwise` is everything but matrix products and attention kernels.
    """
    parts = op.module.split(".")
    for module in modules:
        if module == "pointwise" and op.kind == "pointwise":
            return True
        wanted = module.split(".")
        if any(parts[i : i + len(wanted)] == wanted for i in range(len(parts))):
            return True
        if wanted[0] == "attention" and parts[0] == "cross_attention" and parts[1 : len(wanted)] == wanted[1:]:
            return True
    return False


def selective_kept(graph: Graph, modules: tuple[str, ...]) -> frozenset[int]:
    """What of the saved values is held when these parts are rebuilt."""
    discarding = tuple(m for m in modules if m in _DISCARDING or m.endswith((".activation", ".rotary", ".latent_up")))
    wrapping = tuple(m for m in modules if m not in discarding)
    read_outside = {v for op in graph.ops if not belongs(op, wrapping) for v in op.saves}
    kept = set()
    for v in graph.saved():
        maker = graph.values[v].maker
        if maker >= 0:
            if belongs(graph.ops[maker], discarding):
                continue
            if belongs(graph.ops[maker], wrapping) and v not in read_outside:
                continue
        kept.add(v)
    return frozenset(kept)


_GROUPED = ("moe.experts.up", "moe.experts.down")
"""Grouped products of experts: not in the list of operators that is saved."""


def products_kept(graph: Graph, every: int) -> frozenset[int]:
    """Results of attention kernels and of all matrix products, or of the first, third, ... of them, whether autograd saves them or not.

    This is what PyTorch's selective checkpointing does with the usual list of operators, and torchtitan's selective mode with
    `every=2`, which leaves the router out of its counting (torchtitan 0.3, `distributed/activation_checkpoint.py`).
    """
    kept: set[int] = set()
    products = 0
    for op in graph.ops:
        if op.kind == "matmul":
            if op.name in _GROUPED or (every > 1 and op.name == "moe.router"):
                continue
            products += 1
            if (products - 1) % every:
                continue
        elif op.kind != "attention":
            continue
        kept.update(v for v in op.outputs if graph.values[v].kind in ("activation", "statistic"))
    return frozenset(kept)


def results_kept(graph: Graph, names: tuple[str, ...]) -> frozenset[int]:
    """Results of the named operators alone, as JAX's `save_only_these_names` keeps them."""
    kept: set[int] = set()
    for op in graph.ops:
        if op.kind != "pointwise" and op.name.rsplit(".", 1)[-1] in names:
            kept.update(v for v in op.outputs if graph.values[v].kind in ("activation", "statistic"))
    return frozenset(kept)


def segment_length(policy: Policy, layers: int) -> int:
    """Layers in a segment of a policy that rebuilds whole blocks."""
    if policy.kind == "sqrt":
        return max(1, round(layers**0.5))
    return policy.number if policy.kind == "every" else 1
