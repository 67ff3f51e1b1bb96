"""Asking workers what waits: each once, of one principal, with silent ones named, and answers that a peer has made up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import asking
from aiograd.distributed.cluster.base import BaseCluster
from aiograd.distributed.kinds import Kind
from aiograd.distributed.messages.calls import AskWaits
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.failure_detector import FailureDetector
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.wait_tables import MOST, OTHERS
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, EngineClosedError, UnknownPeerError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, SimulatedNetwork
from aiograd.transaction.tree import FANOUT, branches
from tests.distributed.memory import Switchboard
from tests.distributed.workers import SECRET, exposing, simulate, two_principals, workers
from tests.support import run_by
from tests.sweeps import swept

in_time = run_by(lambda test: simulate(test), given=0)


async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


service = exposing(sleep)


def answering(worker: dist.Worker, answer: Callable[[], Any]) -> None:
    """Let a worker answer something else."""

    async def serve(caller: Any, message: AskWaits, timeout: float) -> Any:
        found = answer()
        return await found if asyncio.iscoroutine(found) else found

    worker._core.serve({AskWaits: serve})


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


# ---------------------------------------------------------------- principals


@in_time
async def test_of_other_principals_there_is_a_count() -> None:
    server, tenant = two_principals()
    async with workers("a", "b", "x", service=service, secrets={"b": server, "x": tenant}) as (a, b, x):
        calls = [asyncio.create_task(each) for each in (a.call("b", "sleep", 5.0), x.call("b", "sleep", 5.0), x.call("b", "sleep", 5.0))]
        await asyncio.sleep(1.0)
        (others,) = [wait for wait in (await a.why("b")).waits if wait.task == OTHERS]
        mine = [wait for wait in (await a.why("b")).waits if wait.task != OTHERS]
        assert [wait.task.partition(" (")[0] for wait in mine] == ["call 1 of a"] and others == dist.Wait("b", OTHERS, what="2 waits")
        theirs = (await x.why("b")).waits
        assert [wait.task.partition(" (")[0] for wait in theirs] == ["call 1 of x", "call 2 of x", OTHERS] and theirs[-1].what == "1 waits"
        assert "sleep" not in str(theirs[-1]) and len(asking.waits(b._core)) == 3
        assert set((await a.why()).silent) == {"x"} and "AuthenticationError" in (await a.why()).silent["x"]
        await ended(*calls)


# ---------------------------------------------------------------- silence


@in_time
async def test_workers_without_an_answer_are_named() -> None:
    board = Switchboard()
    async with workers("a", "old", "stuck", "gone", "failing", "locked", "there", service=service, board=board) as (a, *others):
        old, stuck, gone, failing, locked, there = others
        del old._core.handlers[AskWaits.form.kind]
        answering(stuck, lambda: asyncio.sleep(60.0))
        answering(failing, lambda: 1 // 0)
        await gone.aclose()
        locked._core.endpoint.keyring._keys = {}
        call = asyncio.create_task(a.call("there", "sleep", 5.0))
        await asyncio.sleep(0.1)
        before = asyncio.get_running_loop().time()
        report = await a.why(timeout=2.0)
        assert asyncio.get_running_loop().time() - before <= 2.1 and {wait.worker for wait in report.waits} == {"a", "there"}
        found = {name: reason.partition(":")[0] for name, reason in report.silent.items()}
        assert found.keys() >= {"old", "stuck", "gone", "failing"}
        assert (found["stuck"], found["gone"], found["failing"]) == ("DeadlineError", "WorkerLostError", "RemoteError")
        assert "unknown kind 12" in report.silent["old"], report.silent
        assert (await a.why("old")).silent == {"old": report.silent["old"]}
        await ended(call)


@in_time
async def test_bad_arguments() -> None:
    async with workers("a", "b", service=service) as (a, b):
        for timeout in (0, -1.0, float("nan"), 1e9, "1", None, True):
            with pytest.raises((ArgumentError, ArgumentTypeError), match="timeout"):
                await a.why(timeout=timeout)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="expected the name of a worker"):
            await a.why(3)  # type: ignore[arg-type]
        with pytest.raises(UnknownPeerError, match=r"why\('z'\).*it knows b"):
            await a.why("z")
        await b.aclose()
        with pytest.raises(DistributedError, match="not open"):
            await b.why()
    with pytest.raises(DistributedError, match="not open"):
        await dist.Worker("c", secret=SECRET).why()
    with pytest.raises(EngineClosedError):
        await BaseCluster().why()


@in_time
async def test_a_cluster_asks_as_its_driver_does() -> None:
    async with workers("driver", "b", service=service) as (driver, _):
        call = asyncio.create_task(driver.call("b", "sleep", 5.0))
        await asyncio.sleep(1.0)
        cluster = BaseCluster()
        cluster._roster = SimpleNamespace(driver=driver)  # type: ignore[assignment]
        assert {wait.worker for wait in (await cluster.why(timeout=3.0)).waits} == {"driver", "b"}
        await ended(call)


# ---------------------------------------------------------------- answers that are made up


ROW = {"worker": "b", "task": "call 1"}


@pytest.mark.parametrize(
    "answer",
    [
        None, 5, b"\xff", "", "{", "[]", '{"waits": 3}', '{"waits": [3]}', '{"waits": [{"worker": "b"}]}', '{"waits": [{"worker": 5, "task": "x"}]}',
        '{"waits": [{"worker": "b", "task": "x", "seconds": -1}]}', "[" * 100_000, ["x"], {"waits": []}, ag.ones(3), '{"waits": [], "seconds": NaN}',
    ],
)  # fmt: skip
@in_time
async def test_malformed_reports_are_named_under_silent(answer: Any) -> None:
    async with workers("a", "b", "c", service=service) as (a, b, _):
        answering(b, lambda: answer)
        report = await a.why()
        assert report.waits == () and list(report.silent) == ["b"] and "Error" in report.silent["b"]
        assert str(report)


@in_time
async def test_reports_are_cut_and_speak_for_their_worker_only() -> None:
    async with workers("a", "b", service=service) as (a, b):
        stranger = {"worker": "a", "task": "call 1"}
        long = {**ROW, "what": "w" * 100_000, "line": "\x1b[31m"}
        waits = [stranger, long, *({**ROW, "task": f"call {i}"} for i in range(5000))]
        held = [{"worker": "a", "seconds": 5.0, "line": "x"}]
        answering(b, lambda: json.dumps({"waits": waits, "held": held, "silent": {"a": "x"}}))
        report = await a.why()
        assert {wait.worker for wait in report.waits} == {"b"} and MOST <= len(report.waits) <= MOST + 2
        assert max(len(wait.what) for wait in report.waits) <= 500 and "\x1b" not in str(report) and not report.held and not report.silent


@in_time
async def test_a_worker_with_very_many_waits_cuts_its_own_report() -> None:
    async with workers("a", "b", service=service, limits=Limits(requests_per_peer=MOST + 100)) as (a, b):
        calls = [asyncio.create_task(a.call("b", "sleep", 5.0)) for _ in range(MOST + 10)]
        await asyncio.sleep(1.0)
        rows = [wait for wait in (await a.why("b")).waits]
        assert len(rows) == MOST + 1 and rows[-1] == dist.Wait("b", "further waits", what="10 waits")
        await ended(*calls)


@in_time
async def test_loops_that_are_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        await asyncio.gather(a.call("b", "sleep", 0.0), a.call("c", "sleep", 0.0))
        (session,) = (session for session in a._core.endpoint.sessions() if session.peer.name == "b")
        session.detector.held(asyncio.get_running_loop().time(), 2.0, "app/train.py:12")
        monkeypatch.setattr(FailureDetector, "_let_go", lambda self: None)  # b itself is well
        await asyncio.sleep(1.0)
        assert asking.held_loops(a._core) == (dist.HeldLoop("b", 3.0, "app/train.py:12"),)
        assert asking.held_loops(a._core, "another") == () and [loop.worker for loop in (await a.why()).held] == ["b"]


# ---------------------------------------------------------------- many workers


@pytest.mark.sim
@pytest.mark.parametrize("count", swept([3 * FANOUT, 1000]))
def test_many_are_asked_once_and_within_a_second(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has five waits. Whom a lost or an old worker passes the question on to is asked directly."""
    network = SimulatedNetwork(0, faults=Faults(latency=(1e-3, 2e-3)))
    names = [f"w{number:04}" for number in range(count)]
    behind = {branch[0]: branch[1:] for branch in branches(names)}
    asked: Counter[str] = Counter()
    by: Counter[tuple[str, int]] = Counter()
    opened: dict[str, dist.Worker] = {}
    request = Endpoint.request

    async def counted(self: Endpoint, peer: str, kind: int, value: Any, *rest: Any) -> Any:
        if kind in (Kind.RELAY, Kind.WAITS):
            asked[peer] += 1
            by[self.name, kind] += 1
        return await request(self, peer, kind, value, *rest)

    async def serve(name: str) -> None:
        async with dist.Worker(name, service=service, secret=SECRET, transport=network.transport(name)) as worker:
            opened[name] = worker
            for other in behind.get(name, ()):
                worker.add_peer(other, f"sim://{other}")
            await asyncio.gather(*(worker.call(name, "sleep", 1e3) for _ in range(5)), return_exceptions=True)

    async def lead() -> None:
        async with dist.Worker("driver", secret=SECRET, transport=network.transport("driver")) as driver:
            for name in names:
                driver.add_peer(name, f"sim://{name}")
            while len(opened) < count:
                await asyncio.sleep(0.01)
            report = await driver.why()
            assert report.seconds < 1.0 and not report.silent, report.silent
            assert asked == Counter(names) and (by["driver", Kind.RELAY], by["driver", Kind.WAITS]) == (FANOUT, 0)
            found = Counter(wait.worker for wait in report.waits)
            assert found == {name: 10 for name in names}  # five calls, and the functions that they wait for
            lost, old = list(behind)[:2]
            network.kill(lost)
            opened[old]._core.multicast._servers.pop(AskWaits)
            del opened[old]._core.handlers[AskWaits.form.kind]
            report = await driver.why(timeout=5.0)
            assert report.silent.keys() == {lost, old}, report.silent
            assert {wait.worker for wait in report.waits} == {*names} - {lost, old}

    async def main() -> None:
        for name in names:
            network.spawn(name, serve(name))
        try:
            await network.spawn("driver", lead())
        finally:
            for name in names:
                network.kill(name)

    monkeypatch.setattr(Endpoint, "request", counted)
    simulated_run(main, seed=0)
