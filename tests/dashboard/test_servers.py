"""Servers on the dashboard and in a worker's metrics: their versions, and figures over time."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import aiograd as ag
from aiograd import serving
from aiograd.dashboard.board import Board
from aiograd.dashboard.metrics import metrics_page
from aiograd.dashboard.reporter import Reporter
from aiograd.dashboard.servers import MOST_VERSIONS, quantile, server_rows
from aiograd.distributed import Service
from aiograd.distributed.messages.library import ReportRequest
from aiograd.running.scalars import LOG
from aiograd.serving.registry import REGISTRY
from aiograd.serving.statistics import BOUNDS
from tests.dashboard.test_board import answer, report
from tests.distributed.workers import until, workers
from tests.serving.models import Two, ones, state


def trainer_of(server: serving.Server) -> serving.Trainer:
    optimizer = ag.optim.SGD(server.model.parameters(), 0.1)
    return serving.Trainer(server, optimizer, lambda model, x, y: ((model(x) - y) ** 2).mean(), buffer=serving.ReplayBuffer(10))


def row(**changes: Any) -> dict[str, Any]:
    """A row of a server that has answered nothing yet."""
    counts = dict.fromkeys(("version", "answers", "queued", "promoted", "rollbacks"), 1)
    return {"name": "Two 1", "latency": [0] * len(BOUNDS), "versions": [[1, "serves", None, 2.0, 5, [["loss", 0.5]]]], **counts, **changes}


def counted(**by_bound: int) -> list[int]:
    """Counts of durations: ``counted(b2=3)`` has three below the bound of 0.002 s."""
    return [by_bound.get(f"b{place}", 0) for place in range(len(BOUNDS))]


def test_a_quantile_lies_between_bounds() -> None:
    assert quantile(counted(), 0.5) is None
    assert quantile(counted(b2=4), 0.5) == 1500, "half of the way from 1 to 2 ms"
    assert quantile(counted(b0=99, b5=1), 0.99) == 500 and quantile(counted(b0=98, b5=2), 0.99) == 15_000
    assert quantile(counted(b13=1), 0.5) == 5_000_000, "at most the highest finite bound"


async def test_a_row_has_the_versions_and_what_they_do() -> None:
    async with serving.Server(Two(), keep=20) as server:
        trainer = trainer_of(server)
        for value in (1.0, 2.0):
            await server.publish(state(value), metrics={"loss": value, "odd": float("nan")})
        candidate = await server.publish(state(3.0), promote=False)
        server.shadow(candidate.number, 0.25)
        server.split({3: 0.9, 2: 0.1})
        await server.predict(ones(), version=2)
        (found,) = server_rows("here", with_others=True)
        assert [version[:3] for version in found["versions"]] == [
            [4, "candidate, shadow 25 %", 3], [3, "serves, split 90 %", 2], [2, "split 10 %", 1], [1, "kept", None],
        ]  # fmt: skip
        assert found["versions"][2][4:] == [1, [["loss", 1.0], ["odd", pytest.approx(float("nan"), nan_ok=True)]]]
        assert (found["version"], found["published"], found["max_queue"]) == (3, 4, 1024) and "follower" not in found
        await trainer.learn(ones(4), np.zeros((4, 1), np.float32))
        await trainer.step()
        server.rollback(2)
        server.shadow(None)
        server.promote(4)
        (found,) = server_rows("here", with_others=True)
        assert {version[0]: version[1] for version in found["versions"]} == {5: "kept", 4: "serves", 3: "kept", 2: "kept", 1: "kept"}
        assert found["trainer"] == {"steps": 1, "failures": 0, "rejected": 0, "rollbacks": 0, "error": None}
        for value in range(MOST_VERSIONS):
            await server.publish(state(float(value)))
        server.rollback(4)
        (found,) = server_rows("here", with_others=True)
        numbers = [version[0] for version in found["versions"]]
        assert len(numbers) == MOST_VERSIONS and numbers[-1] == 4 and numbers == sorted(numbers, reverse=True), "the one that serves is not left out"
    assert server_rows("here", with_others=True) == [], "a closed server has gone"


async def test_a_server_that_is_dropped_is_not_kept_alive() -> None:
    server = await serving.Server(Two()).__aenter__()
    trainer_of(server)
    assert len(REGISTRY.servers_of("here", with_others=True)) == 1
    del server
    gc.collect()
    assert not REGISTRY.servers_of("here", with_others=True)


async def test_a_process_reports_a_server_once_and_a_follower_by_its_worker() -> None:
    service = Service()
    async with workers("driver", "left", service=service) as (driver, left), serving.Server(Two(2.0)) as server:
        serving.lead(service, server)
        async with serving.Follower(left, "driver", Two()) as follower:
            reporters = Reporter(driver._core), Reporter(left._core)
            try:
                here = reporters[0].report(ReportRequest(0, False, 0, "", 10))["servers"]
                there = reporters[1].report(ReportRequest(0, False, 0, LOG.process, 10))["servers"]
            finally:
                for reporter in reporters:
                    reporter.stop()
            assert [found["name"].split()[0] for found in (*here, *there)] == ["Two", "Two"] and here[0]["name"] != there[0]["name"]
            await server.publish(state(3.0))
            await until(lambda: follower.connected and follower.behind)
            (found,) = server_rows("left", with_others=False)
            assert found["follower"] == {"leader": "driver", "connected": True, "behind": 1e3 * follower.behind[-1], "bytes": follower.bytes_received}


def test_figures_over_time() -> None:
    board = Board("driver")
    board.arrived("left", report(servers=[row()]), 1.0, 1.0)
    assert answer(board)["serving"] == [] and answer(board)["servers"][0]["worker"] == "left"
    later = row(latency=counted(b2=4), answers=5, queued=7, version=3, promoted=3, trainer={"steps": 10})
    board.arrived("left", report(servers=[later]), 3.0, 3.0)
    board.arrived("left", report(servers=[{**later, "version": 2, "rollbacks": 2, "queued": 0}]), 4.0, 4.0)
    data = answer(board)
    assert data["serving"] == [["left", "Two 1", 3.0, 1500, 1990, 7, 3, 2, 0, 2.0, 5.0], ["left", "Two 1", 4.0, None, None, 0, 2, 0, 1, 0.0, 0.0]]
    assert data["serving_cursor"] == 2 and data["servers"][0]["trainer"]["steps"] == 10
    board.arrived("left", report(servers=[row(version=1)]), 5.0, 5.0)
    assert answer(board)["serving"][-1][3:] == [None, None, 1, 1, 0, 1, 0.0, 0.0], "counts that begin anew are no negative rates"


def test_the_servers_of_a_worker_leave_with_it() -> None:
    board = Board("driver")
    for name in ("right", "left"):
        board.arrived(name, report(servers=[row()]), 1.0, 1.0)
    assert [found["worker"] for found in answer(board)["servers"]] == ["left", "right"]
    board.failed("left", "silent", "late", 2.0)
    assert len(answer(board)["servers"]) == 2
    board.failed("left", "lost", "it crashed", 3.0)
    assert [found["worker"] for found in answer(board)["servers"]] == ["right"]
    board.forget("right")
    assert answer(board)["servers"] == []


def test_odd_rows_are_left_out_and_odd_values_are_cut() -> None:
    board = Board("driver")
    odd = [None, {}, row(name=3), row(latency=[1]), row(latency=None), row(versions=[[1], None], queued="x", trainer=3, follower={"connected": 1})]
    board.arrived("left", report(servers=odd), 1.0, 1.0)
    (found,) = answer(board)["servers"]
    assert (found["versions"], found["queued"], found["trainer"]) == ([], 0, None)
    assert found["follower"] == {"leader": "", "connected": False, "behind": None, "bytes": 0}
    board.arrived("left", report(servers=[row(name="n" * 1000)] * 100), 2.0, 2.0)
    assert [len(found["name"]) for found in answer(board)["servers"]] == [160]


async def test_the_metrics_of_a_worker_have_each_name_once() -> None:
    async with workers("driver") as (driver,), serving.Server(Two()) as one, serving.Server(Two()) as other:
        for server in (one, one, other):
            await server.predict(ones())
        text = metrics_page(driver._core).body.decode()
        types = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(types) == len(set(types)) and "aiograd_serving_latency_seconds" in types
        families = {family.name: family for family in text_string_to_metric_families(text)}
        answers = {sample.labels["server"]: sample.value for sample in families["aiograd_serving_answers"].samples}
        assert sorted(answers.values()) == [1, 2] and all(name.startswith("Two ") for name in answers)
    assert "aiograd_serving" not in metrics_page(driver._core).body.decode()
