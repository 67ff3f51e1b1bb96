"""What waits on the workers of a cluster: a scene for each kind of wait, and deadlocks that are cycles of the report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed import asking
from aiograd.distributed.rpc.limits import Limits
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DistributedError, UnknownPeerError
from aiograd.pipeline import Pipeline, make_schedule
from tests.distributed.data_parallel.simulated import World, in_world
from tests.distributed.local_steps.simulated import in_world as in_training
from tests.distributed.workers import exposing, leaf, simulate, until, workers
from tests.pipeline.models import mean_square
from tests.pipeline.remote import place
from tests.pipeline.remote import service as stages
from tests.support import run_by

in_time = run_by(lambda test: simulate(test), given=0)
NAMES = ("a", "b", "c")


class Scene:
    """Workers with a lock each, and functions that use them."""

    def __init__(self) -> None:
        self.locks = {name: asyncio.Lock() for name in NAMES}
        self.gate = asyncio.Event()

    @property
    def service(self) -> dist.Service:
        return exposing(self.sleep, self.ask_locked, self.locked, self.hooked, self.work, self.identity)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def identity(self, x: Any) -> Any:
        return x * 2

    async def ask_locked(self, peer: str) -> None:
        """Call a function of another worker while the lock of this one is held."""
        here = dist.current_worker()
        async with self.locks[here.name]:
            await self.gate.wait()
            await asyncio.gather(here.call(peer, "locked", timeout=5.0))

    async def locked(self) -> None:
        async with self.locks[dist.current_worker().name]:
            pass

    async def hooked(self, x: Any, peer: str) -> Any:
        """A value with a hook that calls another worker while the lock of this one is held."""
        here = dist.current_worker()
        y = x * 3

        async def hook(grad: Any) -> None:
            async with self.locks[here.name]:
                await self.gate.wait()
                await here.call_apart(peer, "locked", timeout=5.0)

        y.register_hook(hook)
        return y

    def work(self) -> int:
        return sum(range(10))

    @contextlib.asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[tuple[dist.Worker, ...]]:
        async with workers(*NAMES, service=self.service, **options) as opened:
            yield opened


@contextlib.asynccontextmanager
async def under_way(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Tasks that are cancelled at the end."""
    tasks = [asyncio.create_task(coroutine, name=f"training {i}") for i, coroutine in enumerate(coroutines)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def rows(report: dist.WaitReport, worker: str, word: str = "") -> list[dist.Wait]:
    return [wait for wait in report.waits if wait.worker == worker and word in f"{wait.task} {wait.what} {wait.message}"]


def row(report: dist.WaitReport, worker: str, word: str = "") -> dist.Wait:
    found = rows(report, worker, word)
    assert len(found) == 1, str(report)
    return found[0]


# ---------------------------------------------------------------- calls


async def test_a_call_waits_for_its_function_on_any_loop() -> None:
    scene = Scene()
    async with scene.open() as (a, b, _), under_way(a.call("b", "ask_locked", "c")):
        await until(scene.locks["b"].locked)
        report = await a.why()
        call, function = row(report, "a"), row(report, "b")
        assert (call.task, call.on, call.message) == ("task training 0", "b", "answer to call of ask_locked")
        assert (function.task, function.on) == (call.on_task, "") and function.what.endswith("ask_locked") and function.message == "Event.wait"
        assert function.line.startswith("distributed/test_waits_of_workers.py:") and not report.cycles and not report.silent
        assert {wait.worker for wait in report.waits} == {"a", "b"}
        assert [wait.worker for wait in (await a.why("b")).waits] == ["b"] and not (await a.why("c")).waits
        assert [wait.work for wait in (await b.why("b")).waits] == [wait.work for wait in asking.waits(b._core)] == [function.work]


@in_time
async def test_since_when_and_nothing_when_it_has_ended() -> None:
    scene = Scene()
    async with scene.open() as (a, *_):
        async with under_way(a.call("b", "sleep", 5.0)):
            await asyncio.sleep(2.0)
            report = await a.why()
            assert [round(wait.seconds, 1) for wait in report.waits] == [2.0, 2.0] and row(report, "b").message == "sleep"
        await asyncio.sleep(1.0)
        assert await a.why() == dist.WaitReport(seconds=(await a.why()).seconds)


@in_time
async def test_two_services_that_wait_for_each_other_are_a_cycle() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), under_way(c.call("a", "ask_locked", "b"), c.call("b", "ask_locked", "a")):
        await asyncio.sleep(0.1)
        assert not (await c.why()).cycles
        scene.gate.set()
        await asyncio.sleep(0.1)
        report = await c.why()
        (cycle,) = report.cycles
        assert [worker for worker, _ in cycle] == ["a", "a", "b", "b"] and "cycle 1" in str(report)
        assert {wait.what.rpartition(".")[2] for wait in report.waits if wait.work in cycle} == {"ask_locked", "locked"}
        assert (await a.why()).cycles == (await b.why()).cycles == report.cycles


