"""Announcements: where the workers of a cluster are, on its way from the coordinator to all of them.

Note [One at a time]
    A cluster of n workers that come one after the other would cost n * n requests if each were announced by itself. So while one announcement is
    under way, the next ones wait and go out together, in one request to each worker: an announcement takes longer where there are many workers, and
    there are the fewer of them.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Generic, TypeVar

from aiograd.errors import WorkerLostError

T = TypeVar("T")


class Announcements(Generic[T]):
    """The announcements of one cluster.

    Args:
        tell: tells a worker news of others by name.
        receivers: names of the workers that are to be told now.
        context: the context that all announcements are made in.
    """

    def __init__(
        self,
        tell: Callable[[str, Mapping[str, T]], Coroutine[Any, Any, Any]],
        receivers: Callable[[], Iterable[str]],
        context: Callable[[], contextvars.Context],
    ) -> None:
        self._tell = tell
        self._context = context
        self._receivers = receivers
        self._news: dict[str, T] = {}
        self._turn = asyncio.Lock()
        #: sends `_news`; None: there are none
        self._next: asyncio.Task[None] | None = None

    async def announce(self, name: str, news: T) -> None:
        """Tell all others of a worker; returns when they know.

        A worker that is lost meanwhile is passed over. Cancelling stops the waiting only.

        Args:
            name: of the worker.
            news: of it; later ones take the place of earlier ones that have not been sent.

        Raises:
            The first error of another kind with which a worker answers.
        """
        self._news[name] = news
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._send(), name="aiograd:cluster:announce", context=self._context().copy())
            self._next.add_done_callback(_look_at)
        await asyncio.shield(self._next)

    async def _send(self) -> None:
        async with self._turn:
            news, self._news, self._next = self._news, {}, None
            receivers = [(each, {name: what for name, what in news.items() if name != each}) for each in self._receivers()]
            answers = await asyncio.gather(*(self._tell(each, about) for each, about in receivers if about), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError):
                raise answer


def _look_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()  # its waiting callers have the error
