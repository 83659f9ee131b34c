"""The checkpointing that comes with PyTorch, applied as its authors show it: what Keepwise is compared with.

| policy | what it does |
|---|---|
| `none` | nothing |
| `full` | `torch.utils.checkpoint` around every block |
| `every2` | around every second block, the first one included |
| `selective` | around every block, with the results of matrix products, convolutions and attention kept (alias `sac`) |
| `selective2` | the same, with every second matrix product or convolution recomputed (alias `sac2`) |
| `compile` | `torch.compile` of the whole model, its partitioner at its default |
| `compile:0.5` | the same with `activation_memory_budget` 0.5 |

All are non-reentrant (`use_reentrant=False`) with the default settings: random states are restored for the second run.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from keepwise._errors import UsageError

POLICIES = ("none", "full", "every2", "selective", "selective2", "compile")
_ALIASES = {"sac": "selective", "sac2": "selective2"}
_MARKER = "GradientCheckpointingLayer"
"""Base class of what `transformers` checkpoints; known by its name, so that the package need not be there."""

PolicyFunction = Callable[..., CheckpointPolicy]


def _overloads(*names: str) -> frozenset[Any]:
    """The default overloads of those aten ops that this version of torch has."""
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(op.default for op in found if op is not None)


PRODUCTS = _overloads("mm", "addmm", "bmm", "baddbmm", "convolution")
ATTENTION = _overloads(
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)


@contextlib.contextmanager
def apply_stock(model: nn.Module, policy: str, *, blocks: Sequence[str] = ()) -> Iterator[nn.Module]:
    """Put `policy` on `model` while the context is open; afterwards the model is as before.

    Args:
        model: changed in place: the blocks get another `forward`, names and parameters stay.
        policy: one of `POLICIES`, or `compile:` and a number from 0 to 1.
        blocks: module paths in the order in which they run; without them, see `find_blocks`.

    Raises:
        UsageError: no such policy, no such block, or no blocks are given and none are found.
    """
    name, _, setting = policy.partition(":")
    name = _ALIASES.get(name, name)
    if name not in POLICIES or (setting and name != "compile"):
        raise UsageError(f"no stock policy is called {policy!r}: there are {', '.join(POLICIES)} and compile:0.5")
    if name == "none":
        yield model
    elif name == "compile":
        with _compiled(model, setting):
            yield model
    else:
        with contextlib.ExitStack() as stack:
            for path in _chosen(name, tuple(blocks) or find_blocks(model)):
                stack.enter_context(_checkpointed(_module(model, path), _context_function(name)))
            yield model


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Paths of the blocks that a user would wrap.

    In models of `transformers`: the layers that its own gradient checkpointing wraps. Else: of all classes that stand at least
    twice in an `nn.ModuleList` or `nn.Sequential`, the one with the most parameters; of its modules, the outermost.

    Raises:
        UsageError: no class stands twice in a list.
    """
    marked = [
        path for path, module in model.named_modules() if any(c.__name__ == _MARKER for c in type(module).__mro__)
    ]
    if marked:
        return tuple(marked)
    groups: dict[type[nn.Module], list[str]] = {}
    weights: Counter[type[nn.Module]] = Counter()
    for path, parent in model.named_modules():
        if not isinstance(parent, nn.ModuleList | nn.Sequential):
            continue
        for name, child in parent.named_children():
            full = f"{path}.{name}" if path else name
            outermost = groups.setdefault(type(child), [])
            if not any(full.startswith(outer + ".") for outer in outermost):
                outermost.append(full)
                weights[type(child)] += sum(p.numel() for p in child.parameters())
    repeated = [kind for kind, paths in groups.items() if len(paths) > 1 and weights[kind]]
    if not repeated:
        raise UsageError(
            f"{type(model).__name__} has no repeated blocks in an nn.ModuleList or nn.Sequential: name the modules to "
            "checkpoint (blocks=), or compare with the policy 'none' only"
        )
    return tuple(groups[max(repeated, key=lambda kind: weights[kind])])


def _module(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError as error:
        raise UsageError(f"{type(model).__name__} has no module {path!r} to checkpoint") from error


def _chosen(policy: str, blocks: tuple[str, ...]) -> tuple[str, ...]:
    return blocks[::2] if policy == "every2" else blocks


@contextlib.contextmanager
def _checkpointed(module: nn.Module, context_function: Callable[[], Any] | None) -> Iterator[None]:
    """`module` with a `forward` that checkpoints; one of the instance's own is put back afterwards."""
    own = vars(module).get("forward")
    options = {} if context_function is None else {"context_fn": context_function}
    module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False, **options)
    try:
        yield
    finally:
        del module.forward
        if own is not None:
            module.forward = own


def _context_function(policy: str) -> Callable[[], Any] | None:
    if policy == "selective":
        return functools.partial(create_selective_checkpoint_contexts, _keep_products)
    if policy == "selective2":
        # Each call of a block counts its products from the start, in forward and again in the second run.
        return lambda: create_selective_checkpoint_contexts(_keep_every_second())
    return None


def _keep_products(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS or op in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_every_second() -> PolicyFunction:
    seen: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        keep = op in ATTENTION
        if op in PRODUCTS:
            seen[context.is_recompute] += 1
            keep = seen[context.is_recompute] % 2 == 1
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@contextlib.contextmanager
def _compiled(model: nn.Module, setting: str) -> Iterator[None]:
    import torch._functorch.config as functorch

    try:
        share = float(setting) if setting else functorch.activation_memory_budget
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"compile:{setting}: the activation memory budget is a number from 0 to 1")

    def backend(graph: Any, inputs: Any) -> Any:
        """Inductor at this share. One function for each setting: equal backends share compiled code, also between models."""
        from torch._inductor.compile_fx import compile_fx

        with functorch.patch(activation_memory_budget=share):
            return compile_fx(graph, inputs)

    model.compile(backend=backend)
    try:
        yield
    finally:
        model._compiled_call_impl = None
