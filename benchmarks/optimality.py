"""How near to the best the planner is where the best is known, or another method's schedule is at hand. Counts, not times.

    python benchmarks/optimality.py --write

1. Uniform chains against the binomial optimum (Griewank and Walther 2000; `checkpoint_schedules` as oracle): every length, every budget.
2. Heterogeneous chains against a dynamic program over persistent schedules (Beaumont et al. 2020).
3. Random directed graphs (views, in-place writes, moving buffers, unrepeatable ops, holders, accumulation, graphs that are read twice)
   against every schedule that the judge accepts, by a search through states; and the bound over all schedules against the same.
4. The same graphs, larger, against the treewidth schedule (Kumar et al. 2019) and named planners, each at its own peak.

The oracles are those of the tests (`tests/plan/optimal`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from hypothesis import HealthCheck, Phase, given, seed, settings
from tests.plan.optimal.brute import num_choices, reading_nodes
from tests.plan.optimal.exhaustive import Found, TooManyStatesError, least_seconds, schedule_of
from tests.plan.optimal.test_optimum import persistent_optimum, revolve_forwards
from tests.plan.optimal.treewidth import treewidth_schedule
from tests.steps import chain, random_steps

from keepwise.ir import Step
from keepwise.plan import get_planner
from keepwise.plan.optimal import Status, bound_over_all_schedules, plan_floor, plan_optimal
from keepwise.simulate import ScheduleError, simulate

FOLDER = Path(__file__).parent / "results"
TINY = 1e-9
MAX_STATES = 30_000
"""Of a search for a smaller peak than ours, which has no time to go below and sees them all."""


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


def is_tiny(step: Step) -> bool:
    """Whether the search through states ends soon."""
    return 1 <= len(reading_nodes(step)) <= 4 and num_choices(step) <= 8


@dataclass(kw_only=True, slots=True)
class Exhausted:
    """Our plans of tiny graphs against the best of every schedule, and what stands behind each difference."""

    points: int = 0
    best: int = 0
    """No schedule takes less time."""
    copied: int = 0
    """A schedule takes less that copies, in forward, what autograd saves or what could be made again."""
    twice: int = 0
    """One takes less in a graph that is read twice, without such copies."""
    other: int = 0
    open: int = 0
    """The search says less, and its path is no schedule that fits: the search counts less for a copy than the judge."""
    bound_reached: int = 0
    """The bound over all schedules that plans carry equals the best."""
    graphs: int = 0
    floors: int = 0
    """Graphs of which no schedule has a smaller peak than ours."""
    lower_floors: int = 0
    """Graphs of which one has."""
    given_up: int = 0
    """Graphs whose smallest peak the search did not decide within `MAX_STATES`."""
    excess: list[float] = field(default_factory=list)
    """Our added seconds less theirs, as a share of the step's."""

    def add(self, step: Step) -> None:
        """Compare at five budgets from our smallest peak to under the plain one, and below the smallest."""
        floor = plan_floor(step)
        self.graphs += 1
        below = floor.floor_bytes - 1
        try:
            lower = least_seconds(step, below, max_states=MAX_STATES)
        except TooManyStatesError:
            self.given_up += 1
        else:
            self.floors += lower is None
            self.lower_floors += lower is not None and reached(step, lower, below)
        room = floor.plain_peak_bytes - floor.floor_bytes
        for budget in sorted({floor.floor_bytes + room * i // 5 for i in range(5)}):
            self._compare(step, budget)

    def _compare(self, step: Step, budget: int) -> None:
        ours = plan_optimal(step, budget).added_seconds
        found = least_seconds(step, budget, below=ours) if ours > TINY else None
        least = ours if found is None else found.added_seconds
        bound = bound_over_all_schedules(step, budget)
        assert bound <= least + 1e-6, "the bound is wrong"
        self.points += 1
        self.bound_reached += bound >= least - 1e-6
        if found is None:
            self.best += 1
            return
        paths = (found, least_seconds(step, budget, below=ours, copies=False))
        better = next((f for f in paths if f is not None and reached(step, f, budget)), None)
        if better is None:
            self.open += 1
            return
        self.excess.append((ours - better.added_seconds) / max(step.seconds, TINY))
        if any(r.copies for r in better.path):
            self.copied += 1
        elif any(len(save.reads) > 1 for save in step.saves):
            self.twice += 1
        else:
            self.other += 1

    def table(self) -> str:
        """Markdown."""
        return "\n".join(
            (
                "| random graphs of up to 10 ops against every schedule | number |",
                "|---|---|",
                f"| points: graph and budget | {self.points} |",
                f"| ours is the fastest schedule there is | {self.best} |",
                f"| faster: copies of what autograd saves or what could be made again | {self.copied} |",
                f"| faster: a graph that is read twice | {self.twice} |",
                f"| faster: other | {self.other} |",
                f"| open: the search's bound is lower, and its path is no schedule that fits | {self.open} |",
                f"| largest excess of ours, share of the step | {max(self.excess, default=0.0):.2f} |",
                f"| the bound that plans carry is the fastest schedule's time | {self.bound_reached} |",
                f"| graphs | {self.graphs} |",
                f"| ours has the smallest peak there is | {self.floors} |",
                f"| a schedule has a smaller one | {self.lower_floors} |",
                f"| open: the search's bound is lower | {self.graphs - self.floors - self.lower_floors - self.given_up} |",
                f"| not decided: more than {MAX_STATES:,} states | {self.given_up} |",
            )
        )


def reached(step: Step, found: Found, budget: int) -> bool:
    """Whether the judge accepts a path of the search within the budget, at its price."""
    try:
        timeline = simulate(step, schedule_of(step, found))
    except ScheduleError:
        return False
    return timeline.peak_bytes <= budget and timeline.added_seconds <= found.added_seconds + TINY


def exhausted(number: int) -> Exhausted:
    """Random graphs against every schedule."""
    result = Exhausted()
    for step in examples(number, 10, is_tiny):
        result.add(step)
    return result


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
    parser.add_argument("--examples", type=int, default=400)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/optimality.json and .md")
    options = parser.parse_args(arguments)
    counts = [uniform(30), heterogeneous(40)]
    print(table(counts), file=sys.stderr, flush=True)
    every = exhausted(3 * options.examples)
    print(every.table(), file=sys.stderr, flush=True)
    counts += others(options.examples)
    text = f"{table(counts)}\n\n{every.table()}"
    print(text)
    if options.write:
        FOLDER.mkdir(exist_ok=True)
        rows = [
            {k: getattr(c, k) for k in ("what", "points", "equal", "better", "slower", "infeasible")} for c in counts
        ]
        tiny = {f.name: getattr(every, f.name) for f in fields(every) if f.name != "excess"}
        (FOLDER / "optimality.json").write_text(
            json.dumps([*rows, {"what": "every schedule", **tiny}], indent=1) + "\n"
        )
        (FOLDER / "optimality.md").write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
