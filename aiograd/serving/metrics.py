"""Metrics of a server for Prometheus, by ``prometheus_client`` (extra ``metrics``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from aiograd.serving.follower import Follower
from aiograd.serving.server import Server
from aiograd.serving.trainer import Trainer


class ServingMetrics:
    """A collector of prometheus_client for one server. Names begin with ``aiograd_serving_`` and have the label ``server``.

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
        self.server, self.trainer, self.name = server, trainer, name

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

        if self.server._serving is None:
            return
        statistics, trainer, follower = self.server.statistics(), self.trainer, self.server if isinstance(self.server, Follower) else None
        gauges: list[tuple[str, str, float]] = [
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
            counters += [("steps", "Steps of the trainer", trainer.steps), ("failed_steps", "Steps of the trainer that failed", trainer.failures)]
            counters += [("rejected", "Candidates that the gate dropped", trainer.rejected)]
        if follower is not None:
            gauges += [("follower_connected", "1 if the last request to the leader succeeded", int(follower.connected))]
            gauges += [("follower_behind_seconds", "From publishing to serving of the last version", seconds) for seconds in [*follower.behind][-1:]]
            counters += [("follower_received_bytes", "Bytes of payloads from the leader", follower.bytes_received)]
        for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, text, value in rows:
                metric = family(f"aiograd_serving_{name}", text, labels=["server"])
                metric.add_metric([self.name], value)
                yield metric
        unanswered = {reason: getattr(statistics, reason) for reason in ("refused", "expired", "cancelled", "failed")}
        for name, text, label, counts in (
            ("answers", "Answers by version", "version", statistics.answers_by_version),
            ("unanswered", "Requests without an answer", "reason", unanswered),
        ):
            metric = CounterMetricFamily(f"aiograd_serving_{name}", text, labels=["server", label])
            for key, count in counts.items():
                metric.add_metric([self.name, str(key)], count)
            yield metric
        latency = HistogramMetricFamily("aiograd_serving_latency_seconds", "From a request to its answer", labels=["server"])
        bounds = ["+Inf" if bound == float("inf") else str(bound) for bound in statistics.latency]
        buckets = list(zip(bounds, accumulate(statistics.latency.values()), strict=True))
        latency.add_metric([self.name], buckets, statistics.latency_sum)
        yield latency
