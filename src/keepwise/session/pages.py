"""What memory costs that is touched for the first time, and what a plan saves by using dead memory again.

On the CPU the allocator gives large memory back to the system and asks for it again, page by page (with the settings of glibc that most
processes have: above 32 MiB always, below it depends on what was freed before). So the price is measured here and now, at the size
that matters, not looked up.

Only forward counts. Replays use memory again as well, but an op's price was taken with its arguments in the caches and new memory for
its result; in a replay it is the other way round. Measured on GPT-2 the two cancel.
"""

from __future__ import annotations

import statistics
import time

import torch

from keepwise.ir import Step, spare
from keepwise.runtime.calls import resolve
from keepwise.runtime.reuse import out_form
from keepwise.simulate import Timeline, recycled_bytes, spare_of

ROUNDS = 7
MOST_BYTES = 32 << 20


def saved_seconds(timeline: Timeline) -> float:
    """Seconds of a step that writing results into dead memory saves, predicted."""
    step = timeline.step
    if timeline.schedule is None or not timeline.schedule.windows or torch.device(step.device).type != "cpu":
        return 0.0
    nbytes = recycled_bytes(timeline, spare_of(timeline), _writes_into)
    return nbytes * first_touch_seconds(_typical_bytes(step)) if nbytes else 0.0


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


def first_touch_seconds(nbytes: int) -> float:
    """Seconds a byte by which writing into a new allocation of that size takes longer than into an old one."""
    nbytes = min(nbytes, MOST_BYTES)

    def fill(t: torch.Tensor) -> float:
        began = time.perf_counter()
        t.fill_(0)
        return time.perf_counter() - began

    new, old = [], []
    with torch.no_grad():
        for _ in range(ROUNDS):
            began = time.perf_counter()
            t = torch.empty(nbytes, dtype=torch.uint8)
            fill(t)
            new.append(time.perf_counter() - began)
            old.append(fill(t))
            began = time.perf_counter()
            del t
            new[-1] += time.perf_counter() - began
    return max(statistics.median(new) - statistics.median(old), 0.0) / nbytes
