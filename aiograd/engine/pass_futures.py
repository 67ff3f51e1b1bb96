"""PassFutures: the futures that wait for the end of one pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aiograd.graph.boundary import to_tensor
from aiograd.running.types import Array


class PassFutures:
    """Hands out futures and, when the pass is over, resolves them. Knows a loop only as an object with ``create_future``.

    Args:
        loop: makes the futures.
        on_future: called with each future that is handed out.
        must_report: True if no task awaits the pass itself, so that an error which is never retrieved from a future is logged, as asyncio does.
    """

    __slots__ = ("on_future", "_loop", "_must_report", "_waiting", "_unfetched", "_is_over", "_results", "_error", "_is_cancelled")

    def __init__(self, loop: Any, on_future: Callable[[Any], None] | None = None, must_report: bool = False) -> None:
        self.on_future: Callable[[Any], None] | None = on_future
        self._loop = loop
        self._must_report = must_report
        self._waiting: list[Any] = []
        #: a future that makes asyncio log the error if it is never retrieved
        self._unfetched: Any = None
        self._is_over = False
        self._results: Sequence[Array | None] = ()
        self._error: BaseException | None = None
        self._is_cancelled = False

    def new(self) -> Any:
        """One more future."""
        future = self._loop.create_future()
        if self._unfetched is not None:
            self._unfetched.exception()
            self._unfetched = None
        if self._is_over:
            self._resolve(future)
        else:
            self._waiting.append(future)
        if self.on_future is not None:
            self.on_future(future)
        return future

    def settle(self, results: Sequence[Array | None], error: BaseException | None, is_cancelled: bool) -> None:
        """Resolve all futures at the end of the pass.

        Args:
            results: the captured gradients.
            error: the error of a failed pass, or None.
            is_cancelled: True if the error is a cancellation, so that futures are cancelled as well.
        """
        self._is_over, self._results, self._error, self._is_cancelled = True, results, error, is_cancelled
        waiting, self._waiting = self._waiting, []
        if error is not None and self._must_report and not waiting and not is_cancelled:
            waiting = [self._unfetched] = [self._loop.create_future()]
        for future in waiting:
            self._resolve(future)

    def _resolve(self, future: Any) -> None:
        if future.done():
            return
        if self._error is None:
            future.set_result([to_tensor(grad) for grad in self._results])
        elif self._is_cancelled:
            future.cancel()
        else:
            future.set_exception(self._error)
            if not self._must_report:
                future.exception()  # it is raised where the pass is awaited
