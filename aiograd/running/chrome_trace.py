"""Chrome traces: the JSON that Perfetto and ``chrome://tracing`` draw.

Source: the Trace Event Format (Google, 2016) and what Perfetto makes of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

PathLike: TypeAlias = "str | os.PathLike[str]"
Trace: TypeAlias = dict[str, Any]


def trace_of(names: Iterable[Mapping[str, Any]], events: Iterable[Mapping[str, Any]], other: Mapping[str, Any]) -> Trace:
    """A trace.

    Args:
        names: events that name processes and rows, as of `row_names`.
        events: the other events, in any order.
        other: facts about the trace.

    Returns:
        The trace, a dict as JSON has it.
    """
    return {"traceEvents": [*names, *sorted(events, key=_by_time)], "displayTimeUnit": "ms", "otherData": dict(other)}


def row_names(pid: int, process: str, rows: Iterable[str]) -> list[dict[str, Any]]:
    """The events that name a process and its rows, which are drawn in this order.

    Args:
        pid: the number of the process.
        process: its name.
        rows: names of the rows; their ``tid`` counts from 1.
    """
    events = [{"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}]
    for tid, name in enumerate(rows, 1):
        events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        events.append({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})
    return events


def write_trace(trace: Mapping[str, Any], path: PathLike) -> None:
    """Write a trace as JSON, one event to a line."""
    rest = {key: value for key, value in trace.items() if key != "traceEvents"}
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"traceEvents": [\n')
        for i, event in enumerate(trace["traceEvents"]):
            file.write((",\n" if i else "") + json.dumps(event, allow_nan=False))
        file.write("\n]" + "".join(f", {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in rest.items()) + "}\n")


def _by_time(event: Mapping[str, Any]) -> tuple[float, float]:
    """An event before what lies inside of it, and before the arrows that end on it."""
    return event["ts"], -event.get("dur", 0.0) if event["ph"] == "X" else 1.0
