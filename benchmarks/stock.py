"""The stock checkpointing policies on the built-in targets: time, memory, and whether the step is still the same.

    python benchmarks/stock.py                                   # GPT-2, all policies, 9 pairs
    python benchmarks/stock.py bert resnet50 --policies none,full --pairs 5 --threads 2
    python benchmarks/stock.py gpt2-tiny --pairs 3 --json

All policies of a target run in one process and in turn (A B C A B C ...); a ratio compares two runs of the same round. Gradients
are zeroed in place, there is no optimizer step. `allocator` is the highest level of allocated bytes above the start of the step,
`resident` the process's highest resident set above the one before the step. `identical` compares loss, gradients and buffers
with those of a plain step from the same state, bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from keepwise import targets
from keepwise.integrations.stock import POLICIES, apply_stock
from keepwise.measure import ResidentRise, allocator_peak, map_large_blocks, paired
from keepwise.targets import Target

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One policy on one target."""

    target: str
    policy: str
    seconds: float
    ratio: float
    ratio_quartiles: tuple[float, float]
    pairs: int
    allocator_bytes: int
    resident_bytes: int
    difference: str


def step_of(target: Target, policy: str) -> Callable[[], object]:
    """A whole step under a policy, which is put on and taken off around it."""

    def step() -> None:
        with apply_stock(target.model, policy, blocks=target.blocks):
            target.model.zero_grad(set_to_none=False)
            target.step()

    return step


def outcome(target: Target, policy: str) -> dict[str, Tensor]:
    """Loss, gradients and buffers after one step from a fixed state; the model is left as it was."""
    state = copy.deepcopy(target.model.state_dict())
    target.model.zero_grad(set_to_none=False)
    torch.manual_seed(0)
    with apply_stock(target.model, policy, blocks=target.blocks):
        found = {"loss": target.step().clone()}
    found |= {f"gradient {n}": p.grad.clone() for n, p in target.model.named_parameters() if p.grad is not None}
    found |= {f"buffer {n}": b.clone() for n, b in target.model.named_buffers()}
    target.model.load_state_dict(state)
    return found


def first_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    """Names of what differs, the first one and how many more; empty if nothing does."""
    differing = [name for name in one if name not in other or not torch.equal(one[name], other[name])]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return f"{differing[0]}{more}" if differing else ""


def rows(name: str, policies: Sequence[str], pairs: int) -> list[Row]:
    """Measure policies on a target; the first policy is what the others are compared with."""
    target = targets.build(name)
    target.step()  # Gradients exist from now on.
    reference = outcome(target, "none")
    differences = {policy: first_difference(reference, outcome(target, policy)) for policy in policies}
    steps = {policy: step_of(target, policy) for policy in policies}
    times = paired(steps, pairs)
    found: list[Row] = []
    for policy, step in steps.items():
        with ResidentRise() as rise:
            step()
        found.append(
            Row(
                target=name,
                policy=policy,
                seconds=sorted(times.seconds[policy])[pairs // 2],
                ratio=times.ratio(policy),
                ratio_quartiles=times.ratio_quartiles(policy),
                pairs=pairs,
                allocator_bytes=allocator_peak(step),
                resident_bytes=rise.bytes,
                difference=differences[policy],
            )
        )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and print a table (or JSON)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["gpt2"], help="built-in names (keepwise fit --list)")
    parser.add_argument("--policies", default="none,full,every2,selective,selective2", help=f"of {', '.join(POLICIES)}")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    map_large_blocks()  # Before the first step: else holes in the heap count as resident.
    torch.set_num_threads(options.threads)
    found: list[Row] = []
    for name in options.targets:
        found += rows(name, options.policies.split(","), options.pairs)
    if options.json:
        json.dump([{field: getattr(row, field) for field in Row.__slots__} for row in found], sys.stdout, indent=1)
        print()
        return 0
    print(
        f"{'target':16} {'policy':12} {'median s':>8} {'ratio':>6} {'quartiles':>13} {'allocator':>10} {'resident':>9}  identical"
    )
    for row in found:
        low, high = row.ratio_quartiles
        print(
            f"{row.target:16} {row.policy:12} {row.seconds:8.3f} {row.ratio:5.2f}x {low:6.2f}-{high:.2f}  "
            f"{row.allocator_bytes / MIB:6.1f} MiB {row.resident_bytes / MIB:5.0f} MiB  {row.difference or 'yes'}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
