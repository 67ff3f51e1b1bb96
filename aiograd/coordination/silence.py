"""The wait for peers that are told something at the end of a transaction: as long as they may still be heard.

Note [Silence is counted once]
    A peer is lost when no frame of it has come for a while, its silence, whichever request waits for it. A request that is made then dials the peer
    anew, in case it is back, and takes a silence of its own to find that it is not. At the end of a transaction that would add up: a member is asked
    to commit, asked again, told in the next step. So these waits are bounded by what is left of the silence, counted from the last frame of the
    peer in any session; for a lost peer that is nothing. As long as frames come it has as much time as the request.

    The bound is on the wait alone. It decides nothing: a participant that was not told is one that has not acknowledged the decision, as if all
    attempts had failed. Dialling goes on for a silence of its own, so a peer that is back is found by one of the next attempts: see Note [Until it is
    acknowledged] in `decisions`. In a pass telling itself goes on.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from aiograd.errors import WorkerLostError

T = TypeVar("T")


async def _wait(task: asyncio.Future[Any], seconds: float) -> None:
    await asyncio.wait([task], timeout=seconds)


class Untold:
    """The peers that are being told something and have not acknowledged it, and the wait for them."""

    __slots__ = ("names", "_waits")

    def __init__(self) -> None:
        self.names: set[str] = set()
        #: by wait: the peers that it is for
        self._waits: dict[asyncio.Future[None], set[str]] = {}

    def discard(self, names: Iterable[str]) -> None:
        """Peers have been told, or are not told any more."""
        gone = frozenset(names)
        self.names -= gone
        for waiter, awaited in self._waits.items():
            awaited -= gone
            if not awaited and not waiter.done():
                waiter.set_result(None)

    async def wait(
        self,
        silence_left: Callable[[str], float],
        *,
        among: frozenset[str] | None = None,
        at_least: float = 0.0,
        seconds: float = math.inf,
        wait: Callable[[asyncio.Future[Any], float], Awaitable[None]] = _wait,
    ) -> None:
        """Wait until peers have been told, or are lost.

        Args:
            silence_left: returns the seconds in which a peer may still be heard, before it is lost; 0: it is lost.
            among: the peers to wait for; None: all.
            at_least: seconds in which a lost peer is waited for as well.
            seconds: seconds to wait at most.
            wait: waits for a future, for so many seconds.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        # times of the loop, not seconds that have passed: their difference to `now` is exact where it is small, so a wait never ends where it began
        least, most = now + at_least, now + seconds
        while awaited := {*self.names} if among is None else self.names & among:
            now = loop.time()
            left = least - now
            if left <= 0:
                lefts = {name: silence_left(name) for name in awaited}
                awaited = {name for name, each in lefts.items() if each > 0}
                left = max(lefts.values())
            left = min(left, most - now)
            if left <= 0:
                return
            waiter: asyncio.Future[None] = loop.create_future()
            self._waits[waiter] = awaited
            try:
                await wait(waiter, left)
            finally:
                del self._waits[waiter]


async def unless_silent(request: Coroutine[Any, Any, T], worker: str, silence_left: Callable[[], float], stage: str, at_least: float) -> T:
    """Make a request at the end of a transaction.

    Args:
        request: the request.
        worker: name of the worker that it is made to.
        silence_left, at_least: as of `Untold.wait`.
        stage: its name.

    Returns:
        The answer.

    Raises:
        WorkerLostError: the worker has been silent for too long. The errors of the request.
    """
    loop = asyncio.get_running_loop()
    task, least = loop.create_task(request, name=f"aiograd:{stage}:{worker}"), loop.time() + at_least
    try:
        while not task.done():
            left = max(silence_left(), least - loop.time())
            if left <= 0:
                raise silent(worker, stage)
            await asyncio.wait([task], timeout=left)
        return task.result()
    finally:
        await stop(task)


async def stop(task: asyncio.Task[Any]) -> None:
    """Cancel a task unless it is done, and wait for its end."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])


def silent(worker: str, stage: str) -> WorkerLostError:
    """The error for a request to a worker that has been silent for too long."""
    return WorkerLostError(f"worker {worker!r} was lost ({stage}): it was silent for too long, and is not back yet", worker=worker, stage=stage)
