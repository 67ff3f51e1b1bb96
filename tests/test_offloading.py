"""`offload` and `ready`."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Generator as Steps
from typing import Any, NamedTuple

import numpy as np
import pytest

import aiograd as ag
from aiograd.running.modes import current_mode
from aiograd.running.offloading import offload, ready
from aiograd.tensors.core import make
from tests.support import assert_awaiting_raises, assert_raises, cancel


async def test_the_function_runs_on_another_thread_and_its_graph_is_usable() -> None:
    x = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
    threads: list[int] = []

    def forward(x: Any, *, power: int) -> Any:
        threads.append(threading.get_ident())
        return (x**power).sum()

    y = await offload(forward, x, power=3)
    assert threads[0] != threading.get_ident()
    await y.backward()
    np.testing.assert_allclose(x.grad.numpy(), [3.0, 12.0, 27.0])


async def test_the_loop_stays_free_meanwhile() -> None:
    loop, begun, release = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def forward() -> bool:
        loop.call_soon_threadsafe(begun.set)
        return release.wait(30)

    waiting = asyncio.ensure_future(offload(forward))
    await begun.wait()
    assert not waiting.done()  # the loop goes round although forward has not returned
    release.set()
    assert await waiting is True


async def test_modes_of_the_caller_carry_over_and_changes_stay_inside() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")
    variable.set("caller")
    packed: list[Any] = []

    def look() -> tuple[Any, ...]:
        found = (ag.is_grad_enabled(), current_mode().anomaly, ag.get_default_dtype(), current_mode().saved_hooks is not None, variable.get())
        variable.set("function")
        ag.set_default_dtype(np.float32)
        return found

    ag.set_default_dtype(np.float64)
    with ag.no_grad(), ag.detect_anomaly(), ag.graph.saved_tensors_hooks(packed.append, lambda p: p):
        assert await offload(look) == (False, True, np.dtype(np.float64), True, "caller")
    assert variable.get() == "caller"
    assert ag.get_default_dtype() == np.float64


async def test_an_exception_comes_through() -> None:
    def fails() -> None:
        raise KeyError("here")

    await assert_awaiting_raises(KeyError, "here", offload(fails))


async def test_cancelling_stops_the_waiting_only() -> None:
    loop, begun, release, ended = asyncio.get_running_loop(), asyncio.Event(), threading.Event(), threading.Event()

    def forward() -> None:
        loop.call_soon_threadsafe(begun.set)
        release.wait(30)
        ended.set()

    waiting = asyncio.ensure_future(offload(forward))
    await begun.wait()
    await cancel(waiting)
    release.set()
    assert ended.wait(30)


async def test_it_runs_on_the_current_engine() -> None:
    async with ag.Engine(threads=1) as engine:
        names = {await offload(lambda: threading.current_thread().name) for _ in range(3)}
        assert len(names) == 1
        await engine.aclose()
        await assert_awaiting_raises(ag.errors.EngineClosedError, None, engine.offload(lambda: None))


async def test_two_offloads_run_at_the_same_time() -> None:
    barrier = threading.Barrier(2, timeout=30)
    async with ag.Engine(threads=2):
        await asyncio.gather(offload(barrier.wait), offload(barrier.wait))


@pytest.mark.parametrize("fn", [3, None, ag.tensor([1.0])])
async def test_what_is_no_function_is_refused(fn: Any) -> None:
    assert_raises(ag.errors.ArgumentTypeError, "expected a function", lambda: offload(fn))


async def test_coroutine_functions_are_refused() -> None:
    async def forward() -> None: ...

    assert_raises(ag.errors.ArgumentTypeError, "await it directly", lambda: offload(forward))
    await assert_awaiting_raises(ag.errors.ArgumentTypeError, "returned a coroutine", offload(lambda: forward()))


class Pair(NamedTuple):
    first: Any
    second: Any


class Later:
    """An array that is there once its event is set."""

    def __init__(self, event: asyncio.Event, order: list[str], name: str) -> None:
        self.shape, self.dtype, self.event, self.order, self.name = (), np.dtype(np.float32), event, order, name

    def __aiograd_wait__(self) -> Any:
        async def wait() -> None:
            await self.event.wait()
            self.order.append(self.name)

        return wait()

    def __await__(self) -> Steps[Any, Any, None]:
        raise AssertionError("the tensor is awaited, not its data")


async def test_ready_waits_for_every_tensor_and_returns_the_tree() -> None:
    event, order = asyncio.Event(), []
    a, b, c, d = (make(Later(event, order, name)) for name in "abcd")
    tree = {"x": [a, (b, 3, "text", None)], "y": Pair(c, {"z": d})}
    waiting = asyncio.ensure_future(ready(tree))
    await asyncio.sleep(0)
    assert not waiting.done()
    event.set()
    assert await waiting is tree
    assert order == ["a", "b", "c", "d"]


async def test_ready_leaves_other_things_alone() -> None:
    t = ag.tensor([1.0])
    assert await ready(t) is t
    future = asyncio.get_running_loop().create_future()
    assert await ready([future, 1]) == [future, 1]
    assert not future.done()
