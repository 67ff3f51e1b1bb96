"""Workers that watch each other: reports, losses and returns, other principals, and no cost when nobody looks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.dashboard.collector import Collector
from aiograd.dashboard.monitor import DashboardMonitor
from aiograd.dashboard.pages import load_files
from aiograd.dashboard.reporter import Reporter
from aiograd.distributed.messages.fields import TraceContext
from aiograd.distributed.messages.library import ReportRequest
from aiograd.errors import NotExposedError, ProtocolError
from aiograd.running.modes import DEFAULT_MODE
from tests.distributed.local_steps.learners import Learner
from tests.distributed.local_steps.learners import service as rounds_service
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, until, workers
from tests.support import assert_awaiting_raises

service = dist.Service()
#: a parameter of the functions: a worker that has nothing to commit is told of no commit
WEIGHT = ag.tensor(1.0, requires_grad=True)


@service.function
def square(x: ag.Tensor) -> ag.Tensor:
    return (x * x * WEIGHT).sum()


@service.function("<b>x</b>")
async def odd(x: ag.Tensor) -> ag.Tensor:
    ag.log("<i>y</i>", 1.5, 3)
    return (x * WEIGHT).sum()


@contextlib.contextmanager
def watching(worker: dist.Worker, *peers: dist.Worker) -> Iterator[tuple[Collector, Reporter]]:
    """A dashboard without its page; in the end nobody watches any more."""
    reporter = Reporter(worker._core)
    try:
        yield Collector(worker._core, reporter, dist.DashboardOptions(events_per_second=8000)), reporter
    finally:
        for each in (reporter, *(peer._core.watch for peer in peers)):
            if isinstance(each, Reporter):
                each.stop()


async def step(worker: dist.Worker, function: str = "square") -> None:
    async with worker.context() as ctx:
        x = ag.tensor([1.0, 2.0], requires_grad=True)
        await ctx.backward(await worker.call("left", function, x))


async def test_a_step_is_seen_on_both_workers() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        with watching(driver, left) as (collector, reporter):
            await collector.ask_round()
            await step(driver, "<b>x</b>")
            collector._rounds = 0
            await collector.ask_round()
            collector.board.draw_graph(1.0)
            data = json.loads(collector.board.answer(0, 0, 0, 1.0))
            assert {worker["name"]: worker["state"] for worker in data["workers"]} == {"driver": "running", "left": "running"}
            seen = {(event[0], event[1], event[2], event[13]) for event in data["events"]}
            assert {
                ("driver", "<b>x</b>", "call", "left"), ("left", "<b>x</b>", "serve", "driver"), ("driver", "gradients", "send", "left"),
                ("left", "gradients", "receive", "driver"), ("driver", "commit", "commit", "left"), ("left", "sum", "forward", None),
            } <= seen  # fmt: skip
            assert not any("dashboard" in event[1] for event in data["events"]), "its own questions are no work"
            assert ("left", "SumBackward", "backward") in {event[:3] for event in map(tuple, data["events"])}
            assert {frame["worker"] for frame in data["graph"]["frames"]} == {"driver", "left"}
            assert sum(arrow["crosses"] for arrow in data["graph"]["arrows"]) == 2, "gradients go there and come back"
            assert ["left", "<i>y</i>", 3, 1.5] in [row[:4] for row in data["scalars"]]


async def test_rounds_of_local_steps_are_in_the_data_of_the_page() -> None:
    async with workers("driver", "w0", "w1", service=rounds_service) as (driver, *_):
        with watching(driver) as (collector, _):
            await collector.ask_round()
            before = json.loads(collector.board.answer(0, 0, 0, 1.0))["scalar_cursor"]
            async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, steps=2, optimizer=ag.optim.SGD) as training:
                records = [await training.round(), await training.round()]
                figures = training.statistics()
            await collector.ask_round()
            logged = [row for row in json.loads(collector.board.answer(0, before, 0, 1.0))["scalars"]]
            names = "loss rounds members late lost bytes_sent bytes_received seconds_computing seconds_waiting utilisation".split()
            assert [row[:3] for row in logged] == [["driver", f"local_steps/{name}", record.number] for record in records for name in names]
            assert 0 < logged[9][3] < 1, "the time of the round itself is in it"
            last = {row[1].partition("/")[2]: row[3] for row in logged[len(names) :]}
            assert (last["loss"], last["rounds"], last["members"]) == (records[1].loss, 2, 2)
            assert 0 < last["bytes_sent"] <= figures.bytes_sent and last["utilisation"] == pytest.approx(figures.utilisation, rel=0.2)
    panel = load_files()["/dashboard/rounds.js"].body.decode()
    shown = {*re.findall(r"now\.(\w+)", panel), *re.findall(r'grown\("(\w+)"\)', panel)}
    assert shown == {*names} - {"utilisation"}, "the panel reads the figures that are logged"


async def test_nothing_is_recorded_before_and_after_somebody_watches() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        await step(driver)
        assert driver._core.watch is left._core.watch is None and DEFAULT_MODE.profiler is None
        with watching(driver, left) as (collector, reporter):
            await collector.ask_round()
            watched = left._core.watch
            assert driver._core.watch is reporter and isinstance(watched, Reporter) and DEFAULT_MODE.profiler is not None
            reporter.stop()
            watched.stop()
            assert driver._core.watch is left._core.watch is None and DEFAULT_MODE.profiler is None
            before = collector.board._number
            await step(driver)
            assert collector.board._number == before


async def test_a_lost_worker_is_lost_until_it_is_back() -> None:
    board = Switchboard()
    async with dist.Worker("driver", secret=SECRET, transport=board.transport("driver")) as driver:
        with watching(driver) as (collector, reporter):
            for _ in range(2):
                async with dist.Worker("left", service=service, secret=SECRET, transport=board.transport("left")) as left:
                    driver.add_peer("left", left.url)
                    await collector.ask_round()
                    assert collector.board.worker("left").state == "running"
                await collector.ask_round()
                assert collector.board.worker("left").state == "lost" and collector.board.worker("left").why
            driver.remove_peer("left")


async def test_other_principals_learn_nothing_and_are_not_shown() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        monitor = DashboardMonitor(left._core)
        stranger = type("Stranger", (), {"principal": "somebody else", "name": "driver"})()
        await assert_awaiting_raises(NotExposedError, "other principals", monitor.report(stranger, ReportRequest(0, False, 0, "", 9)))
        assert left._core.watch is None
        watcher = Reporter(left._core)
        watcher.watch(100)
        assert left._core.recorder(stranger, TraceContext("", True)) is None
        watcher.stop()


@pytest.mark.parametrize(
    "values", [(), (0,), ("a", True, 0, ""), (0, 1, 0, "", 1), (0, True, 0, "", 0), (0, True, 0, "x" * 500, 1), (0, True, 0, "", 1, 2)], ids=str
)
async def test_malformed_requests_are_refused(values: tuple[Any, ...]) -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        asking = driver.call_apart("left", ReportRequest.form.name, *values)
        await assert_awaiting_raises(ProtocolError, "a malformed aiograd.dashboard.report: ", asking)
        assert left._core.watch is None


async def test_a_report_fits_a_message_however_long_the_names_are() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        with watching(driver, left) as (collector, reporter):
            await collector.ask_round()
            recorder = left._core.watch.recorder(True)  # type: ignore[union-attr]
            left._core.watch.sampler.allowance.left = 1e6  # type: ignore[union-attr]
            for number in range(3000):
                recorder.add("n" * 1000, "forward", "o" * 1000, number, number + 1, None, None, ((10**6,) * 40,), 1, None, "l" * 1000, "p" * 100)
            await collector.ask_round()
            assert collector.board.worker("left").state == "running"


async def test_of_many_workers_some_are_asked_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aiograd.dashboard.collector.AT_ONCE", 4)
    async with workers("driver", service=service) as (driver,):
        with watching(driver) as (collector, reporter):
            asked: list[str] = []

            async def ask(name: str, with_graphs: bool) -> None:
                asked.append(name)

            monkeypatch.setattr(collector, "_ask", ask)
            for number in range(10):
                driver.add_peer(f"w{number}", "memory://nowhere")
            for _ in range(5):
                await collector.ask_round()
            assert len(asked) == 20 and {asked.count(f"w{number}") for number in range(10)} == {2}
            assert len(collector.board.workers) == 11


async def test_the_collector_sleeps_when_the_page_is_closed() -> None:
    async with workers("driver", service=service) as (driver,):
        reporter = Reporter(driver._core)
        collector = Collector(driver._core, reporter, dist.DashboardOptions(interval=0.001))
        assert not collector.is_running
        collector.page_asked()
        await until(lambda: collector.board.workers)
        assert collector.is_running
        collector._asked_at -= 1000.0
        await asyncio.wait((collector._task,))  # type: ignore[arg-type]
        assert not collector.is_running
        collector.page_asked()
        assert collector.is_running
        await collector.aclose()
        reporter.stop()


async def test_the_meter_counts_exchanges() -> None:
    async with workers("driver", "left", service=service) as (driver, left):
        await step(driver)
        await assert_awaiting_raises(ag.errors.NotExposedError, None, driver.call("left", "nothing"))
        here, there = driver._core.meter.histograms, left._core.meter.histograms

        def counted(meters: Any) -> dict[str, tuple[int, int]]:
            return {name: (meter.count, meter.failed) for name, meter in meters.items() if meter.count}

        assert counted(here) == {"call": (2, 1), "send": (1, 0), "commit": (1, 0), "pass": (1, 0)} | counted(here)
        assert counted(here)["call"] == (2, 1) and counted(here)["pass"] == (1, 0)
        assert counted(there)["serve"] == (1, 0) and counted(there)["receive"] == (1, 0)
