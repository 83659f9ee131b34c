"""The planned step as a trace file for `chrome://tracing` or Perfetto: ops, replays, and two counters of memory."""

from __future__ import annotations

from typing import Any

import msgspec

from keepwise.ir import Step
from keepwise.report.inputs import TimelineLike
from keepwise.report.words import short_op

_PROCESS = 1
_ROWS = {"forward": 1, "backward": 2, "optimizer": 3, "replay": 4}


def trace_events(step: Step, plain: TimelineLike, planned: TimelineLike) -> list[dict[str, Any]]:
    """Events in the Trace Event Format; times in microseconds of the planned step."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": _PROCESS, "name": "process_name", "args": {"name": "keepwise: planned step (predicted)"}}
    ]
    events += [
        {"ph": "M", "pid": _PROCESS, "tid": tid, "name": "thread_name", "args": {"name": name}}
        for name, tid in _ROWS.items()
    ]
    starting: dict[int, list[int]] = {}
    for number, replay in enumerate(planned.replays):
        starting.setdefault(replay.start, []).append(number)
    now = 0.0

    def run(index: int, row: str, level: int) -> None:
        nonlocal now
        op = step.ops[index]
        micros = 1e6 * op.seconds
        args = {"module": op.path, "source": op.source, "flops": op.flops}
        events.append(
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": _ROWS[row],
                "ts": now,
                "dur": micros,
                "name": short_op(op.target),
                "args": args,
            }
        )
        events.append(_counter("planned bytes", now, level))
        now += micros

    for op in step.ops:
        for number in starting.get(op.index, ()):
            replay = planned.replays[number]
            for position, again in enumerate(replay.ops):
                run(again, "replay", int(replay.base_bytes + replay.inner_bytes[position]))
        events.append(_counter("plain bytes", now, int(plain.live_bytes[op.index])))
        run(op.index, str(op.phase), int(planned.live_bytes[op.index]))
    return events


def _counter(name: str, now: float, value: int) -> dict[str, Any]:
    return {"ph": "C", "pid": _PROCESS, "ts": now, "name": name, "args": {"bytes": value}}


def render_trace(step: Step, plain: TimelineLike, planned: TimelineLike) -> bytes:
    """The events as a JSON document."""
    return msgspec.json.encode({"traceEvents": trace_events(step, plain, planned), "displayTimeUnit": "ms"})
