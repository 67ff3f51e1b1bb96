"""Jobs that run inline on a simulated loop see and do what they would in a thread."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from aiograd.engine.executors import ComputeExecutor
from aiograd.testing import DeadlockError, SimulatedLoop, simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_awaiting_raises, assert_raises

T = TypeVar("T")
_variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="empty")


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


@pytest.mark.parametrize("seed", [None, 4])
def test_a_job_starts_after_submit_has_returned_and_gives_its_value(seed: int | None) -> None:
    async def main() -> tuple[list[str], int]:
        story = []
        future = _loop().aiograd_submit(lambda: (story.append("ran"), 7)[1])
        story.append("submitted")
        return story, await future

    run = simulated_run(main, seed=seed)
    assert run.value == (["submitted", "ran"], 7)
    assert (run.time > 0) == (seed is not None)


def test_jobs_overlap_in_virtual_time() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        await asyncio.gather(*(_loop().aiograd_submit(lambda number=number: order.append(number)) for number in range(6)))
        return order

    orders = {tuple(simulated_run(main, seed=seed).value) for seed in range(10)}
    assert len(orders) > 5, "the drawn times decide which job comes first"


async def test_errors_reach_the_caller_whatever_their_kind(virtual_clock: VirtualClock) -> None:
    def raises(error: BaseException) -> Callable[[], None]:
        def job() -> None:
            raise error

        return job

    for error in (ValueError("v"), KeyboardInterrupt("k"), SystemExit(3)):
        future = _loop().aiograd_submit(raises(error))
        await asyncio.wait([future])
        assert future.exception() is error
    caught = await assert_awaiting_raises(RuntimeError, "StopIteration", _loop().aiograd_submit(raises(StopIteration())))
    assert isinstance(caught.__cause__, StopIteration)


async def test_a_job_sees_no_loop_and_an_empty_context(virtual_clock: VirtualClock) -> None:
    _variable.set("set")

    def job() -> str:
        assert_raises(RuntimeError, "no running event loop", asyncio.get_running_loop)
        return _variable.get()

    assert await _loop().aiograd_submit(job) == "empty"
    assert await asyncio.to_thread(job) == "set", "to_thread carries the context, and so must whoever submits"
    assert asyncio.get_running_loop() is _loop()


@pytest.mark.virtual_clock(seed=1)
async def test_a_job_cancelled_before_its_start_never_runs(virtual_clock: VirtualClock) -> None:
    ran: list[int] = []
    future = _loop().aiograd_submit(lambda: ran.append(1))
    future.cancel()
    await asyncio.sleep(1)
    assert ran == []


@pytest.mark.virtual_clock(seed=1)
async def test_a_job_cancelled_after_its_start_is_dropped(virtual_clock: VirtualClock) -> None:
    story: list[str] = []
    future = _loop().aiograd_submit(lambda: (story.append("ran"), future.cancel())[0])
    await asyncio.wait([future])
    await asyncio.sleep(1)
    story.append("cancelled" if future.cancelled() else "not cancelled")
    assert story == ["ran", "cancelled"]


def test_the_engine_hands_its_kernels_to_the_loop() -> None:
    executor = ComputeExecutor(2)

    async def main() -> tuple[str, int]:
        _variable.set("set")
        context = contextvars.copy_context()
        return await executor.submit(asyncio.get_running_loop(), context, lambda: (_variable.get(), threading.get_ident()))

    run = simulated_run(main, seed=2)
    assert run.value == ("set", threading.get_ident()) and run.time > 0
    assert executor.close() == [], "no thread was started"


def test_a_runner_of_ones_own_can_lose_jobs() -> None:
    class NeverReturns:
        def __init__(self, loop: SimulatedLoop) -> None:
            self.loop = loop

        def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
            return self.loop.create_future()

    async def wait(**_: Any) -> None:
        await asyncio.to_thread(int)

    async def bounded() -> None:
        async with asyncio.timeout(60):
            await wait()

    assert_raises(DeadlockError, None, simulated_run, wait, executor=NeverReturns)
    assert_raises(TimeoutError, None, simulated_run, bounded, executor=NeverReturns)
