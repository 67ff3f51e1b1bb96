"""What waits on the workers of a cluster: a scene for each kind of wait, and deadlocks that are cycles of the report."""

from __future__ import annotations

import asyncio
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from tests.distributed.workers import workers

service = dist.Service()
LOCKS: dict[str, asyncio.Lock] = {}
GATES: dict[str, asyncio.Event] = {}


@service.function
async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)


@service.function
async def ask_locked(peer: str) -> None:
    """Call the same function of another worker while a lock of this one is held."""
    here = dist.current_worker()
    async with LOCKS[here.name]:
        await GATES["both"].wait()
        await here.call(peer, "locked", timeout=5.0)


@service.function
async def locked() -> None:
    async with LOCKS[dist.current_worker().name]:
        pass


async def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come about")


def rows(report: dist.WaitReport, worker: str) -> list[dist.Wait]:
    return [wait for wait in report.waits if wait.worker == worker]


async def ended(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_call_waits_for_its_function() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c):
        calling = asyncio.create_task(a.call("b", "sleep", 1.0), name="training")
        await asyncio.sleep(0.1)
        report = await a.why()
        print(report)
        (call,), (function,) = rows(report, "a"), rows(report, "b")
        assert (call.task, call.on, call.message) == ("task training", "b", "answer to call of sleep")
        assert call.on_task == function.task and function.what == "sleep" and function.message == "sleep"
        assert function.line.startswith("distributed/test_waits_of_workers.py:")
        await ended(calling)


async def test_two_services_that_wait_for_each_other_are_a_cycle() -> None:
    LOCKS.update({"a": asyncio.Lock(), "b": asyncio.Lock()})
    GATES["both"] = asyncio.Event()
    async with workers("a", "b", "c", service=service) as (a, b, c):
        calling = [asyncio.create_task(c.call(name, "ask_locked", other)) for name, other in (("a", "b"), ("b", "a"))]
        await until(lambda: LOCKS["a"].locked() and LOCKS["b"].locked())
        GATES["both"].set()
        await asyncio.sleep(0.1)
        report = await c.why()
        print(report)
        await ended(*calling)
        assert len(report.cycles) == 1
