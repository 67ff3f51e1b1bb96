"""Several coroutines that stand or fall together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.errors import PipelineError


async def together(
    coroutines: Mapping[str, Coroutine[Any, Any, Any]], whereabouts: Callable[[str], str] = str, failure: asyncio.Future[None] | None = None
) -> dict[str, Any]:
    """Run coroutines side by side; the first to fail takes the others with it.

    Cancelling cancels all of them. They are waited for, but not longer than the engine's `cancel_grace` once they have been cancelled.

    Args:
        coroutines: by name.
        whereabouts: says what the coroutine of a name was doing, should it turn out to be cancelled by nobody.
        failure: fails where something else means that they fail; else it stays as it is.

    Returns:
        Their results, by name.
    """
    if not coroutines:
        return {}
    loop = asyncio.get_running_loop()
    tasks = {name: loop.create_task(coroutine, name=f"aiograd:{name}") for name, coroutine in coroutines.items()}
    names = {task: name for name, task in tasks.items()}
    ended: list[asyncio.Task[Any]] = []
    waker = loop.create_future()

    def on_done(task: asyncio.Task[Any]) -> None:
        ended.append(task)
        if not waker.done() and (len(ended) == len(tasks) or task.cancelled() or task.exception() is not None):
            waker.set_result(None)

    def on_failure(future: asyncio.Future[None]) -> None:
        if not waker.done() and not future.cancelled():
            waker.set_exception(future.exception() or RuntimeError)

    for task in tasks.values():
        task.add_done_callback(on_done)
    if failure is not None:
        failure.add_done_callback(on_failure)
    try:
        await waker
    except (Exception, asyncio.CancelledError):
        cancelled = await end(tasks.values(), current_engine().cancel_grace)
        if cancelled is not None:
            raise cancelled from None
        raise
    finally:
        if failure is not None:
            failure.remove_done_callback(on_failure)
    failed = next((task for task in ended if task.cancelled() or task.exception() is not None), None)
    if failed is None:
        return {name: task.result() for name, task in tasks.items()}
    cancelled = await end(tasks.values(), current_engine().cancel_grace)
    if cancelled is not None:
        raise cancelled
    if failed.cancelled():
        raise PipelineError(f"{names[failed]} of a pipeline was cancelled by its own code{whereabouts(names[failed])}")
    raise failed.exception() or RuntimeError
