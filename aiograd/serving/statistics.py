"""Figures of a server: answers, refusals, latency, and comparisons of versions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.tensors.core import host_array

#: upper bounds of the latency histogram, in seconds
BOUNDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, float("inf"))


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
        answers_by_version: the number of answers by the number of the version.
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


class DifferenceSum:
    """The sum of differences between a shadow's outputs and the answers."""

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self._sum = 0.0
        self._count = 0

    def add(self, requests: int, answered: Any, found: Any) -> None:
        """Add the outputs of a batch; a Tensor or a tuple of them each."""
        left, right = _arrays(answered), _arrays(found)
        if [array.shape for array in left] != [array.shape for array in right]:
            self.fail(requests)
            return
        self.requests += requests
        for one, other in zip(left, right, strict=True):
            self._sum += float(np.abs(one.astype(np.float64) - other.astype(np.float64)).sum())
            self._count += one.size

    def fail(self, requests: int) -> None:
        """Count a batch for which the shadow raised."""
        self.requests += requests
        self.errors += requests

    @property
    def comparison(self) -> Comparison:
        """The figures so far."""
        return Comparison(self.requests, self.errors, self._sum / self._count if self._count else 0.0)


def _arrays(outputs: Any) -> list[Any]:
    return [host_array(output) for output in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]
