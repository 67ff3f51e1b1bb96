"""Metrics of a server, by prometheus_client's own parser."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

import aiograd as ag
from aiograd import serving
from tests.serving.models import Two, ones, state

prometheus_client = pytest.importorskip("prometheus_client")
parser = pytest.importorskip("prometheus_client.parser")


def read(metrics: serving.ServingMetrics) -> dict[tuple[str, str], float]:
    """Values by name and the label besides ``server``."""
    registry = prometheus_client.CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    found = {}
    for family in parser.text_string_to_metric_families(prometheus_client.generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels.pop("server") == "scores"
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


async def test_metrics() -> None:
    model = Two()
    server = serving.Server(model)
    trainer = serving.Trainer(
        server, ag.optim.SGD(model.parameters(), 0.1), lambda m, x, y: ((m(x) - y) ** 2).mean(), buffer=serving.ReplayBuffer(10)
    )
    metrics = serving.ServingMetrics(server, trainer, name="scores")
    assert read(metrics) == {}, "before the server is entered"
    async with server:
        await asyncio.gather(*(server.predict(ones()) for _ in range(3)))
        await server.publish(state(1.0))
        await server.predict(ones())
        await trainer.learn(ones(4), np.zeros((4, 1), np.float32))
        await trainer.step()
        server.rollback()
        found = read(metrics)
    expected = {
        ("aiograd_serving_version", ""): 2,
        ("aiograd_serving_versions", ""): 3,
        ("aiograd_serving_queue_rows", ""): 0,
        ("aiograd_serving_answers_total", "1"): 3,
        ("aiograd_serving_answers_total", "2"): 1,
        ("aiograd_serving_batches_total", ""): 2,
        ("aiograd_serving_rows_total", ""): 4,
        ("aiograd_serving_published_total", ""): 3,
        ("aiograd_serving_rollbacks_total", ""): 1,
        ("aiograd_serving_steps_total", ""): 1,
        ("aiograd_serving_failed_steps_total", ""): 0,
        ("aiograd_serving_unanswered_total", "expired"): 0,
        ("aiograd_serving_latency_seconds_count", ""): 4,
    }
    assert expected.items() <= found.items()
    assert found["aiograd_serving_latency_seconds_bucket", "+Inf"] == 4 and found["aiograd_serving_latency_seconds_sum", ""] > 0
