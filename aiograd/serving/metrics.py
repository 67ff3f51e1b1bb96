"""Metrics of a server for Prometheus, by ``prometheus_client`` (extra ``metrics``).

Every name has the label ``server``.

=============================================  =========  =====================================================================
`aiograd_serving_version`                      gauge      number of the version that serves
`aiograd_serving_versions`                     gauge      versions that are kept
`aiograd_serving_answers_total`                counter    answers by ``version``
`aiograd_serving_latency_seconds`              histogram  from a request to its answer
`aiograd_serving_queue_rows`                   gauge      rows that wait
`aiograd_serving_batches_total`                counter    batches that ran
`aiograd_serving_rows_total`                   counter    rows in these batches
`aiograd_serving_unanswered_total`             counter    requests by ``reason``: refused, expired, cancelled or failed
`aiograd_serving_published_total`              counter    versions that were published
`aiograd_serving_promotions_total`             counter    promotions
`aiograd_serving_rollbacks_total`              counter    rollbacks
`aiograd_serving_steps_total`                  counter    steps of the trainer
`aiograd_serving_failed_steps_total`           counter    steps of the trainer that failed
`aiograd_serving_rejected_total`               counter    candidates that the gate dropped
`aiograd_serving_follower_connected`           gauge      1 if the last request to the leader succeeded
`aiograd_serving_follower_behind_seconds`      gauge      from publishing to serving of the last version
`aiograd_serving_follower_received_bytes_total`  counter  bytes of payloads from the leader
=============================================  =========  =====================================================================
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from aiograd.serving.follower import Follower
from aiograd.serving.server import Server
from aiograd.serving.statistics import ServingStatistics
from aiograd.serving.trainer import Trainer


class ServingMetrics:
    """A collector of prometheus_client for one server.

    Args:
        server: the server; its metrics begin when it is entered.
        trainer: its trainer, if it has one.
        name: value of the label ``server``.

    >>> server = ag.serving.Server(ag.nn.Linear(2, 1))
    >>> metrics = ag.serving.ServingMetrics(server, name="scores")   # prometheus_client.REGISTRY.register(metrics)
    >>> metrics.describe()
    []
    """

    def __init__(self, server: Server, trainer: Trainer | None = None, *, name: str = "server") -> None:
        self.server = server
        self.trainer = trainer
        self.name = name

    def describe(self) -> list[Any]:
        """The names before the first values: none, names are told with the values.

        Returns:
            An empty list.
        """
        return []

    def collect(self) -> Iterator[Any]:
        """The metrics at this moment.

        Returns:
            Families of prometheus_client; none before the server is entered.
        """
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        if not self.server.has_version:
            return
        statistics, trainer = self.server.statistics(), self.trainer
        gauges = [
            ("version", "Number of the version that serves", statistics.version),
            ("versions", "Versions that are kept", statistics.versions),
            ("queue_rows", "Rows that wait", statistics.queued),
        ]
        counters = [
            ("batches", "Batches that ran", statistics.batches),
            ("rows", "Rows in the batches", statistics.rows),
            ("published", "Versions that were published", statistics.published),
            ("promotions", "Promotions", statistics.promoted),
            ("rollbacks", "Rollbacks", statistics.rollbacks),
        ]
        if trainer is not None:
            counters += [("steps", "Steps", trainer.steps), ("failed_steps", "Steps that failed", trainer.failures)]
            counters += [("rejected", "Candidates that the gate dropped", trainer.rejected)]
        if isinstance(self.server, Follower):
            behind = self.server.behind
            gauges += [("follower_connected", "1 if the last request to the leader succeeded", int(self.server.connected))]
            gauges += [("follower_behind_seconds", "From publishing to serving", behind[-1])] if behind else []  # type: ignore[list-item]
            counters += [("follower_received_bytes", "Bytes of payloads from the leader", self.server.bytes_received)]
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                metric = family(f"aiograd_serving_{name}", text, labels=["server"])
                metric.add_metric([self.name], value)
                yield metric
        answers = CounterMetricFamily("aiograd_serving_answers", "Answers by version", labels=["server", "version"])
        for number, count in statistics.answers_by_version.items():
            answers.add_metric([self.name, str(number)], count)
        yield answers
        unanswered = CounterMetricFamily("aiograd_serving_unanswered", "Requests without an answer", labels=["server", "reason"])
        for reason in ("refused", "expired", "cancelled", "failed"):
            unanswered.add_metric([self.name, reason], getattr(statistics, reason))
        yield unanswered
        latency = HistogramMetricFamily("aiograd_serving_latency_seconds", "From a request to its answer", labels=["server"])
        latency.add_metric([self.name], _buckets(statistics), statistics.latency_sum)
        yield latency


def _buckets(statistics: ServingStatistics) -> list[tuple[str, int]]:
    """The bounds of the histogram, each with the count of answers up to it."""
    bounds = ["+Inf" if bound == float("inf") else str(bound) for bound in statistics.latency]
    return list(zip(bounds, accumulate(statistics.latency.values()), strict=True))
