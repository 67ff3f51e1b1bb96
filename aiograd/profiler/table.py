"""The table: events added up by operation.

Works on plain records, so that a trace read from a file (of several processes, perhaps) gives the same table as a profile does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from aiograd.errors import ArgumentError
from aiograd.profiler.chrome_trace import read_trace
from aiograd.profiler.event import Event
from aiograd.running.chrome_trace import PathLike

SortKey = Literal["name", "calls", "self", "total", "forward", "backward", "mean", "memory"]


class Record(NamedTuple):
    """The fields of an event that the table needs."""

    operation: str
    is_backward: bool
    track: Hashable
    start: float
    #: in nanoseconds, as `start`
    duration: float
    nbytes: int


@dataclass(slots=True)
class OperationTotals:
    """Sums of one operation; times in nanoseconds."""

    name: str
    forward_calls: int = 0
    backward_calls: int = 0
    forward: float = 0.0
    forward_self: float = 0.0
    backward: float = 0.0
    backward_self: float = 0.0
    nbytes: int = 0

    @property
    def calls(self) -> int:
        """The number of forward runs; of an operation without a forward, of all runs."""
        return self.forward_calls or self.backward_calls

    @property
    def own(self) -> float:
        """Time without what ran inside, both ways."""
        return self.forward_self + self.backward_self

    @property
    def total(self) -> float:
        """Time with what ran inside, both ways."""
        return self.forward + self.backward


_ORDERS: dict[str, Callable[[OperationTotals], Any]] = {
    "name": lambda row: row.name,
    "calls": lambda row: (-row.calls, row.name),
    "self": lambda row: (-row.own, row.name),
    "total": lambda row: (-row.total, row.name),
    "forward": lambda row: (-row.forward, row.name),
    "backward": lambda row: (-row.backward, row.name),
    "mean": lambda row: (-row.total / row.calls, row.name),
    "memory": lambda row: (-row.nbytes, row.name),
}


def records_of(events: Iterable[Event]) -> list[Record]:
    """The events that count."""
    return [
        Record(event.operation, event.category in ("backward", "pass"), event.track, event.start, event.duration, event.nbytes or 0)
        for event in events
        if event.category != "lag"
    ]


def rows_of(records: Iterable[Record]) -> list[OperationTotals]:
    """Sums by operation, in no order. The time of an event inside of another one of its track is subtracted from the latter's own time."""
    rows: dict[str, OperationTotals] = {}
    tracks: defaultdict[Hashable, list[Record]] = defaultdict(list)
    for record in records:
        tracks[record.track].append(record)
    for track in tracks.values():
        track.sort(key=lambda record: (record.start, -record.duration))
        inside = [0.0] * len(track)
        open_: list[int] = []
        for i, record in enumerate(track):
            while open_ and track[open_[-1]].start + track[open_[-1]].duration <= record.start:
                open_.pop()
            if open_:
                inside[open_[-1]] += record.duration
            open_.append(i)
        for record, covered in zip(track, inside, strict=True):
            row = rows.setdefault(record.operation, OperationTotals(record.operation))
            own = max(0.0, record.duration - covered)
            if record.is_backward:
                row.backward_calls += 1
                row.backward += record.duration
                row.backward_self += own
            else:
                row.forward_calls += 1
                row.forward += record.duration
                row.forward_self += own
                row.nbytes += record.nbytes
    return list(rows.values())


def render(records: Iterable[Record], *, sort_by: SortKey, limit: int | None) -> str:
    """The table as text.

    Raises:
        ArgumentError: no such order.
    """
    order = _ORDERS.get(sort_by)
    if order is None:
        raise ArgumentError(f"table(sort_by={sort_by!r}): expected one of {', '.join(_ORDERS)}")
    rows = sorted(rows_of(records), key=order)
    whole = sum(row.own for row in rows)
    with_memory = any(row.nbytes for row in rows)
    head = ["name", "calls", "forward", "fwd self", "backward", "bwd self", "mean", "share", *(["output"] if with_memory else [])]
    lines = [head]
    for row in rows[:limit]:
        share = f"{row.own / whole:.1%}" if whole else "-"
        times = (row.forward, row.forward_self, row.backward, row.backward_self, row.total / row.calls)
        lines.append([row.name, str(row.calls), *map(_time, times), share, *([_bytes(row.nbytes)] if with_memory else [])])
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]) for line in lines]
    text.insert(1, "-" * len(text[0]))
    left = len(rows) - len(lines) + 1
    calls = sum(row.forward_calls for row in rows), sum(row.backward_calls for row in rows)
    text.append("-" * len(text[0]))
    text.append(f"{_time(whole)} in {calls[0]} forward and {calls[1]} backward events" + (f"; {left} more rows" if left else ""))
    return "\n".join(text)


def summarize_trace(trace: Mapping[str, Any] | PathLike, *, sort_by: SortKey = "self", limit: int | None = 30) -> str:
    """The table of a Chrome trace, of one process or of several.

    Args:
        trace: the result of `profile.chrome_trace` or `merge_traces`, or a file they wrote.
        sort_by, limit: as for `profile.table`.

    Returns:
        The text, one line for each operation.

    Raises:
        ArgumentError: no such order, or not a trace.
    """
    records = []
    for event in read_trace(trace)["traceEvents"]:
        if event["ph"] == "X":
            arguments = event.get("args") or {}
            backward = event.get("cat") in ("backward", "pass")
            operation = str(arguments.get("operation", event.get("name")))
            track = event["pid"], event["tid"]
            records.append(Record(operation, backward, track, event["ts"] * 1e3, event.get("dur", 0) * 1e3, int(arguments.get("bytes", 0))))
    return render(records, sort_by=sort_by, limit=limit)


def _time(nanoseconds: float) -> str:
    if not nanoseconds:
        return "-"
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.2f} {unit}"
    return f"{nanoseconds / 1e3:.1f} µs"


def _bytes(count: float) -> str:
    if not count:
        return "-"
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
