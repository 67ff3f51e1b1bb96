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
        self.server: Server = server
        self.trainer: Trainer | None = trainer
        self.name: str = name

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
        statistics, trainer, follower = self.server.statistics(), self.trainer, self.server

        def metric(family: Any, name: str, text: str, values: Any, label: str | None = None) -> Any:
            """A family with one value, or with one by each value of a label."""
            found = family(f"aiograd_serving_{name}", text, labels=["server", label] if label else ["server"])
            for key, value in values.items() if label else [("", values)]:
                found.add_metric([self.name, str(key)] if label else [self.name], value)
            return found

        yield metric(GaugeMetricFamily, "version", "Number of the version that serves", statistics.version)
        yield metric(GaugeMetricFamily, "versions", "Versions that are kept", statistics.versions)
        yield metric(GaugeMetricFamily, "queue_rows", "Rows that wait", statistics.queued)
        yield metric(CounterMetricFamily, "batches", "Batches that ran", statistics.batches)
        yield metric(CounterMetricFamily, "rows", "Rows in the batches", statistics.rows)
        yield metric(CounterMetricFamily, "published", "Versions that were published", statistics.published)
        yield metric(CounterMetricFamily, "promotions", "Promotions", statistics.promoted)
        yield metric(CounterMetricFamily, "rollbacks", "Rollbacks", statistics.rollbacks)
        yield metric(CounterMetricFamily, "answers", "Answers by version", statistics.answers_by_version, "version")
        unanswered = {reason: getattr(statistics, reason) for reason in ("refused", "expired", "cancelled", "failed")}
        yield metric(CounterMetricFamily, "unanswered", "Requests without an answer", unanswered, "reason")
        if trainer is not None:
            yield metric(CounterMetricFamily, "steps", "Steps of the trainer", trainer.steps)
            yield metric(CounterMetricFamily, "failed_steps", "Steps of the trainer that failed", trainer.failures)
            yield metric(CounterMetricFamily, "rejected", "Candidates that the gate dropped", trainer.rejected)
        if isinstance(follower, Follower):
            yield metric(GaugeMetricFamily, "follower_connected", "1 if the last request to the leader succeeded", int(follower.connected))
            if follower.behind:
                yield metric(GaugeMetricFamily, "follower_behind_seconds", "From publishing to serving of the last version", follower.behind[-1])
            yield metric(CounterMetricFamily, "follower_received_bytes", "Bytes of payloads from the leader", follower.bytes_received)
        latency = HistogramMetricFamily("aiograd_serving_latency_seconds", "From a request to its answer", labels=["server"])
        bounds = ["+Inf" if bound == float("inf") else str(bound) for bound in statistics.latency]
        buckets = list(zip(bounds, accumulate(statistics.latency.values()), strict=True))
        latency.add_metric([self.name], buckets, statistics.latency_sum)
        yield latency
