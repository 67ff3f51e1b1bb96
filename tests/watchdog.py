"""Ends async tests that hang.

pytest-timeout raises from a signal handler, which a loop that waits for events never gets to see when it is uvloop's: such a test would hang
for good. So one thread for the whole run watches the async tests and cancels the task of one that takes too long, whatever its loop.
"""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

#: real seconds an async test may take, and the most that one waits for another process; less than the timeout in pyproject.toml
SECONDS = float(os.environ.get("AIOGRAD_TEST_SECONDS", "110"))


class Watchdog:
    """A daemon thread that is started with the first test it watches."""

    def __init__(self) -> None:
        self._watched: dict[asyncio.Task[Any], tuple[float, asyncio.AbstractEventLoop]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread, before any leak check takes stock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="watchdog of the tests", daemon=True)
            self._thread.start()

    def bounded(self, test: Callable[..., Coroutine[Any, Any, Any]]) -> Callable[..., Coroutine[Any, Any, Any]]:
        """The same test, cancelled when it takes longer than `SECONDS`."""

        @functools.wraps(test)
        async def watched(*args: Any, **kwargs: Any) -> Any:
            task = asyncio.current_task()
            assert task is not None
            with self._changed:
                self._watched[task] = (time.monotonic() + SECONDS, asyncio.get_running_loop())
                self._changed.notify()
            try:
                return await test(*args, **kwargs)
            finally:
                with self._changed:
                    del self._watched[task]

        return watched

    def _work(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for task, (deadline, loop) in list(self._watched.items()):
                    if deadline <= now:
                        self._watched[task] = (now + 5.0, loop)  # once more, if that does not help
                        loop.call_soon_threadsafe(task.cancel, f"the test took longer than {SECONDS:.0f} s")
                self._changed.wait(min((deadline for deadline, _ in self._watched.values()), default=now + 3600.0) - now)
