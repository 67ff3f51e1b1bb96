"""StartedPasses: passes that run in asyncio tasks of their own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine
from typing import Any

from aiograd.engine.graph_task import GraphTask
from aiograd.engine.pass_futures import PassFutures
from aiograd.engine.run.failures import clear_frames
from aiograd.engine.run.loop import not_none


class StartedPasses:
    """The asyncio tasks of the passes started with `Engine.execute`, in the order in which they were started."""

    __slots__ = ("_running",)

    def __init__(self) -> None:
        #: a dict, which keeps its order, so that a simulated run can be repeated
        self._running: dict[asyncio.Task[Any], None] = {}

    def __contains__(self, asyncio_task: asyncio.Task[Any]) -> bool:
        return asyncio_task in self._running

    def start(self, task: GraphTask, run: Callable[[GraphTask], Coroutine[Any, Any, None]]) -> None:
        """Run a pass in a task of its own.

        Args:
            task: the pass; its `future` resolves when it has ended.
            run: runs the pass.
        """
        loop = asyncio.get_running_loop()
        asyncio_task = loop.create_task(_delivered(task, run), name=f"aiograd:graph-task-{task.id}")
        task.futures = PassFutures(loop, functools.partial(_stop_with_starter, asyncio.current_task(), asyncio_task), must_report=True)
        self._running[asyncio_task] = None
        asyncio_task.add_done_callback(functools.partial(self._ended, task))

    def cancel(self, current: asyncio.Task[Any] | None) -> list[asyncio.Task[Any]]:
        """Cancel all passes except the one of the running asyncio task; returns their tasks."""
        asyncio_tasks = [asyncio_task for asyncio_task in self._running if asyncio_task is not current]
        for asyncio_task in asyncio_tasks:
            asyncio_task.cancel()
        return asyncio_tasks

    def _ended(self, task: GraphTask, asyncio_task: asyncio.Task[None]) -> None:
        self._running.pop(asyncio_task, None)
        not_none(task.futures).on_future = None
        if not task.completed:  # cancelled before it could begin
            task.fail(asyncio.CancelledError(), is_cancelled=True)
            task.finish()
        elif not asyncio_task.cancelled():
            asyncio_task.exception()
        with contextlib.suppress(Warning):
            task.issue_warnings()


async def _delivered(task: GraphTask, run: Callable[[GraphTask], Coroutine[Any, Any, None]]) -> None:
    """Run a pass and leave its error to the future of its GraphTask."""
    try:
        await run(task)
    except Exception as error:
        clear_frames(error)
        del task


def _stop_with_starter(starter: asyncio.Task[Any] | None, asyncio_task: asyncio.Task[Any], future: asyncio.Future[Any]) -> None:
    """Cancel a pass when the task that started it is cancelled while it awaits `future`."""
    if starter is not None and asyncio.current_task() is starter:
        future.add_done_callback(lambda future: asyncio_task.cancel() if future.cancelled() else None)
