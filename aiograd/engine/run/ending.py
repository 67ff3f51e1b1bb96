"""The end of tasks that are cancelled: they are waited for, but not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from aiograd.errors import CancelGraceError

Tasks = Collection[asyncio.Task[Any]]


def _names(tasks: Tasks) -> str:
    return f"aiograd: {', '.join(sorted(task.get_name() for task in tasks))}"


async def end(tasks: Tasks, grace: float, name: Callable[[Tasks], str] = _names) -> asyncio.CancelledError | None:
    """Cancel tasks and wait for them; see `outlast`."""
    for task in tasks:
        task.cancel()
    return await outlast(tasks, grace, name)


async def outlast(tasks: Tasks, grace: float, name: Callable[[Tasks], str] = _names) -> asyncio.CancelledError | None:
    """Wait until cancelled tasks or the grace period have ended; tasks that still run then are reported and left running.

    Args:
        tasks: cancelled tasks; their results and errors are dropped.
        grace: seconds; an engine's `cancel_grace`.
        name: names the tasks in the report.

    Returns:
        A cancellation that came meanwhile; it does not cut this short.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + grace
    cancelled = None
    pending = [task for task in tasks if not task.done()]
    while pending and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait(pending, timeout=left)
        except asyncio.CancelledError as error:
            cancelled = error
        pending = [task for task in pending if not task.done()]
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()  # so that it is not reported as never looked at
    if pending:
        message = f"{name(pending)} did not stop within {grace:g} s of being cancelled and was left running"
        loop.call_exception_handler({"message": message, "exception": CancelGraceError(message)})
    return cancelled
