"""The page that Prometheus reads, by prometheus_client's own parser."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.dashboard import metrics
from aiograd.dashboard.monitor import DashboardMonitor
from aiograd.distributed import loop_lag
from aiograd.distributed.rpc.http.pages import PageRequest
from tests.distributed.http_support import get
from tests.distributed.workers import until, workers
from tests.serving.models import Two, ones
from tests.support import assert_awaiting_raises

service = dist.Service()
GRAFANA = Path(__file__).parents[2] / "examples" / "grafana_dashboard.json"


@service.function
def square(x: ag.Tensor) -> ag.Tensor:
    return (x * x).sum()


def families(core: Any) -> dict[str, Any]:
    page = metrics.metrics_page(core)
    assert page.status == 200 and page.content_type.startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(page.body.decode())}


def value(family: Any, sample_name: str, /, **labels: str) -> float:
    (sample,) = [each for each in family.samples if each.name == sample_name and labels.items() <= each.labels.items()]
    return float(sample.value)


async def test_counts_of_a_step() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        async with driver.context() as ctx:
            x = ag.tensor([1.0, 2.0], requires_grad=True)
            await ctx.backward(await driver.call("left", "square", x))
        await assert_awaiting_raises(ag.errors.NotExposedError, None, driver.call("left", "nothing"))
        await until(lambda: not left.statistics().contexts)
        found = families(driver._core)
        assert value(found["aiograd_passes"], "aiograd_passes_total", outcome="committed", worker="driver") == 1
        assert value(found["aiograd_exchange_seconds"], "aiograd_exchange_seconds_count", exchange="call") == 2
        assert value(found["aiograd_exchange_seconds"], "aiograd_exchange_seconds_bucket", exchange="call", le="+Inf") == 2
        buckets = [each.value for each in found["aiograd_exchange_seconds"].samples if each.labels.get("exchange") == "call" and "le" in each.labels]
        assert buckets == sorted(buckets) and len(buckets) == len(metrics.BOUNDS) + 1
        assert value(found["aiograd_exchange_failures"], "aiograd_exchange_failures_total", exchange="call") == 1
        assert value(found["aiograd_peer_connected"], "aiograd_peer_connected", peer="left") == 1
        assert value(found["aiograd_peer_bytes"], "aiograd_peer_bytes_total", peer="left", direction="out") > 0
        assert value(found["aiograd_resident_memory_bytes"], "aiograd_resident_memory_bytes") > 1e6
        assert value(families(left._core)["aiograd_exchange_seconds"], "aiograd_exchange_seconds_count", exchange="serve") == 1


async def test_the_lag_of_the_loop_is_sampled_from_the_first_question_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_lag, "INTERVAL", 0.0)
    async with workers("driver") as (driver,):
        assert not driver._core.loop_lag.is_sampled, "nothing is sampled before anything asks"
        assert value(families(driver._core)["aiograd_loop_lag_seconds"], "aiograd_loop_lag_seconds_count", worker="driver") == 0
        await until(lambda: driver._core.loop_lag.histogram.count > 1)
        driver._core.loop_lag.histogram.add(0.2, False)
        found = families(driver._core)["aiograd_loop_lag_seconds"]
        counts = {float(each.labels["le"]): each.value for each in found.samples if "le" in each.labels}
        assert counts[0.1] < counts[0.25] and counts[float("inf")] == driver._core.loop_lag.histogram.count
        assert value(found, "aiograd_loop_lag_seconds_sum") >= 0.2


async def test_scalars_with_odd_names_are_labels() -> None:
    name = 'quote " backslash \\ <b> }'
    async with workers("driver") as (driver,):
        ag.log(name, 2.5)
        assert value(families(driver._core)["aiograd_scalar"], "aiograd_scalar", name=name, worker="driver") == 2.5
        ag.log(name, float("nan"))
        text = metrics.metrics_page(driver._core).body.decode()
        assert len(list(text_string_to_metric_families(text))) > 5


async def test_every_name_is_documented_and_the_grafana_file_asks_for_names_that_exist() -> None:
    async with workers("driver") as (driver,):
        names = set()
        for line in metrics.metrics_page(driver._core).body.decode().splitlines():
            if line.startswith("# TYPE"):
                names.add(line.split()[2])
    documented = set(re.findall("`(aiograd_[a-z_]+)`", metrics.__doc__ or ""))
    assert names == documented
    asked = {name for name in re.findall("aiograd_[a-z_]+", " ".join(asked_of_grafana())) if not name.startswith("aiograd_serving_")}
    assert len(asked) > 8 and {re.sub("_(bucket|sum|count)$", "", name) for name in asked} <= documented


def asked_of_grafana() -> list[str]:
    """The expressions of all panels."""
    return [target["expr"] for panel in json.loads(GRAFANA.read_text())["panels"] for target in panel.get("targets", ())]


async def test_the_grafana_file_shows_every_figure_of_a_server_by_labels_that_exist() -> None:
    leading = dist.Service()
    async with workers("driver", "left", service=leading) as (driver, left), serving.Server(Two(2.0)) as server:
        serving.lead(leading, server)
        optimizer, buffer = ag.optim.SGD(server.model.parameters(), 0.1), serving.ReplayBuffer(10)
        trainer = serving.Trainer(server, optimizer, lambda model, x, y: ((model(x) - y) ** 2).mean(), buffer=buffer)
        await trainer.learn(ones(4), ones(4))
        await trainer.step()
        async with serving.Follower(left, "driver", Two()) as follower:
            await server.publish()
            await follower.reach(3)
            await until(lambda: follower.behind)
            await follower.predict(ones())
            samples = [sample for core in (driver._core, left._core) for family in families(core).values() for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        if sample.name.startswith("aiograd_serving_") and not sample.name.endswith("_created"):
            labels.setdefault(sample.name, set()).update(sample.labels)
    shown = set()
    for expression in asked_of_grafana():
        for name in re.findall("aiograd_serving_[a-z_]+", expression):
            grouped = {label.strip() for labels in re.findall(r"by \((.*?)\)", expression) for label in labels.split(",")}
            matched = set(re.findall(r"(\w+)=~", expression))
            assert name in labels and grouped | matched <= labels[name], (name, expression)
            shown.add(re.sub("_bucket$", "", name))
    assert shown == {re.sub("_(bucket|sum|count)$", "", name) for name in labels}


def request(**changes: Any) -> PageRequest:
    return PageRequest("/metrics", {}, {}, "", False, False, 1)._replace(**changes)


async def test_metrics_are_for_this_machine_and_for_those_with_the_token() -> None:
    async with workers("driver") as (driver,):
        monitor = DashboardMonitor(driver._core)
        assert monitor.metrics(request(is_local=True)).status == 200
        for authorization in ("", "Bearer ", "Bearer None", "Bearer x", "Basic x"):
            assert monitor.metrics(request(authorization=authorization)).status == 401
        monitor._token = "a" * 20
        assert monitor.metrics(request(authorization="Bearer " + "a" * 20)).status == 200
        assert monitor.metrics(request(authorization="Bearer " + "a" * 19)).status == 401


@pytest.mark.net
async def test_a_proxy_does_not_make_the_world_local() -> None:
    async with dist.Worker("driver") as worker:
        assert (await get(worker.url, "/metrics"))[0] == 200
        for header in ("X-Forwarded-For: 1.2.3.4\r\n", "Forwarded: for=1.2.3.4\r\n"):
            assert (await get(worker.url, "/metrics", header))[0] == 401


async def test_without_prometheus_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    async with workers("driver") as (driver,):
        page = metrics.metrics_page(driver._core)
        assert page.status == 501 and b"aiograd[metrics]" in page.body
