"""What fits: the largest batch, the longest context, the cheapest setting."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec.structs import replace

from keepwise.estimator.answer import Estimate
from keepwise.estimator.compute import Estimator
from keepwise.estimator.policy import Policy, parse_policy
from keepwise.estimator.setup import Setup
from keepwise.estimator.traffic import AGAIN

_MOST_BATCH = 1 << 16
_MOST_TOKENS = 1 << 24
_POLICIES = ("none", "keepwise", "selective:pointwise", "sac", "sac:2", "every:2", "full")
_UNFUSED = ("none", "keepwise", "selective", "selective:pointwise", "sac", "sac:2", "every:2", "full")


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One setting and what it costs."""

    changes: tuple[str, ...]
    """what differs from the setup that was asked for; nothing where that one is meant."""
    peak_bytes: int
    """bytes on the fullest rank."""
    step_seconds: float
    """seconds a step by the roofline."""
    time_overhead: float
    """seconds that recomputation adds, as a share of a step without it."""
    recompute_overhead: float
    """operations that run again, as a share of a step without recomputation."""
    sent_bytes: float
    """bytes that one device sends a step, to other devices and to the host and back."""
    sent_again_bytes: float
    """of them, those of collectives that recomputation repeats."""
    fits: bool
    """whether the peak is at or under the bytes asked for."""


def largest(peak: Callable[[int], int], budget: int, most: int, step: int = 1) -> int:
    """The largest multiple of `step` up to `most` whose peak is at most `budget`, 0 if none is; peaks grow with the number.

    First upwards along the line through the last two peaks, at most eightfold at a time; then inside the bracket by interpolation,
    and by halving wherever interpolation did not halve it.
    """
    count = most // step
    known: dict[int, int] = {}

    def over(number: int) -> bool:
        known[number] = peak(number * step)
        return known[number] > budget

    low, high = 0, 1
    while not over(high):
        if high >= count:
            return count * step
        slope = (known[high] - known[low]) / (high - low) if low in known else 0.0
        ahead = int((budget - known[high]) / slope) if slope > 0 else high
        low, high = high, min(count, high + max(1, min(ahead + 1, 7 * high)))
    halve = False
    while high - low > 1:
        width = high - low
        guess = (low + high) // 2
        if not halve and low in known:
            share = (budget - known[low]) / (known[high] - known[low])
            guess = min(max(low + int(share * width), low + 1), high - 1)
        if over(guess):
            high = guess
        else:
            low = guess
        halve = high - low > width // 2
    return low * step


def largest_batch(estimator: Estimator, setup: Setup, budget: int) -> int:
    """Most sequences in a micro-batch that fit `budget` bytes; 0 if one does not."""
    return _search(lambda n: replace(setup, batch=n), estimator, budget, _MOST_BATCH, 1)


def longest_sequence(estimator: Estimator, setup: Setup, budget: int, step: int = 128) -> int | None:
    """Longest sequence (a multiple of `step`) that fits `budget` bytes; 0 if none does, None where the model fixes its length."""
    if all(stack.length == "fixed" for stack in estimator.architecture.stacks):
        return None
    step *= setup.context_parallel
    return _search(lambda n: replace(setup, sequence=n), estimator, budget, _MOST_TOKENS, step)


def _search(change: Callable[[int], Setup], estimator: Estimator, budget: int, most: int, step: int) -> int:
    peaks: dict[int, int] = {}

    def peak(number: int) -> int:
        if number not in peaks:
            peaks[number] = estimator.run(_floor(change(number))).peak_bytes
        return peaks[number]

    return largest(peak, budget, most, step)


def _floor(setup: Setup) -> Setup:
    """What a `keepwise` policy can fit at most is what holding only each block's input fits."""
    if setup.checkpointing.kind == "keepwise":
        return replace(setup, checkpointing=Policy(kind="full"))
    return setup


def _planned(setup: Setup, budget: int) -> Setup:
    """A `keepwise` policy without its own budget plans for the budget in question."""
    if setup.checkpointing.kind == "keepwise" and setup.checkpointing.budget_bytes is None:
        return replace(setup, checkpointing=Policy(kind="keepwise", budget_bytes=budget))
    return setup


def _names(setup: Setup) -> tuple[str, ...]:
    """Rebuilding the core attention alone is worth a line where its matrix is stored."""
    return _UNFUSED if setup.attention == "eager" else _POLICIES


def policies(estimator: Estimator, setup: Setup, budget: int) -> list[Choice]:
    """The usual checkpointing policies beside each other, everything else as asked for."""
    return [
        _choice(
            (f"checkpointing {name}",),
            estimator.run(_planned(replace(setup, checkpointing=parse_policy(name)), budget)),
            budget,
        )
        for name in _names(setup)
    ]


def cheapest(estimator: Estimator, setup: Setup, budget: int) -> Choice | None:
    """The fastest setting that fits and computes the same numbers; None where none does.

    Tried in rounds, each only if nothing before it fits: checkpointing; a chunked loss; sequence parallelism, sharding over the
    replicas that exist; offload of activations, of the optimizer, of both; smaller micro-batches with more accumulation.
    """
    rounds: list[list[tuple[tuple[str, ...], Setup]]] = [[((), setup)]]
    if setup.loss == "eager":
        rounds.append([(("chunked loss",), replace(setup, loss="chunked"))])
    sharded = _sharded(setup)
    if sharded is not None:
        rounds.append([sharded])
    base_changes, base = sharded or ((), setup)
    base = replace(base, loss="chunked") if base.loss == "eager" else base
    for names in (("activations",), ("optimizer",), ("activations", "optimizer")):
        if not set(names) <= setup.offload:
            offloaded = replace(base, offload=setup.offload | frozenset(names))
            rounds.append([((*base_changes, "chunked loss", f"offload of {' and '.join(names)}"), offloaded)])
    if setup.batch > 1:
        halves = replace(base, batch=1, accumulation=setup.accumulation * setup.batch)
        rounds.append([((*base_changes, "chunked loss", f"batch 1, accumulation {halves.accumulation}"), halves)])
    for candidates in rounds:
        best: Choice | None = None
        for changes, candidate in candidates:
            for name in _names(candidate):
                asked = _planned(replace(candidate, checkpointing=parse_policy(name)), budget)
                found = _choice((f"checkpointing {name}", *changes), estimator.run(asked), budget)
                if found.fits and (best is None or found.step_seconds < best.step_seconds):
                    best = found
        if best is not None:
            return best
    return None


def _sharded(setup: Setup) -> tuple[tuple[str, ...], Setup] | None:
    changes: list[str] = []
    changed = setup
    if setup.tensor_parallel > 1 and not setup.sequence_parallel:
        changes.append("sequence parallelism")
        changed = replace(changed, sequence_parallel=True)
    if setup.shards > 1 and setup.zero < 3:
        changes.append("zero 3")
        changed = replace(changed, zero=3)
    return (tuple(changes), changed) if changes else None


def _choice(changes: tuple[str, ...], answer: Estimate, budget: int) -> Choice:
    return Choice(
        changes=changes,
        peak_bytes=answer.peak_bytes,
        step_seconds=answer.step_seconds,
        time_overhead=answer.time_overhead,
        recompute_overhead=answer.recompute_overhead,
        sent_bytes=sum(t.num_bytes for t in answer.traffic),
        sent_again_bytes=sum(t.num_bytes for t in answer.traffic if t.reason.endswith(AGAIN)),
        fits=answer.peak_bytes <= budget,
    )
