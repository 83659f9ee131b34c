"""Plans over synthetic steps, with everything that a report reads."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepwise.ir import Schedule, Step
from keepwise.plan import get_planner
from keepwise.session.decisions import Decision, decisions_of
from keepwise.session.status import Status
from keepwise.simulate import Timeline, simulate


@dataclass(frozen=True)
class Made:
    """What `keepwise.Plan` offers, without a model."""

    step: Step
    schedule: Schedule
    timeline: Timeline
    plain: Timeline
    decisions: tuple[Decision, ...]
    budget_bytes: int | None = None
    status: Status = Status.FEASIBLE
    notes: tuple[str, ...] = ()
    shapes: tuple[str, ...] = ()
    bound_seconds: float = 0.0
    gap: float = 0.0
    floor_bytes: int = field(default=0)

    @property
    def plain_peak_bytes(self) -> int:
        return self.plain.peak_bytes

    @property
    def peak_bytes(self) -> int:
        return self.timeline.peak_bytes

    @property
    def static_bytes(self) -> int:
        return self.timeline.static_bytes

    @property
    def added_seconds(self) -> float:
        return self.timeline.added_seconds

    @property
    def replay_seconds(self) -> float:
        return self.timeline.added_seconds

    @property
    def step_seconds(self) -> float:
        return self.step.seconds

    def summary(self) -> str:
        return f"{self.plain_peak_bytes} -> {self.peak_bytes}"

    def time_in_words(self) -> str:
        return "replays only" if self.schedule.windows else ""


def made(step: Step, planner: str = "full", **more) -> Made:
    schedule = get_planner(planner).plan(step, None)
    return Made(
        step=step,
        schedule=schedule,
        timeline=simulate(step, schedule),
        plain=simulate(step),
        decisions=decisions_of(step, schedule),
        **more,
    )
