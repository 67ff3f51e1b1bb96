"""Owners on a simulated loop: what is killed never runs again and leaves no trace, what is frozen goes on later."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import gc
import types
import warnings
from collections.abc import AsyncIterator, Coroutine, Generator
from typing import Any

import pytest

from aiograd.testing import DeadlockError, SimulatedLoop, simulated_run
from aiograd.testing.owner import OWNER, HandleOwner, Killed, bare_context, context_of
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_raises


def _loop() -> SimulatedLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimulatedLoop)
    return loop


def _start(owner: HandleOwner, main: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    return _loop().create_task(main, context=context_of(owner))


@types.coroutine
def _suspend() -> Generator[None, None, None]:
    yield


def test_nothing_of_a_killed_owner_runs_again() -> None:
    seen: list[str] = []
    loops: list[SimulatedLoop] = []

    @contextlib.asynccontextmanager
    async def resource() -> AsyncIterator[None]:
        try:
            yield
        finally:
            seen.append(f"generator finalised, loop closed: {loops[0].is_closed()}")

    async def child() -> None:
        try:
            await asyncio.sleep(2)
        finally:
            seen.append("child finally")

    async def process() -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(1, seen.append, "timer before")
        loop.call_later(5, seen.append, "timer after")
        children = [asyncio.create_task(child()) for _ in range(2)]
        failed = loop.create_future()
        failed.set_exception(ValueError("nobody will look at it"))
        try:
            async with resource(), asyncio.timeout(3):
                await asyncio.gather(*children)
        except TimeoutError:
            seen.append("timeout")
        finally:
            seen.append("finally")
            del failed

    async def main() -> list[str]:
        loops.append(_loop())
        owner = HandleOwner("w0")
        task = _start(owner, process())
        await asyncio.sleep(1.5)
        late = _start(owner, child())  # killed before its first step
        _loop().kill(owner)
        _loop().kill(owner)
        gc.collect()
        await asyncio.sleep(10)
        gc.collect()
        assert not task.done() and not late.done() and asyncio.all_tasks() == {asyncio.current_task()}
        return list(seen)

    run = simulated_run(main)
    assert run.value == ["timer before"]
    assert run.leftover_tasks == ()
    assert "generator finalised, loop closed: False" not in seen
    gc.collect()  # and no warning comes of what is left, or of a coroutine that was never awaited


def test_what_clean_up_does_after_the_end_reaches_nobody() -> None:
    tries: list[int] = []
    tasks: list[asyncio.Task[None]] = []

    async def stubborn() -> None:
        turn = asyncio.Event()
        while True:
            try:
                await _suspend()
            except GeneratorExit:
                tries.append(1)
                if len(tries) > 3:
                    asyncio.get_running_loop().call_soon(turn.set)  # raises

    async def spawns() -> None:
        loop = asyncio.get_running_loop()
        try:
            await asyncio.sleep(1)
        finally:
            tasks.append(loop.create_task(asyncio.sleep(1)))  # raises, and the coroutine is never awaited

    async def main() -> None:
        owner = HandleOwner("w0")
        _start(owner, stubborn())
        _start(owner, spawns())
        await asyncio.sleep(0)
        _loop().kill(owner)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        simulated_run(main)
        gc.collect()
    assert len(tries) == 4 and tasks == [] and warned == []


@pytest.mark.parametrize("place", ["task", "callback", "child"])
async def test_code_that_kills_its_own_owner_ends_there(virtual_clock: VirtualClock, place: str) -> None:
    seen: list[str] = []
    owner = HandleOwner("w0")

    def suicide() -> None:
        _loop().kill(owner)
        seen.append("after the kill")

    async def process() -> None:
        if place == "callback":
            asyncio.get_running_loop().call_soon(suicide)
        elif place == "child":
            await asyncio.create_task(process_end())
        else:
            try:
                suicide()
            finally:  # what unwinding leaves behind is nobody's either
                _loop().create_task(process_end())
                _loop().create_future().set_exception(ValueError("nobody will look at it"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        seen.append("went on")

    async def process_end() -> None:
        suicide()

    _start(owner, process())
    await asyncio.sleep(1)
    gc.collect()
    gc.collect()
    assert seen == []


async def test_others_may_kill_without_being_killed(virtual_clock: VirtualClock) -> None:
    owner, other = HandleOwner("w0"), HandleOwner("w1")

    async def killer() -> None:
        _loop().kill(owner)
        assert_raises(Killed, None, lambda: _loop().kill(other))

    task = _start(other, killer())
    await asyncio.sleep(1)
    assert task not in asyncio.all_tasks(), "not buried"


async def test_a_frozen_owner_goes_on_later_in_order(virtual_clock: VirtualClock) -> None:
    loop = _loop()
    seen: list[tuple[str, float]] = []
    owner = HandleOwner("w0")

    async def process() -> None:
        for number in range(3):
            loop.call_later(number + 1, lambda number=number: seen.append((f"timer {number}", loop.time())))
        await asyncio.sleep(2.5)
        seen.append(("task", loop.time()))

    _start(owner, process())
    await asyncio.sleep(1.5)
    loop.freeze(owner)
    await asyncio.sleep(8.5)
    assert len(seen) == 1
    loop.thaw(owner)
    loop.thaw(owner)
    await asyncio.sleep(1)
    assert seen == [("timer 0", 1), ("timer 1", 10), ("timer 2", 10), ("task", 10)]


async def test_a_killed_owner_is_not_thawed(virtual_clock: VirtualClock) -> None:
    seen: list[str] = []
    owner = HandleOwner("w0")
    context_of(owner).run(_loop().call_later, 1, seen.append, "ran")
    _loop().freeze(owner)
    await asyncio.sleep(2)
    _loop().kill(owner)
    _loop().thaw(owner)
    await asyncio.sleep(1)
    assert seen == []


@pytest.mark.virtual_clock(seed=0)
async def test_jobs_belong_to_whoever_hands_them_in(virtual_clock: VirtualClock) -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    ran: list[str] = []
    variable.set(1)

    def job() -> None:
        owner = OWNER.get()
        assert variable not in contextvars.copy_context(), "a thread inherits no context"
        ran.append("nobody" if owner is None else owner.name)

    async def process() -> None:
        await asyncio.get_running_loop().run_in_executor(None, job)

    await asyncio.get_running_loop().run_in_executor(None, job)
    owner = HandleOwner("w0")
    await _start(owner, process())
    _start(owner, process())
    await asyncio.sleep(0)
    _loop().kill(owner)
    await asyncio.sleep(1)
    assert ran == ["nobody", "w0"]


def test_a_deadlock_names_the_living_only() -> None:
    async def main() -> None:
        owner, never = HandleOwner("w0"), asyncio.Event()  # one that this coroutine holds: a task that nobody can wake may be collected
        _loop().create_task(never.wait(), name="dead", context=context_of(owner))
        _loop().create_task(never.wait(), name="alive")
        await asyncio.sleep(1)
        _loop().kill(owner)
        await never.wait()

    caught = assert_raises(DeadlockError, None, simulated_run, main)
    assert "alive" in str(caught) and "dead (" not in str(caught)


async def test_errors_of_the_living_are_still_reported(virtual_clock: VirtualClock) -> None:
    reports: list[dict[str, Any]] = []
    loop = _loop()
    loop.set_exception_handler(lambda _, context: reports.append(context))
    owner = HandleOwner("w0")
    context_of(owner).run(loop.call_soon, lambda: 1 / 0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert [type(report["exception"]) for report in reports] == [ZeroDivisionError]


def test_a_gather_that_fails_as_its_owner_is_killed_is_not_reported() -> None:
    reports: list[dict[str, Any]] = []

    async def process(child: asyncio.Future[Any]) -> None:
        await asyncio.gather(child)

    async def main() -> None:
        loop = _loop()
        loop.set_exception_handler(lambda _, context: reports.append(context))
        owner = HandleOwner("w0")
        child = loop.create_future()
        _start(owner, process(child))
        await asyncio.sleep(0)
        child.cancel()
        await asyncio.sleep(0)  # the future of gather has its exception now, and its task has not seen it
        loop.kill(owner)

    simulated_run(main)
    gc.collect()
    assert not reports


def test_contexts_belong_to_whom_they_are_made_for() -> None:
    owner = HandleOwner("w0")
    context = context_of(owner)
    assert context[OWNER] is owner and list(context) == [OWNER]
    assert context.run(bare_context)[OWNER] is owner
    assert list(bare_context()) == []
    assert repr(owner) == "<HandleOwner w0>"
