"""Where a task waits: the text that deadlock and leak reports share.

``Task.get_stack`` stops at the outermost coroutine of a suspended task, which says where the wait was asked for and not the future that it waits
for; walking ``cr_await`` to the innermost coroutine says both.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any


def coroutine_name(task: asyncio.Task[Any]) -> str:
    """The qualified name of the coroutine function that `task` runs."""
    coroutine = task.get_coro()
    name: str = getattr(coroutine, "__qualname__", type(coroutine).__name__)
    return name[:]  # the name alone: its text may hold the line of the call, and a trace is the same on every machine


def describe_task(task: asyncio.Task[Any]) -> str:
    """One line: name of the task, its coroutine, and the place where it is suspended.

    Args:
        task: a task that is not running at this moment.

    Returns:
        For example ``"Task-3 (serve) waits at app.py:12 in read"``.
    """
    innermost: Any = task.get_coro()
    while hasattr(getattr(innermost, "cr_await", None), "cr_frame"):
        innermost = innermost.cr_await
    frame = getattr(innermost, "cr_frame", None)
    name = f"{task.get_name()} ({coroutine_name(task)})"
    if task.done() or frame is None:
        return f"{name} has ended"
    return f"{name} waits at {os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"
