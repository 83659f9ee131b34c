"""How near to the best the planner is where the best is known, or another method's schedule is at hand. Counts, not times.

    python benchmarks/optimality.py --write

1. Uniform chains against the binomial optimum (Griewank and Walther 2000; `checkpoint_schedules` as oracle): every length, every budget.
2. Heterogeneous chains against a dynamic program over persistent schedules (Beaumont et al. 2020).
3. Random directed graphs (views, in-place writes, moving buffers, unrepeatable ops, holders, accumulation, graphs that are read twice)
   against every schedule of a wide family that the judge accepts: held sets, nested windows, what windows retain.
4. The same graphs, larger, against the treewidth schedule (Kumar et al. 2019) and named planners, each at its own peak.

The oracles are those of the tests (`tests/plan/optimal`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.plan.optimal.brute import best_schedules, reading_nodes
from tests.plan.optimal.test_optimum import persistent_optimum, revolve_forwards
from tests.plan.optimal.treewidth import treewidth_schedule
from tests.steps import chain, random_steps

from keepwise.ir import Category, Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import Status, bound_over_all_schedules, plan_floor, plan_optimal
from keepwise.simulate import simulate

FOLDER = Path(__file__).parent / "results"
TINY = 1e-9


@dataclass(kw_only=True, slots=True)
class Count:
    """Comparisons of one kind."""

    what: str
    points: int = 0
    equal: int = 0
    better: int = 0
    """Ours takes less time."""
    slower: int = 0
    infeasible: int = 0
    """Ours finds nothing within that peak."""
    excess: list[float] = field(default_factory=list)
    """Where slower: our added seconds as a share of the step's, less theirs."""

    def add(self, step: Step, peak_bytes: int, seconds: float) -> None:
        """Compare with something that takes `seconds` within a peak."""
        result = plan_optimal(step, peak_bytes)
        self.points += 1
        if result.status is Status.INFEASIBLE:
            self.infeasible += 1
        elif result.added_seconds > seconds + TINY:
            self.slower += 1
            self.excess.append((result.added_seconds - seconds) / max(step.seconds, TINY))
        elif result.added_seconds < seconds - TINY:
            self.better += 1
        else:
            self.equal += 1


def uniform(longest: int) -> Count:
    """Every length from 2 on, every budget from the floor to the plain peak."""
    count = Count(what=f"uniform chains of 2 to {longest}, every budget: binomial optimum")
    for n in range(2, longest + 1):
        step = chain(n)
        floor = plan_floor(step)
        for budget in range(floor.floor_bytes, floor.plain_peak_bytes + 1):
            snapshots = min(budget - floor.floor_bytes + 1, n)
            count.add(step, budget, revolve_forwards(n, snapshots) if snapshots < n else 0.0)
    return count


def heterogeneous(chains: int) -> Count:
    """Random sizes and durations, every second budget."""
    count = Count(what=f"{chains} heterogeneous chains of 5 to 9: persistent schedules")
    for number in range(chains):
        rng = random.Random(number)
        n = rng.randint(5, 9)
        sizes = [rng.randint(1, 9) for _ in range(n + 1)]
        seconds = [float(rng.randint(1, 9)) for _ in range(n)]
        step = chain(n, sizes=sizes, seconds=seconds)
        floor = plan_floor(step)
        for budget in range(floor.floor_bytes, floor.plain_peak_bytes + 1, 2):
            best = persistent_optimum(step, sizes, seconds, budget)
            if best < float("inf"):
                count.add(step, budget, best)
    return count


def examples(number: int, max_ops: int, wanted: Callable[[Step], bool]) -> list[Step]:
    """Random steps, the same in every run."""
    found: list[Step] = []

    @seed(11)
    @given(random_steps(max_ops=max_ops))
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def collect(step: Step) -> None:
        if wanted(step):
            found.append(step)

    collect()
    return found


def num_choices(step: Step) -> int:
    """Storages that a schedule may decide about."""
    dynamic = (Category.ACTIVATION, Category.TEMPORARY)
    return sum(
        1 for s in step.storages if s.category in dynamic and s.birth >= 0 and step.ops[s.birth].phase == "forward"
    )


def brute(number: int, seconds: float) -> tuple[Count, Count]:
    """Graphs of up to 10 forward ops against every schedule of the family; and the bound over all schedules against the same."""
    count = Count(what="random graphs of up to 10 ops: every schedule of the family")
    bound = Count(what="(the bound over all schedules, at the same points)")
    found = examples(number, 10, lambda s: 1 <= len(reading_nodes(s)) <= 4 and num_choices(s) <= 8)
    until = time.perf_counter() + seconds
    for step in found:
        if time.perf_counter() > until:
            break
        for best in best_schedules(step, limit=4000):
            count.add(step, best.peak_bytes, best.added_seconds)
            bound.points += 1
            least = bound_over_all_schedules(step, best.peak_bytes)
            assert least <= best.added_seconds + 1e-6, "the bound is wrong"
            bound.equal += least >= best.added_seconds - 1e-6
            bound.better += least < best.added_seconds - 1e-6
    return count, bound


def others(number: int) -> list[Count]:
    """Graphs of up to 20 ops against other planners at their own peaks."""
    steps = examples(number, 20, lambda s: bool(reading_nodes(s)))
    planners: dict[str, Callable[[Step], object]] = {"treewidth (Kumar et al.)": treewidth_schedule}
    for name in ("full", "every:2", "every:4", "sqrt", "recursive", "selective", "recompute_everything"):
        planners[name] = lambda step, name=name: get_planner(name).plan(step, None)
    found = []
    for name, plan in planners.items():
        count = Count(what=f"random graphs of up to 20 ops: {name}")
        for step in steps:
            timeline = simulate(step, plan(step))  # pyright: ignore[reportArgumentType]
            count.add(step, timeline.peak_bytes, timeline.added_seconds)
        found.append(count)
    count = Count(what="random graphs of up to 20 ops: boundaries at random modules")
    rng = random.Random(5)
    for step in steps:
        paths = sorted({op.path for op in step.ops if op.path and op.phase == "forward"})
        if paths:
            chosen = rng.sample(paths, rng.randint(1, min(3, len(paths))))
            timeline = simulate(step, get_planner("boundaries:" + ",".join(chosen)).plan(step, None))
            count.add(step, timeline.peak_bytes, timeline.added_seconds)
    return [*found, count]


def table(counts: Sequence[Count]) -> str:
    """Markdown."""
    lines = [
        "| compared with | points | equal | ours faster | ours slower | ours finds none | largest excess, share of the step |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {c.what} | {c.points} | {c.equal} | {c.better} | {c.slower} | {c.infeasible} | {max(c.excess, default=0.0):.2f} |"
        for c in counts
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--brute-seconds", type=float, default=120.0)
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/optimality.json and .md")
    options = parser.parse_args(arguments)
    counts = [uniform(30), heterogeneous(40)]
    print(table(counts), file=sys.stderr, flush=True)
    counts += brute(3 * options.examples, options.brute_seconds)
    print(table(counts[2:]), file=sys.stderr, flush=True)
    counts += others(options.examples)
    print(table(counts))
    if options.write:
        FOLDER.mkdir(exist_ok=True)
        rows = [
            {k: getattr(c, k) for k in ("what", "points", "equal", "better", "slower", "infeasible")} for c in counts
        ]
        (FOLDER / "optimality.json").write_text(json.dumps(rows, indent=1) + "\n")
        (FOLDER / "optimality.md").write_text(table(counts) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
