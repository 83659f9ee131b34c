"""Memory over the time of a step, plain and planned, on one axis.

An op's level counts for its whole duration. Replays take their own time just before the op that needs them, so the planned
curve is longer than the plain one by the seconds that it adds.
"""

from __future__ import annotations

from collections.abc import Iterator

from keepwise.ir import Step
from keepwise.report.inputs import TimelineLike
from keepwise.report.model import Curve

NUM_BINS = 480

_Piece = tuple[float, int, str]
"""(duration, bytes, phase)"""


def curve_of(step: Step, plain: TimelineLike, planned: TimelineLike, *, num_bins: int = NUM_BINS) -> Curve:
    """Both timelines, each bin with the highest level inside it, so that no peak is lost."""
    timed = any(op.seconds > 0 for op in step.ops)
    before, after = list(_pieces(step, plain, timed)), list(_pieces(step, planned, timed))
    total = max(sum(p[0] for p in before), sum(p[0] for p in after))
    if not total:
        return Curve(bin_seconds=0.0, timed=timed, plain=(), plan=(), phases=())
    width = total / num_bins
    return Curve(
        bin_seconds=width,
        timed=timed,
        plain=_binned(before, width, num_bins),
        plan=_binned(after, width, num_bins),
        phases=_phases(after, width, num_bins),
    )


def _pieces(step: Step, timeline: TimelineLike, timed: bool) -> Iterator[_Piece]:
    starting: dict[int, list[int]] = {}
    for number, replay in enumerate(timeline.replays):
        starting.setdefault(replay.start, []).append(number)
    for op in step.ops:
        for number in starting.get(op.index, ()):
            replay = timeline.replays[number]
            for position, again in enumerate(replay.ops):
                seconds = step.ops[again].seconds if timed else 1.0
                yield seconds, int(replay.base_bytes + replay.inner_bytes[position]), str(op.phase)
        yield op.seconds if timed else 1.0, int(timeline.live_bytes[op.index]), str(op.phase)


def _binned(pieces: list[_Piece], width: float, num_bins: int) -> tuple[int, ...]:
    levels = [0] * num_bins
    now, last = 0.0, 0
    for seconds, level, _ in pieces:
        first = min(int(now / width), num_bins - 1)
        now += seconds
        last = min(int(now / width), num_bins - 1)
        for i in range(first, last + 1):
            levels[i] = max(levels[i], level)
    return tuple(levels[: last + 1])


def _phases(pieces: list[_Piece], width: float, num_bins: int) -> tuple[tuple[str, int, int], ...]:
    found: list[tuple[str, float, float]] = []
    now = 0.0
    for seconds, _, phase in pieces:
        if found and found[-1][0] == phase:
            found[-1] = (phase, found[-1][1], now + seconds)
        else:
            found.append((phase, now, now + seconds))
        now += seconds
    bins = [(phase, round(a / width), min(round(b / width), num_bins)) for phase, a, b in found]
    return tuple((phase, a, b) for phase, a, b in bins if b > a)
