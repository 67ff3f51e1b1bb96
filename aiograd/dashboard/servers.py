"""Servers on the dashboard: their versions, and figures over time: latency, queue, promotions, rollbacks, steps."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from aiograd import serving
from aiograd.serving.registry import REGISTRY
from aiograd.serving.statistics import BOUNDS

#: servers of a worker, versions of a server, metrics of a version, and characters of a text
MOST_SERVERS, MOST_VERSIONS, MOST_METRICS, TEXT = 8, 12, 4, 160
#: samples that are kept, and that one answer to the page holds
SAMPLES, MOST_SAMPLES = 20_000, 4000
#: numbers of a row
COUNTS = ("version", "answers", "queued", "refused", "expired", "failed", "published", "promoted", "rollbacks")
LEARNED = ("steps", "failures", "rejected", "rollbacks")


def server_rows(worker: str, *, with_others: bool) -> list[dict[str, Any]]:
    """The servers of this process for a report, see `ServingRegistry.servers_of`."""
    return [_row(*each) for each in REGISTRY.servers_of(worker, with_others=with_others)[:MOST_SERVERS]]


def _row(name: str, server: Any) -> dict[str, Any]:
    statistics, now, trainer = server.statistics(), time.time(), server._trainer
    states = statistics.states
    ranked = sorted(server.versions, key=lambda version: (states[version.number] == "kept", -version.number))[:MOST_VERSIONS]
    versions = [
        [version.number, states[version.number], version.parent, now - version.created, statistics.answers_by_version.get(version.number, 0),
         [list(pair) for pair in version.metrics.items()][:MOST_METRICS]]
        for version in sorted(ranked, key=lambda version: -version.number)
    ]  # fmt: skip
    row = {"name": name, "latency": list(statistics.latency.values()), "versions": versions, "kept": statistics.versions}
    row |= {count: getattr(statistics, count) for count in COUNTS} | {"max_queue": server.max_queue}
    if trainer is not None:
        error = None if trainer.error is None else f"{type(trainer.error).__name__}: {trainer.error}"[:TEXT]
        row["trainer"] = {count: getattr(trainer, count) for count in LEARNED} | {"error": error}
    if isinstance(server, serving.Follower):
        behind = 1e3 * server.behind[-1] if server.behind else None
        row["follower"] = {"leader": server.leader[:TEXT], "connected": server.connected, "behind": behind, "bytes": server.bytes_received}
    return row


def quantile(counts: Sequence[float], share: float) -> float | None:
    """A quantile in microseconds, None without durations. As in Prometheus, they are spread evenly below each bound; at most the last finite one."""
    sums = list(accumulate(counts))
    if sums[-1] <= 0:
        return None
    wanted = share * sums[-1]
    place = next(i for i, found in enumerate(sums) if found >= wanted)
    low, high = (BOUNDS[place - 1] if place else 0.0), BOUNDS[place]
    if math.isinf(high):
        return round(low * 1e6)
    return round((low + (high - low) * (wanted - sums[place] + counts[place]) / counts[place]) * 1e6)


class ServerHistory:
    """The servers of all workers, and samples of their figures."""

    def __init__(self) -> None:
        #: by worker and name: seconds of the wall clock, and the row at that time
        self._last: dict[tuple[str, str], tuple[float, Mapping[str, Any]]] = {}
        self.samples: deque[tuple[int, list[Any]]] = deque(maxlen=SAMPLES)
        self.number = 0

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The servers as they are, in the order of workers and names."""
        return [{"worker": worker, **row} for (worker, _), (_, row) in sorted(self._last.items())]

    def forget(self, worker: str) -> None:
        """A worker has no servers any more."""
        self._last = {key: last for key, last in self._last.items() if key[0] != worker}

    def arrived(self, worker: str, rows: Any, now: float) -> None:
        """A worker has reported its servers at this second of the wall clock: rows as `server_rows` makes them, or anything."""
        before = self._last
        self.forget(worker)
        for row in read_rows(rows):
            key = worker, row["name"]
            self._last[key] = now, row
            then, earlier = before.get(key, (now, row))
            if then < now:
                self.number += 1
                self.samples.append((self.number, [*key, round(now, 3), *_figures(earlier, row, now - then)]))


def _figures(old: Mapping[str, Any], new: Mapping[str, Any], seconds: float) -> list[Any]:
    """p50 and p99 in microseconds, rows in the queue, version, promotions, rollbacks, answers and steps per second, between two rows."""
    counts = [max(0, count - earlier) for count, earlier in zip(new["latency"], old["latency"], strict=True)]
    grown = {name: max(0, new[name] - old[name]) for name in ("answers", "promoted", "rollbacks")}
    # a follower takes versions without counting: a lower number is a rollback of its leader
    rollbacks = max(grown["rollbacks"], int(new["version"] < old["version"]))
    promotions = max(grown["promoted"], int(new["version"] > old["version"]))
    steps = max(0, (new["trainer"] or {}).get("steps", 0) - (old["trainer"] or {}).get("steps", 0))
    figures = [quantile(counts, 0.5), quantile(counts, 0.99), new["queued"], new["version"], promotions, rollbacks]
    return [*figures, round(grown["answers"] / seconds, 1), round(steps / seconds, 1)]


def read_rows(rows: Any) -> list[dict[str, Any]]:
    """The servers in a report, checked and cut to size; malformed ones are left out."""
    found = []
    for row in rows[:MOST_SERVERS] if isinstance(rows, list) else ():
        match row:
            case {"name": str(name), "latency": [*latency]} if len(latency) == len(BOUNDS):
                versions, trainer, follower = (row.get(key) for key in ("versions", "trainer", "follower"))
                found.append({
                    "name": name[:TEXT],
                    "latency": [number_of(count) for count in latency],
                    **_numbers(row, (*COUNTS, "kept", "max_queue")),
                    "versions": list(_versions(versions[:MOST_VERSIONS] if isinstance(versions, list) else ())),
                    "trainer": {**_numbers(trainer, LEARNED), "error": _text(trainer.get("error"))} if isinstance(trainer, dict) else None,
                    "follower": {"leader": _text(follower.get("leader")) or "", "connected": follower.get("connected") is True,
                                 "behind": _finite(follower.get("behind")), "bytes": number_of(follower.get("bytes"))}
                    if isinstance(follower, dict) else None,
                })  # fmt: skip
    return found


def _numbers(row: Mapping[str, Any], names: Iterable[str]) -> dict[str, float]:
    return {name: number_of(row.get(name)) for name in names}


def _versions(rows: Iterable[Any]) -> Iterable[list[Any]]:
    for row in rows:
        match row:
            case [number, str(state), parent, age, answers, [*metrics]]:
                kept = [[str(pair[0])[:TEXT], _finite(pair[1])] for pair in metrics[:MOST_METRICS] if isinstance(pair, list) and len(pair) == 2]
                yield [number_of(number), state[:TEXT], None if parent is None else number_of(parent), number_of(age), number_of(answers), kept]


def _finite(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300 else None


def number_of(value: Any) -> float:
    """A finite number of at most 1e18, 0 for anything else."""
    return value if _finite(value) is not None and abs(value) < 1e18 else 0


def _text(value: Any) -> str | None:
    return None if value is None else str(value)[:TEXT]
