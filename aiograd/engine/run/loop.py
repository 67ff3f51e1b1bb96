"""Questions about the event loop of the calling thread, and the check that a pass can be awaited here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from aiograd.errors import LoopError, NestedPassError
from aiograd.graph.current import CURRENT


def loop_is_running() -> bool:
    """True if the calling thread is inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that the calling thread is inside of, None outside of one."""
    return asyncio._get_running_loop()


def clock_of(loop: asyncio.AbstractEventLoop) -> Callable[[], float]:
    """The clock for durations of computations, in seconds: `time.perf_counter`, or the loop's own clock where time is simulated."""
    simulated: Callable[[], float] = loop.time
    return simulated if hasattr(loop, "aiograd_submit") else time.perf_counter


def running_task() -> asyncio.Task[Any] | None:
    """The running asyncio task, None outside of one."""
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def current_task_name() -> str | None:
    """Name of the running asyncio task, None outside of one."""
    task = running_task()
    return None if task is None else task.get_name()


def check_can_run(what: str) -> None:
    """Raise unless a pass can be awaited by the running code.

    Raises:
        NestedPassError: in a synchronous rule; LoopError: without a running event loop.
    """
    current = CURRENT.get()
    if current is not None and current.in_sync_rule:
        raise NestedPassError(
            f"{what} inside the synchronous rule of {current.node.name if current.node else 'a node'}: a `def` rule cannot await a nested pass. "
            "Make it `async def`."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise LoopError(
            f"{what} without a running event loop: await it inside a coroutine, started with aiograd.run(main()) or asyncio.run(main())"
        ) from None


def not_none(value: Any) -> Any:
    """Return the value; tells the type checker that it is not None."""
    return value
