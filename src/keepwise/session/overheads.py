"""What a planned step costs and gains besides its replays.

Notes:
1. Memory that is touched for the first time is slow. On the CPU the allocator gives large memory back to the system and asks for it again,
   page by page (with the settings of glibc that most processes have: above 32 MiB always, below it depends on what was freed before).
   A plan writes results into dead memory instead. What that saves is measured here and now, at the size that matters.
   Only forward counts: what replays save of it is in their measured times.
2. What is dropped is given back to the system in forward, and once more after its replay.
3. The guard and the hooks take some 20 us an op while their code and data are in the processor's caches, and three times that where
   each op pushes them out, as large ones do. On a device that works for itself they are hidden behind it.
4. An op's price was taken with its arguments in the caches and new memory for its result; in a replay it is the other way round, and
   captured calls are not free. By how much the replays took longer than their ops alone is seen in the step that proves the plan.
   That step is one sample, and other work on the machine slows some of its replays: of windows that do the same, as those of equal
   blocks do, the middle one counts.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from keepwise.ir import Phase, Schedule, Step, spare
from keepwise.runtime.calls import resolve
from keepwise.runtime.guard import Guard
from keepwise.runtime.program import compile_program
from keepwise.runtime.reuse import out_form
from keepwise.runtime.stats import StepStats
from keepwise.simulate import Timeline, recycled_bytes, spare_of
from keepwise.trace import record
from keepwise.trace.quiet import quiet

ROUNDS = 7
CHAIN = 40
"""Pairs of ops in the chain that watching is timed on."""
CHAIN_NUMEL = 1 << 12
"""Elements of its tensors."""
MOST_BYTES = 32 << 20
MOST_EVICTED_BYTES = 4 << 20
"""More than a core's own caches hold."""


class MemorySeconds(NamedTuple):
    """What an allocation costs, in seconds a byte."""

    touched: float
    """By how much writing into new memory takes longer than into old one."""
    returned: float
    """Letting go of it."""


class Overheads(NamedTuple):
    """What a plan costs and gains besides its replays, in seconds a step, predicted."""

    saved_seconds: float = 0.0
    """Gained, because results are written into dead memory (note 1)."""
    overhead_seconds: float = 0.0
    """Lost, to memory that is given back twice, the guard and the hooks (notes 2 and 3), before a replay was seen."""

    def added(self, replay_seconds: float) -> float:
        """Seconds that a plan with these replays adds to a step; it is not believed to take less than the plain one."""
        return max(replay_seconds + self.overhead_seconds - self.saved_seconds, 0.0)


def overheads_of(timeline: Timeline, memory: MemorySeconds | None = None) -> Overheads:
    """Predict them; nothing where no plan drops anything, or where a device works for itself.

    Args:
        timeline: the simulated plan.
        memory: what new memory costs (`memory_price_of`); None: it is measured now.
    """
    step, schedule = timeline.step, timeline.schedule
    if schedule is None or not schedule.windows or torch.device(step.device).type != "cpu":
        return Overheads()
    memory = memory if memory is not None else memory_price_of(step)
    used_again = recycled_bytes(timeline, spare_of(timeline), _writes_into)
    sizes = [step.storages[s].nbytes for w in schedule.windows for s in w.retain]
    returned = sum(n for n in sizes if n >= spare.MIN_BYTES)
    num_ops = sum(op.phase == Phase.FORWARD for op in step.ops)
    return Overheads(
        saved_seconds=used_again * sum(memory),
        overhead_seconds=num_ops * watching_seconds(evicted_bytes(step)) + returned * memory.returned,
    )


def memory_price_of(step: Step) -> MemorySeconds:
    """What an allocation costs here and now, of the size that matters in a step."""
    return memory_seconds(_typical_bytes(step))


def _writes_into(target: str) -> bool:
    return out_form(resolve(target)) is not None