@in_time
async def test_a_lock_that_is_only_waited_for_is_no_cycle() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), scene.locks["b"], under_way(a.call("b", "locked"), c.call("b", "locked"), b.call("a", "sleep", 3.0)):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert len(rows(report, "b", "Lock")) == 2 and not report.cycles


@in_time
async def test_calls_of_a_worker_to_itself() -> None:
    scene = Scene()
    async with scene.open() as (a, *_), under_way(a.call("a", "sleep", 3.0)):
        await asyncio.sleep(0.1)
        report = await a.why()
        assert row(report, "a", "training").on_task == row(report, "a", "Scene.sleep").task == "call 1 of a (itself)"


# ---------------------------------------------------------------- passes


@in_time
async def test_two_passes_that_wait_for_each_other_are_a_cycle() -> None:
    scene = Scene()

    async def train(worker: dist.Worker, peer: str, other: str) -> None:
        async with worker.context() as ctx:
            y = await worker.call(peer, "hooked", leaf(1.0), other)
            await ctx.backward(y.sum(), timeout=5.0)

    async with scene.open() as (a, b, c), under_way(train(c, "a", "b"), train(c, "b", "a")):
        await asyncio.sleep(0.1)
        report = await c.why()
        assert len({wait.task for wait in rows(report, "c", "pass")}) == 2 and not report.cycles
        assert row(report, "a", "Event.wait").what.endswith("hook") and row(report, "a", "Event.wait").task.startswith("pass ")
        scene.gate.set()
        await asyncio.sleep(0.1)
        report = await c.why()
        (cycle,) = report.cycles
        assert [worker for worker, _ in cycle] == ["a", "a", "b", "b"] and sum(task.startswith("pass ") for _, task in cycle) == 2
        assert all(("a", each.on_task) in cycle or each.on != "a" for each in report.waits if each.work in cycle and each.on_task.startswith("pass"))


@in_time
async def test_a_pass_has_one_name_on_all_workers() -> None:
    scene = Scene()
    async with scene.open() as (a, b, c), a.context() as ctx:
        y = await a.call("c", "identity", await a.call("b", "hooked", await a.call("c", "identity", leaf(1.0, 2.0)), "c"))

        async with under_way(ctx.backward(y.sum()), ctx.backward(leaf(1.0).sum())):
            await asyncio.sleep(0.5)
            report = await a.why()
            names = {wait.task for wait in report.waits if wait.task.startswith("pass ")}
            assert len(names) == 1 and {wait.worker for wait in report.waits if wait.task in names} == {"a", "b", "c"}, str(report)
            turn = row(report, "a", "the turn in the context")
            assert turn.on == "a" and turn.on_task in names
            sent = row(report, "a", "gradient")
            assert sent.on_task in {wait.task for wait in rows(report, sent.on)}


# ---------------------------------------------------------------- groups


@in_time
async def test_a_collective_waits_for_the_members_that_have_not_begun() -> None:
    scene = Scene()
    async with scene.open() as opened:
        groups = await asyncio.gather(*(dist.join_group(worker, NAMES) for worker in opened))
        async with under_way(*(group.all_reduce([np.ones(3)]) for group in groups[:2])) as tasks:
            await asyncio.sleep(2.0)
            report = await opened[0].why()
            assert not report.cycles
            for name in "ab":
                waits = [wait for wait in rows(report, name, "all_reduce") if wait.on == "c"]
                assert [round(wait.seconds) for wait in waits] == [2], str(report)
            assert len({wait.task for wait in report.waits if "all_reduce" in wait.what}) == 1
            assert len(rows(report, "c", "collective")) == 2  # the messages wait for the operation to begin there
            await groups[2].all_reduce([np.ones(3)])
            assert [(await task)[0].tolist() for task in tasks] == [[3.0] * 3] * 2
        async with under_way(*(group.commit(lambda: None) for group in groups[:2])) as tasks:
            await asyncio.sleep(1.0)
            report = await opened[2].why()
            assert row(report, "a", "vote").on == "c" and not report.cycles, str(report)
            name = row(report, "a", "vote").task
            assert name.startswith("commit 1 of group") and row(report, "b").task == name and row(report, "b").on == "a"
            await groups[2].commit(lambda: None)
            await asyncio.gather(*tasks)
        for group in groups:
            await group.aclose()
        with pytest.raises(CollectiveError):
            await groups[0].barrier()
