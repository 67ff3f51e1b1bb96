"""Chrome traces of profiles, built, read and merged; `aiograd.running.chrome_trace` has their form.

Note [Lanes]
    A viewer draws one row per thread and expects the events of a row to nest. Tasks of one thread overlap, so each thread gets as many rows
    (lanes, by their ``tid``) as it ever had tasks at the same time; a task stays in its lane, and one that begins when another
    has ended takes over its place.

Note [One clock for several processes]
    Times in a trace count from the moment its profile was made; ``otherData`` keeps that moment on the wall clock, and the offset of that
    clock from the common one. `merge_traces` moves every trace by them.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from aiograd.errors import ArgumentError
from aiograd.profiler.event import Event, Track
from aiograd.running.chrome_trace import PathLike, Trace, row_names, trace_of, write_trace

_COUNTER = "loop lag (ms)"


class Origin(NamedTuple):
    """The same moment on two clocks, in nanoseconds."""

    perf_counter: int
    unix: int


def build_trace(events: Sequence[Event], origin: Origin, *, pid: int, process_name: str, clock_offset: float) -> Trace:
    """The trace of one process.

    Args:
        events: in order of start.
        origin: where time counts from.
        pid: number of the process.
        process_name: its name.
        clock_offset: seconds to add to its wall clock to get the common one.
    """
    lanes = _lanes(events)
    tids = {track: tid for tid, (_, tracks) in enumerate(lanes, 1) for track in tracks}
    out: list[dict[str, Any]] = []
    recorded: dict[int, Event] = {event.sequence_nr: event for event in events if event.category == "forward" and event.sequence_nr is not None}
    flows = 0
    for event in events:
        at = {"ts": _micro(event.start - origin.perf_counter), "pid": pid, "tid": tids.get(event.track, 0)}
        if event.category == "lag":
            out.append({"ph": "C", "name": _COUNTER, **at, "args": {"ms": event.duration / 1e6}})
            continue
        out.append({"ph": "X", "name": event.name, "cat": event.category, **at, "dur": _micro(event.duration), "args": _arguments(event)})
        source = recorded.get(event.sequence_nr) if event.category == "backward" and event.sequence_nr is not None else None
        if source is not None:
            flows += 1
            flow = {"name": source.operation, "cat": "backward of", "id": flows}
            out.append({"ph": "s", **flow, "ts": _micro(source.start - origin.perf_counter), "pid": pid, "tid": tids[source.track]})
            out.append({"ph": "f", "bp": "e", **flow, **at})
    other = {"clock_origin_unix_us": origin.unix / 1e3, "clock_offset_us": clock_offset * 1e6}
    return trace_of(row_names(pid, process_name, [name for name, _ in lanes]), out, other)


def merge_traces(
    traces: Iterable[Mapping[str, Any] | PathLike], out: PathLike | None = None, *, clock_offsets: Sequence[float] | None = None
) -> Trace:
    """One trace of several processes.

    Args:
        traces: traces or the files they were written to.
        out: where to write the result; None: nowhere.
        clock_offsets: seconds to add to each trace's wall clock, in place of the offset it holds.

    Returns:
        The trace, a dict as JSON has it.

    Raises:
        ArgumentError: something is not a trace, or the numbers of traces and offsets differ.
    """
    read = [read_trace(trace) for trace in traces]
    if clock_offsets is not None and len(clock_offsets) != len(read):
        raise ArgumentError(f"merge_traces: got {len(read)} traces and {len(clock_offsets)} clock offsets; expected one per trace")
    starts = []
    for i, trace in enumerate(read):
        other = trace.get("otherData") or {}
        offset = other.get("clock_offset_us", 0.0) if clock_offsets is None else clock_offsets[i] * 1e6
        starts.append(float(other.get("clock_origin_unix_us", 0.0)) + float(offset))
    first = min(starts, default=0.0)
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    taken: set[int] = set()
    flows = 0
    for trace, start in zip(read, starts, strict=True):
        pids: dict[int, int] = {}
        ids: dict[int, int] = {}
        for event in trace["traceEvents"]:
            event = dict(event)
            if event["pid"] not in pids:
                pids[event["pid"]] = event["pid"] if event["pid"] not in taken else max(taken) + 1
                taken.add(pids[event["pid"]])
            event["pid"] = pids[event["pid"]]
            if isinstance(event.get("id"), int):  # ids that are text are shared by processes
                if event["id"] not in ids:
                    flows += 1
                    ids[event["id"]] = flows
                event["id"] = ids[event["id"]]
            if event["ph"] == "M":
                metadata.append(event)
            else:
                event["ts"] = round(event["ts"] + start - first, 3)
                events.append(event)
    merged = trace_of(metadata, events, {"clock_origin_unix_us": first, "clock_offset_us": 0.0})
    if out is not None:
        write_trace(merged, out)
    return merged


def read_trace(trace: Mapping[str, Any] | PathLike) -> Trace:
    """A trace or the file it was written to, checked as far as merging and adding up need.

    Args:
        trace: a dict, or the path of a file.

    Returns:
        The trace, a dict as JSON has it.

    Raises:
        ArgumentError: not a trace.
    """
    what = "a trace"
    data: Any = trace
    if isinstance(trace, (str, os.PathLike)):
        what = os.fspath(trace)
        try:
            with open(trace, encoding="utf-8") as file:
                data = json.load(file)
        except (OSError, ValueError, RecursionError) as error:
            raise ArgumentError(f"reading the trace {what}: {error}") from None
    if isinstance(data, list):
        data = {"traceEvents": data}
    events = data.get("traceEvents") if isinstance(data, Mapping) else None
    if not isinstance(events, list):
        raise ArgumentError(f"{what}: expected a Chrome trace, an object with a list 'traceEvents'")
    for i, event in enumerate(events):
        if not isinstance(event, Mapping) or not isinstance(event.get("ph"), str) or not _are_ints(event, "pid", "tid"):
            raise ArgumentError(f"{what}: event {i} is no trace event with ph, and whole numbers for pid and tid")
        if event["ph"] != "M" and not _is_number(event.get("ts")):
            raise ArgumentError(f"{what}: event {i} has no time 'ts'")
        if not _is_number(event.get("dur", 0)):
            raise ArgumentError(f"{what}: event {i} has a duration that is no number")
        args = event.get("args") or {}
        if not isinstance(args, Mapping) or not _is_number(args.get("bytes", 0)):
            raise ArgumentError(f"{what}: event {i} has other than an object as args, or bytes in it that are no number")
    other = data.get("otherData") or {}
    if not isinstance(other, Mapping) or not all(_is_number(other.get(key, 0)) for key in ("clock_origin_unix_us", "clock_offset_us")):
        raise ArgumentError(f"{what}: expected 'otherData' to be an object, with numbers for the clock in it")
    return dict(data)


def _arguments(event: Event) -> dict[str, Any]:
    pairs = {
        "operation": event.operation,
        "sequence_nr": event.sequence_nr,
        "graph_task": event.graph_task,
        "shapes": None if event.shapes is None else [list(shape) for shape in event.shapes],
        "bytes": event.nbytes,
        "task": event.task_name,
    }
    return {key: value for key, value in pairs.items() if value is not None}


def _lanes(events: Sequence[Event]) -> list[tuple[str, list[Track]]]:
    """Names of the lanes with the tracks each holds, see Note [Lanes]."""
    spans: dict[Track, list[int]] = {}
    names: dict[Track, tuple[str, str | None]] = {}
    for event in events:
        if event.category == "lag":
            continue
        span = spans.setdefault(event.track, [event.start, event.end])
        span[1] = max(span[1], event.end)
        names[event.track] = event.thread_name, event.task_name
    threads: defaultdict[int, list[Track]] = defaultdict(list)
    for track in sorted(spans, key=lambda track: (spans[track][0], track)):
        threads[track[0]].append(track)
    lanes: list[tuple[str, list[Track]]] = []
    for tracks in threads.values():
        ends: list[int] = []
        own: list[list[Track]] = []
        for track in tracks:
            begin, end = spans[track]
            free = next((i for i, busy in enumerate(ends) if busy <= begin), None)
            if free is None:
                free = len(own)
                own.append([])
                ends.append(0)
            own[free].append(track)
            ends[free] = end
        for number, lane in enumerate(own, 1):
            thread, task = names[lane[0]]
            if len(lane) == 1 and task is not None:
                lanes.append((f"{thread} / {task}", lane))
            else:
                lanes.append((thread if number == 1 else f"{thread} ({number})", lane))
    return lanes


def _micro(nanoseconds: int) -> float:
    return nanoseconds / 1000


def _is_number(value: Any) -> bool:
    """True for a number that floats hold: JSON of Python has NaN, infinity and ints of any size."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -sys.float_info.max <= value <= sys.float_info.max


def _are_ints(event: Mapping[str, Any], *keys: str) -> bool:
    return all(isinstance(event.get(key), int) and not isinstance(event.get(key), bool) for key in keys)