def _typical_bytes(step: Step) -> int:
    """Size of the storage in which the middle byte of all that autograd saves lies."""
    sizes = sorted(n for s in step.saved_storages if (n := step.storages[s].nbytes) >= spare.MIN_BYTES)
    half, total = sum(sizes) / 2, 0
    for n in sizes:
        total += n
        if total >= half:
            return n
    return spare.MIN_BYTES


def memory_seconds(nbytes: int) -> MemorySeconds:
    """What an allocation of that size costs here and now; medians."""
    nbytes = max(min(nbytes, MOST_BYTES), 1)

    def fill(t: torch.Tensor) -> float:
        began = time.perf_counter()
        t.fill_(0)
        return time.perf_counter() - began

    new, old, gone = [], [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            t = torch.empty(nbytes, dtype=torch.uint8)
            fill(t)
            new.append(time.perf_counter() - began)
            old.append(fill(t))
            began = time.perf_counter()
            del t
            gone.append(time.perf_counter() - began)
    touched = max(statistics.median(new) - statistics.median(old), 0.0)
    return MemorySeconds(touched / nbytes, statistics.median(gone) / nbytes)


def evicted_bytes(step: Step) -> int:
    """How much an op of the step pushes out of a core's caches, roughly: a power of two."""
    return 1 << min(_typical_bytes(step), MOST_EVICTED_BYTES).bit_length() - 1


@functools.cache
def watching_seconds(evicted: int) -> float:
    """What watching adds to an op of forward, with the tensors that it saves and their way back in backward; measured once.

    On a chain of ops, three saved tensors for two ops; the median over a few pairs of steps.

    Args:
        evicted: bytes that are moved after each op, in both steps of a pair (note 3).
    """
    moved = memoryview(bytearray(2 * evicted))
    to, source = moved[:evicted], moved[evicted:]

    def chain() -> torch.Tensor:
        x = w
        for _ in range(CHAIN):
            x = x * w
            to[:] = source
            x = torch.tanh(x)
            to[:] = source
        return x.sum()

    def seconds(forward: Callable[[], torch.Tensor]) -> float:
        began = time.perf_counter()
        forward().backward()
        return time.perf_counter() - began

    def watched() -> torch.Tensor:
        with Guard(program, StepStats(), None) as guard:
            guard.recycler = None
            return chain()

    with quiet(), torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        w = torch.ones(CHAIN_NUMEL, dtype=torch.float32, device="cpu", requires_grad=True)
        step = record(lambda: chain().backward(), model=None, inputs=(w,), spill=False, device="cpu").step
        program = compile_program(step, Schedule(planner="none"))
        added = statistics.median(seconds(watched) - seconds(chain) for _ in range(ROUNDS))
    return max(added, 0.0) / sum(op.phase == Phase.FORWARD for op in step.ops)


def usual_seconds(step: Step, schedule: Schedule, replays: Iterable[tuple[int, float]]) -> float:
    """What the replays of a step take, from what they took once (note 4).

    Args:
        step: the recorded step.
        schedule: its plan.
        replays: window and seconds of each replay.

    Returns:
        Their sum, with the median of those whose ops have the same prices in place of each.
    """
    alike: defaultdict[tuple[float, ...], list[float]] = defaultdict(list)
    for window, seconds in replays:
        ops = schedule.windows[window].ops if 0 <= window < len(schedule.windows) else ()
        alike[tuple(step.ops[i].seconds for i in ops)].append(seconds)
    return sum(len(took) * statistics.median(took) for took in alike.values())


def excess_seconds(step: Step, priced: float, measured: float) -> float:
    """By how much the replays of a step took longer than their ops alone (note 4); below 0 where they took less.

    Args:
        step: the recorded step.
        priced: what the replays cost by the prices of their ops, in seconds.
        measured: what they took, in seconds.

    Returns:
        Seconds; 0 where replays only start work on a device, so that the clock says nothing.
    """
    return measured - priced if torch.device(step.device).type == "cpu" else 0.0
