"""Timelines as Chrome traces, which `aiograd.profiler.merge_traces` takes, so that a timeline can be laid beside a profile."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.action import ActionKind
from aiograd.pipeline.schedule.timeline.data import TimelineData, TimelineEvent
from aiograd.running.chrome_trace import Trace, row_names, trace_of

_K = ActionKind
#: a trace has one process, with the ranks as its threads
_PID = 1
_CATEGORIES = {
    _K.F: "forward", _K.I: "input backward", _K.W: "weight backward", _K.B: "full backward", _K.OVERLAP_F_B: "overlap",
    _K.UNSHARD: "parameters", _K.RESHARD: "parameters", _K.REDUCE_GRAD: "parameters",
}  # fmt: skip


def timeline_trace(timeline: TimelineData, unit: float) -> Trace:
    """See `Timeline.chrome_trace`."""
    if isinstance(unit, bool) or not isinstance(unit, int | float):
        raise ArgumentTypeError(f"the unit of a timeline must be a number of microseconds, not {type(unit).__name__}")
    if not (math.isfinite(unit) and unit > 0):
        raise ArgumentError(f"the unit of a timeline must be a number of microseconds above zero, found {unit:g}")
    start = timeline.events[0].start
    names = row_names(_PID, timeline.name or "pipeline", [f"rank {rank}" for rank in range(timeline.ranks)])
    other = {"cost": timeline.cost, "bubble_rate": timeline.bubble_rate, "peak_activations": list(timeline.peak_activations)}
    return trace_of(names, [*_slices(timeline, start, unit), *_arrows(timeline, start, unit)], other)


def _slices(timeline: TimelineData, start: float, unit: float) -> Iterator[dict[str, Any]]:
    """The events of actions and of transfers between ranks; transfers may overlap, so they have tracks of their own."""
    transfers = 0
    for event in timeline.events:
        action = event.action
        begin, end = _micro(event.start, start, unit), _micro(event.end, start, unit)
        common: dict[str, Any] = {"name": str(action), "pid": _PID, "tid": event.rank + 1, "args": {"stage": action.stage}}
        if action.microbatch is not None:
            common["args"]["microbatch"] = action.microbatch
        if action.kind.is_send or action.kind.is_receive:
            transfers += 1
            common |= {"cat": "transfer", "id": transfers}
            yield {"ph": "b", "ts": begin, **common}
            yield {"ph": "e", "ts": end, **common}
        else:
            yield {"ph": "X", "ts": begin, "dur": round(end - begin, 3), "cat": _CATEGORIES[action.kind], **common}


def _arrows(timeline: TimelineData, start: float, unit: float) -> Iterator[dict[str, Any]]:
    """Arrows from each forward to the next stage's, and from each backward to the previous stage's, where that stage is on another rank."""
    made: dict[tuple[bool, int, int | None], TimelineEvent] = {
        (part.kind is _K.F, part.stage, part.microbatch): event
        for event in timeline.events
        for part in event.action.computations
        if part.kind is not _K.W
    }
    for nr, ((forward, stage, microbatch), event) in enumerate(made.items()):
        source = made.get((forward, stage - 1 if forward else stage + 1, microbatch))
        if source is not None and source.rank != event.rank:
            arrow = {"name": "activation" if forward else "gradient", "cat": "transfer", "id": nr + 1, "pid": _PID}
            # An arrow belongs to the box around it, so it starts inside of its box rather than at its end.
            inside = (source.start + source.end) / 2
            yield {"ph": "s", **arrow, "ts": _micro(inside, start, unit), "tid": source.rank + 1}
            yield {"ph": "f", "bp": "e", **arrow, "ts": _micro(event.start, start, unit), "tid": event.rank + 1}


def _micro(time: float, start: float, unit: float) -> float:
    return round((time - start) * unit, 3)
