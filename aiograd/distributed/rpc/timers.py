"""Timers that do not hold on to the context they were set in.

asyncio keeps a cancelled timer until its time would have come, and with it the ContextVars of the code that set it: the autograd context
among them, with all its gradients. So timers that are set while a user's code runs get the context in which the worker was opened.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from typing import Any


def call_at(
    context: contextvars.Context, loop: asyncio.AbstractEventLoop, when: float, callback: Callable[..., Any], *args: Any
) -> asyncio.TimerHandle:
    """As ``loop.call_at``, in a copy of `context`."""
    return loop.call_at(when, callback, *args, context=context.copy())


def expire_at(context: contextvars.Context, clock: asyncio.Timeout, when: float) -> None:
    """Let a timeout of asyncio expire at a time of the loop.

    ::

        async with asyncio.timeout(None) as clock:
            expire_at(context, clock, deadline)
    """
    context.copy().run(clock.reschedule, when)


async def wait_for(context: contextvars.Context, task: asyncio.Future[Any], seconds: float) -> None:
    """As ``asyncio.wait([task], timeout=seconds)``. Cancelling stops the waiting only."""
    if task.done():
        return
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()

    def wake(_: object = None) -> None:
        if not waiter.done():
            waiter.set_result(None)

    timer = call_at(context, loop, loop.time() + seconds, wake)
    task.add_done_callback(wake, context=context)
    try:
        await waiter
    finally:
        timer.cancel()
        task.remove_done_callback(wake)


def running_task() -> asyncio.Task[Any] | None:
    """The task that runs; None outside of any, such as where a coroutine is closed after its loop has ended."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
