"""Board: everything that the page shows, as it came in from the workers. Pure: reports in, JSON out.

Workers are trusted to compute, not to write: every field of a report is checked and cut to size here, and the page draws texts as texts.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiograd.dashboard.pass_graph import FoundPass, PassPart, last_pass, picture, read_rows
from aiograd.dashboard.pipeline_steps import WorkerSteps, last_step, read_steps, step_picture
from aiograd.dashboard.servers import MOST_SAMPLES, ServerHistory, number_of
from aiograd.dashboard.wait_board import WaitBoard

#: events that are kept, and that one answer to the page holds; scalars alike
EVENTS, MOST_EVENTS = 30_000, 3000
SCALARS, MOST_SCALARS = 20_000, 4000
#: characters of a report, and of a text in it
REPORT, TEXT = 900_000, 160
#: numbers in a worker's state
NUMBERS = (
    "pid", "contexts", "passes", "committed", "aborted", "calls", "served", "failed", "bytes_held", "memory", "device_memory", "lag50", "lag99",
)  # fmt: skip


@dataclass(slots=True)
class WorkerState:
    """A worker as the page shows it."""

    name: str
    #: running, lost, or silent: it has not answered in time
    state: str = "silent"
    #: since when, in seconds of the wall clock
    since: float = 0.0
    why: str = ""
    url: str = ""
    #: microseconds to add to its clock to get the dashboard's
    offset: float = 0.0
    numbers: dict[str, float] = field(default_factory=dict)
    #: peer -> connected, bytes in and out, round trip in ms or -1, requests that run; and bytes per second in and out
    peers: dict[str, list[Any]] = field(default_factory=dict)
    rates: dict[str, tuple[float, float]] = field(default_factory=dict)
    #: beginning and end of the times in which it recorded, in microseconds of the dashboard's clock; the end is 0 of the one that lasts
    windows: list[list[int]] = field(default_factory=list)
    asked_at: float = 0.0
    #: cursors of its events and scalars
    cursor: int = 0
    scalar_cursor: int = 0
    #: seconds from the question to the answer that `offset` comes from: the quickest
    narrowest: float = math.inf


class Board:
    """The state of all workers, and their events.

    Args:
        here: the worker that serves the dashboard.
    """

    def __init__(self, here: str) -> None:
        self.here = here
        self.workers: dict[str, WorkerState] = {}
        self._events: deque[tuple[int, list[Any]]] = deque(maxlen=EVENTS)
        self._number = 0
        self._scalars: deque[tuple[int, list[Any]]] = deque(maxlen=SCALARS)
        self._scalar_number = 0
        self._passes: dict[str, list[PassPart]] = {}
        self._pass: FoundPass | None = None
        self._graph: dict[str, Any] = {}
        self._graph_version = 0
        self._steps: dict[str, WorkerSteps] = {}
        self._step: dict[str, Any] = {}
        self._step_key = ""
        self._step_version = 0
        self._servers = ServerHistory()
        self._waits = WaitBoard()
        self.dropped = 0

    # ---------------------------------------------------------------- reports

    def worker(self, name: str) -> WorkerState:
        """The worker of a name, made where it is not known yet."""
        return self.workers.setdefault(name, WorkerState(name))

    def forget(self, name: str) -> None:
        """A worker is no longer one of the cluster."""
        self.workers.pop(name, None)
        self._passes.pop(name, None)
        self._steps.pop(name, None)
        self._servers.forget(name)
        self._waits.forget(name)

    def failed(self, name: str, state: str, why: str, now: float) -> None:
        """A worker could not be asked."""
        self._change(self.worker(name), state, why, now)

    def arrived(self, name: str, report: Mapping[str, Any], asked: float, now: float) -> None:
        """A worker has answered.

        Args:
            report: as `Reporter.report` makes it, or anything.
            asked, now: when it was asked and when the answer came, in seconds of the wall clock.
        """
        worker = self.worker(name)
        state = report.get("state")
        if not isinstance(state, dict):
            self._change(worker, "silent", "its report is malformed", now)
            return
        self._change(worker, "running", "", now)
        pid = number_of(state.get("pid"))
        if pid != worker.numbers.get("pid"):  # another process: its clock and its counts begin anew
            worker.narrowest, worker.peers = math.inf, {}
        if name != self.here and now - asked < worker.narrowest:
            worker.narrowest = now - asked
            worker.offset = (asked + now) / 2 * 1e6 - number_of(report.get("now"))
        worker.numbers = {key: number_of(state.get(key)) for key in NUMBERS}
        self._take_peers(worker, state.get("peers"), now)
        windows = report.get("windows")
        worker.windows = [
            [round(number_of(row[0]) + worker.offset), round(number_of(row[1]) + worker.offset) if row[1] else 0]
            for row in (windows[-256:] if isinstance(windows, list) else ())
            if isinstance(row, list) and len(row) == 2
        ]
        cursor = report.get("cursor")
        worker.cursor = cursor if isinstance(cursor, int) else 0
        self.dropped += int(number_of(report.get("dropped")))
        self._take_events(worker, report.get("events"))
        self._take_scalars(worker, report.get("scalars"))
        self._servers.arrived(name, report.get("servers"), now)
        self._waits.arrived(name, report.get("waits"))
        if (rows := report.get("graphs")) is not None:
            self._passes[name] = read_rows(rows)
        if (rows := report.get("steps")) is not None:
            self._steps[name] = read_steps(rows, worker.offset)

    def _change(self, worker: WorkerState, state: str, why: str, now: float) -> None:
        if worker.state != state or not worker.since:
            worker.since = now
        if state == "lost":
            worker.cursor = worker.scalar_cursor = 0  # the one that comes back counts anew
            worker.peers, worker.rates = {}, {}
            self._servers.forget(worker.name)
            self._waits.forget(worker.name)
        worker.state, worker.why = state, why[:TEXT]

    def _take_peers(self, worker: WorkerState, rows: Any, now: float) -> None:
        before, seconds = worker.peers, now - worker.asked_at
        worker.peers, worker.asked_at = {}, now
        for row in rows[:2000] if isinstance(rows, list) else ():
            match row:
                case [str(peer), bool(connected), bytes_in, bytes_out, round_trip, busy]:
                    peer = peer[:TEXT]
                    trip = -1.0 if round_trip is None else number_of(round_trip)
                    mine = worker.peers[peer] = [connected, number_of(bytes_in), number_of(bytes_out), trip, number_of(busy)]
                    if peer in before and seconds > 0:
                        rates = tuple(max(0.0, mine[i] - before[peer][i]) / seconds for i in (1, 2))
                        worker.rates[peer] = rates[0], rates[1]
        worker.rates = {peer: worker.rates.get(peer, (0.0, 0.0)) for peer in worker.peers}

    def _take_events(self, worker: WorkerState, rows: Any) -> None:
        for row in rows[:MOST_EVENTS] if isinstance(rows, list) else ():
            match row:
                case [str(name), str(category), str(operation), at, duration, str(thread), track, sequence, number, shapes, nbytes, line, peer]:
                    texts = [None if text is None else str(text)[:TEXT] for text in (shapes, line, peer)]
                    self._number += 1
                    kept = [
                        worker.name, name[:TEXT], category[:20], operation[:TEXT], round(number_of(at) + worker.offset),
                        round(number_of(duration), 1), thread[:40], int(number_of(track)), _count(sequence), _count(number),
                        texts[0], _count(nbytes), texts[1], texts[2],
                    ]  # fmt: skip
                    self._events.append((self._number, kept))

    def _take_scalars(self, worker: WorkerState, rows: Any) -> None:
        for row in rows[:MOST_SCALARS] if isinstance(rows, list) else ():
            match row:
                case [int(number), owner, str(name), int(step), value, at]:
                    worker.scalar_cursor = max(worker.scalar_cursor, number)
                    self._scalar_number += 1
                    finite = value if isinstance(value, (int, float)) and math.isfinite(value) else None
                    entry = [worker.name if owner is None else str(owner)[:TEXT], name[:200], step, finite, round(number_of(at), 3)]
                    self._scalars.append((self._scalar_number, entry))

    def draw_graph(self, now: float) -> None:
        """Lay out the last pass anew. A part of one does not take the place of a whole one.

        Args:
            now: seconds of the wall clock.
        """
        found = parts, missing = last_pass(self.here, self._passes)
        if parts and found != self._pass and not (missing and self._graph and not self._graph["missing"]):
            self._pass = found
            self._graph_version += 1
            self._graph = {"version": self._graph_version, "at": now, "missing": sorted(missing), **picture(parts)}

    def draw_step(self) -> None:
        """Look for a later step of a pipeline, and put it in the place of the one before if it is whole."""
        step = last_step(self._steps, self._step_key)
        if step is not None:
            self._step_version += 1
            self._step, self._step_key = {"version": self._step_version, **step_picture(step)}, step.key

    # ---------------------------------------------------------------- answers to the page

    def answer(self, after: int, scalars_after: int, graph: int, now: float, pipeline: int = 0, serving: int = 0) -> bytes:
        """JSON for the page: the state of all workers, and the events since its last question.

        Args:
            after, scalars_after, graph, pipeline, serving: numbers of the last event, scalar, graph, step and sample of a server that the page has;
                0 at first.
            now: seconds of the wall clock.
        """
        windows = 256 if len(self.workers) <= 64 else 4
        events = _after(self._events, after, MOST_EVENTS)
        logged = _after(self._scalars, scalars_after, MOST_SCALARS)
        value = {
            "now": round(now * 1e6),
            "here": self.here,
            "cursor": self._number,
            "scalar_cursor": self._scalar_number,
            "dropped": self.dropped,
            "workers": [
                {
                    "name": worker.name, "state": worker.state, "since": worker.since, "why": worker.why, "url": worker.url,
                    "round_trip": self._round_trip(self.here, worker.name), "windows": worker.windows[-windows:], **worker.numbers,
                }
                for worker in self.workers.values()
            ],
            "links": [
                [worker.name, peer, row[0], round(worker.rates[peer][0]), round(worker.rates[peer][1]), self._round_trip(worker.name, peer), row[4]]
                for worker in self.workers.values()
                for peer, row in worker.peers.items()
            ][:4000],
            "events": events,
            "scalars": logged,
            "graph": self._graph if graph != self._graph_version else None,
            "pipeline": self._step if pipeline != self._step_version else None,
            "waits": self._waits.picture(),
            "servers": self._servers.rows,
            "serving": _after(self._servers.samples, serving, MOST_SAMPLES),
            "serving_cursor": self._servers.number,
        }  # fmt: skip
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()

    def _round_trip(self, one: str, other: str) -> float | None:
        """Milliseconds from one worker to another and back: what this worker has measured, if it is one of them, else the lesser of their figures."""
        ends = sorted(((one, other), (other, one)), key=lambda end: end[0] != self.here)
        found = [float(worker.peers[peer][3]) for name, peer in ends if (worker := self.workers.get(name)) and peer in worker.peers]
        known = [trip for trip in found if trip >= 0]
        if not known:
            return None
        return round(known[0] if self.here in (one, other) else min(known), 2)


def read_report(text: Any) -> dict[str, Any]:
    """The report in a worker's answer; an empty one where it is malformed."""
    if not isinstance(text, str) or len(text) > REPORT:
        return {}
    try:
        report = json.loads(text, parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def _after(entries: deque[tuple[int, list[Any]]], number: int, most: int) -> list[list[Any]]:
    found: list[list[Any]] = []
    for place, entry in reversed(entries):
        if place <= number or len(found) >= most:
            break
        found.append(entry)
    return found[::-1]


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and abs(value) < 2**53 else None
