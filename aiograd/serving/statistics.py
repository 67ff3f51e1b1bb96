"""Figures of a server: answers, refusals, latency, and comparisons of versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

#: upper bounds of the latency histogram, in seconds
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, float("inf"))


#: versions of which answers are counted, the last ones
MOST_COUNTED = 1000


@dataclass(frozen=True)
class Comparison:
    """Figures of a version that is computed beside the one that serves.

    Attributes:
        requests: the number of requests that it computed too.
        errors: the number of requests for which it failed, or returned other shapes.
        mean_difference: mean absolute difference of its values from the answers; 0.0 where there is none yet.

    >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
    ...     server.shadow(1)
    ...     server.statistics().comparisons
    {1: Comparison(requests=0, errors=0, mean_difference=0.0)}
    """

    requests: int
    errors: int
    mean_difference: float


@dataclass(frozen=True)
class ServingStatistics:
    """Figures of a server since it was entered.

    Attributes:
        version: number of the version that serves.
        versions: the number of versions that are kept.
        published: the number of versions that were published.
        promoted: the number of promotions, publications included.
        rollbacks: the number of rollbacks.
        answers: the number of answered requests.
        batches: the number of batches that ran.
        rows: the number of rows in these batches.
        queued: the number of rows that wait.
        refused: the number of requests that found the queue full or the server draining.
        expired: the number of requests that were not answered before their deadline.
        cancelled: the number of requests that were cancelled.
        failed: the number of requests that failed because the forward raised.
        answers_by_version: the number of answers by the number of the version, of the last 1,000 versions that have answered.
        latency: the number of answers by the upper bound of their duration in seconds, from the request to its answer.
        comparisons: figures of shadows by the number of the version.
        latency_sum: the sum of the durations in `latency`, in seconds.
        states: the state of each kept version by its number: "serves", "candidate" (has never served), "split 10 %" or "shadow 10 %" with its
            share, several of these joined by commas, or "kept".

    >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
    ...     answer = await server.predict(np.ones((3, 2), np.float32))
    ...     statistics = server.statistics()
    >>> statistics.answers, statistics.rows, statistics.answers_by_version
    (1, 3, {1: 1})
    """

    version: int
    versions: int
    published: int
    promoted: int
    rollbacks: int
    answers: int
    batches: int
    rows: int
    queued: int
    refused: int
    expired: int
    cancelled: int
    failed: int
    answers_by_version: Mapping[int, int]
    latency: Mapping[float, int]
    comparisons: Mapping[int, Comparison]
    latency_sum: float = 0.0
    states: Mapping[int, str] = field(default_factory=dict)
