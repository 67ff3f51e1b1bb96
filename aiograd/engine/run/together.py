"""Structured concurrency: tasks that run together; the first one that fails cancels the others."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from typing import Any

from aiograd.engine.run.current import current_engine
from aiograd.engine.run.ending import end


async def together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Run coroutines at the same time; the first error cancels the others, waits for them and is raised.

    Cancelling cancels all of them. Cancelled coroutines are awaited for at most the engine's `cancel_grace`.

    Args:
        coroutines: the coroutines to run.

    Returns:
        Their results, in order.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    failed = await first_failure(tasks)
    return [task.result() for task in (tasks if failed is None else [failed])]


async def first_failure(tasks: Collection[asyncio.Task[Any]], failure: asyncio.Future[None] | None = None) -> asyncio.Task[Any] | None:
    """Wait until all tasks have ended or one has failed. If one fails, or the caller is cancelled, the other tasks are cancelled and awaited.

    Args:
        tasks: the tasks to wait for.
        failure: a future for a failure outside of the tasks: if it gets an exception, the tasks are cancelled. It never gets a result.

    Returns:
        The first task that has failed or was cancelled; None if none has.

    Raises:
        The exception of `failure`; a cancellation that comes while the other tasks are awaited.
    """
    if not tasks:
        return None
    ended: list[asyncio.Task[Any]] = []
    waker = asyncio.get_running_loop().create_future()

    def on_done(task: asyncio.Task[Any]) -> None:
        ended.append(task)
        if not waker.done() and (len(ended) == len(tasks) or task.cancelled() or task.exception() is not None):
            waker.set_result(None)

    def on_failure(future: asyncio.Future[None]) -> None:
        if not waker.done() and not future.cancelled():
            waker.set_exception(future.exception() or RuntimeError)

    for task in tasks:
        task.add_done_callback(on_done)
    if failure is not None:
        failure.add_done_callback(on_failure)
    try:
        await waker
    except (Exception, asyncio.CancelledError):
        cancelled = await end(tasks, current_engine().cancel_grace)
        if cancelled is not None:
            raise cancelled from None
        raise
    finally:
        if failure is not None:
            failure.remove_done_callback(on_failure)
    failed = next((task for task in ended if task.cancelled() or task.exception() is not None), None)
    if failed is not None:
        cancelled = await end(tasks, current_engine().cancel_grace)
        if cancelled is not None:
            raise cancelled
    return failed
