"""`checkpoint` and `checkpoint_sequential`: drop-ins for `torch.utils.checkpoint` that never run user code twice.

The ops of the region are captured as they run; backward replays those of them that its saved tensors need, from the region's
inputs. Hooks, counters, buffers and random draws happen once; Batch normalisation statistics move once; a region may
use any generator. `region` holds the mechanism.

Under a dispatch mode of the user's, which may change what ops return, the function runs as it is: a replay could not know.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from keepwise._errors import UsageError
from keepwise.runtime.region import Region
from keepwise.runtime.watch import can_watch, foreign_modes


def checkpoint(
    function: Callable[..., Any] | None = None,
    /,
    *args: Any,
    use_reentrant: bool | None = None,
    context_fn: Callable[[], tuple[Any, Any]] | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    early_stop: bool = True,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """Run `function(*args, **kwargs)` without keeping what it saves for backward; backward replays the recorded ops.

    The arguments are those of `torch.utils.checkpoint.checkpoint`. Without a function it returns a decorator:
    `@keepwise.checkpoint()`.

    Args:
        function: what to run; any arguments and results.
        *args: passed on.
        use_reentrant: accepted for both values; there is one mechanism here, and it needs no input that requires grad.
        context_fn: contexts of `create_selective_checkpoint_contexts`: their policy decides what is kept. Other contexts: the first
            is entered around the call, the second is never needed because no user code runs again.
        determinism_check: `"default"` or `"none"`; replays repeat recorded ops, so shapes and order cannot differ.
        debug: accepted; errors name the op and its arguments in any case.
        early_stop: accepted; a replay always ends with the last op that is needed.
        preserve_rng_state: random draws are always those of forward. False changes nothing.
        **kwargs: passed on.

    Returns:
        What `function` returns, unchanged in type and structure.

    Raises:
        UsageError: an argument is not of its form.
    """
    if determinism_check not in ("default", "none"):
        raise UsageError(f"determinism_check must be 'default' or 'none', got {determinism_check!r}")
    if use_reentrant:
        warnings.warn("keepwise.checkpoint has one mechanism; use_reentrant=True changes nothing", stacklevel=2)
    options: dict[str, Any] = {"context_fn": context_fn}
    if function is None:
        if args:
            raise UsageError(
                "keepwise.checkpoint() without a function is a decorator and takes no positional arguments"
            )

        def decorate(f: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(f)
            def call(*a: Any, **k: Any) -> Any:
                return _run(f, a, k, **options)

            return call

        return decorate
    if not callable(function):
        raise UsageError(f"keepwise.checkpoint needs a callable, got {type(function).__name__}")
    return _run(function, args, kwargs, **options)


def _run(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    context_fn: Callable[[], tuple[Any, Any]] | None,
) -> Any:
    if not can_watch() or foreign_modes():
        return function(*args, **kwargs)
    policy, context = None, None
    if context_fn is not None:
        context = context_fn()[0]
        asked = getattr(context, "policy_fn", None)
        if asked is not None:
            policy, context = _policy(asked), None
    name = getattr(function, "__qualname__", type(function).__name__)
    with Region(name, policy):
        if context is None:
            return function(*args, **kwargs)
        with context:
            return function(*args, **kwargs)


def _policy(asked: Any) -> Callable[..., bool]:
    """A selective policy as a yes or no: whether the op's results are kept."""
    from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

    try:
        context = SelectiveCheckpointContext(is_recompute=False)
    except TypeError:  # the signature grew an argument in later releases
        context = SelectiveCheckpointContext(is_recompute=False, op_output=None)  # type: ignore[call-arg]

    def keeps(func: Any, *args: Any, **kwargs: Any) -> bool:
        answer = asked(context, func, *args, **kwargs)
        if isinstance(answer, bool):
            return answer
        return answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)

    return keeps


def checkpoint_sequential(
    functions: nn.Sequential | Sequence[Callable[..., Any]],
    segments: int,
    input: Any,
    use_reentrant: bool | None = None,
    **kwargs: Any,
) -> Any:
    """Run a list of functions one after the other in `segments` checkpointed segments, the last one left alone.

    Args:
        functions: an `nn.Sequential` or a sequence of callables of one argument.
        segments: number of segments, at least 1.
        input: argument of the first function.
        use_reentrant: as in `checkpoint`.
        **kwargs: `preserve_rng_state` and the other options of `checkpoint`.

    Raises:
        UsageError: fewer than one segment, or an unknown option.
    """
    unknown = set(kwargs) - {"preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
    if unknown:
        raise UsageError(f"checkpoint_sequential has no option {', '.join(sorted(unknown))}")
    steps = list(functions.children()) if isinstance(functions, nn.Sequential) else list(functions)
    if segments < 1:
        raise UsageError(f"segments must be at least 1, got {segments}")
    segments = min(segments, max(len(steps), 1))
    size = len(steps) // segments

    def chain(first: int, last: int) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            for step in steps[first:last]:
                x = step(x)
            return x

        return forward

    x = input
    at = 0
    for _ in range(segments - 1):
        x = checkpoint(chain(at, at + size), x, use_reentrant=use_reentrant, **kwargs)
        at += size
    return chain(at, len(steps))(x)


__all__ = ["checkpoint", "checkpoint_sequential"]
