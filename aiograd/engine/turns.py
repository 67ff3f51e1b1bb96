"""Turns: how many passes share one event loop without keeping it from anything else.

Note [One budget for all passes]
    Whatever work all passes do between two rounds of the loop comes out of one time budget. A pass takes a turn before it computes on the
    loop; while the budget of the current round lasts, turns cost nothing and go from hand to hand; when it is spent, passes queue (first
    come, first served), the loop gets a few rounds for everybody else, and the next in the queue gets a fresh budget. So a thousand passes
    in flight, or a training loop whose passes are all too short to be sliced, hold the loop up no longer than one pass does.

    Three rounds rather than one: a timer or a socket needs two rounds until the coroutine behind it runs.

Pure of asyncio: uses only ``call_soon`` and ``create_future`` of the loop it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

#: rounds of the loop between two budgets
ROUNDS = 3


class Turns:
    """The turnstile of one loop.

    Args:
        loop: gives the event loop (a weak reference to it).
        budget: seconds of computation between two pauses.
        clock: what measures them.
    """

    __slots__ = ("_loop", "_budget", "_clock", "_busy", "_waiters", "_open", "_opened", "_context", "deadline", "lag", "longest_lag")

    def __init__(self, loop: Callable[[], Any], budget: float, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._budget = budget
        self._clock = clock
        self._busy = False
        #: futures of those who wait; the cancelled ones are skipped when it is their turn
        self._waiters: deque[Any] = deque()
        #: of the callbacks that count rounds: an empty one, since that of whoever opened the budget would keep his pass alive
        self._context = Context()
        #: whether a budget is running; it ends `ROUNDS` rounds of the loop after it was opened
        self._open = False
        self._opened = 0.0
        self.deadline = 0.0
        #: seconds from when a budget was opened to the next round of the loop, the last time and at most: how late the loop was for others
        self.lag = self.longest_lag = 0.0

    def over(self) -> bool:
        """Whether the budget is spent."""
        return self._clock() > self.deadline

    def take(self) -> bool:
        """Take a turn if one is to be had at once."""
        if self._busy or self._waiters:
            return False
        if not self._open:
            self._open_budget()
        elif self._clock() > self.deadline:
            return False
        self._busy = True
        return True

    async def wait(self) -> None:
        """Wait for a turn. Cancelling gives up the place in the queue."""
        future = self._loop().create_future()
        self._waiters.append(future)
        if not self._open:
            self._open_budget()
        try:
            fresh = await future
        except BaseException:
            if not future.cancel() and not future.cancelled():
                self.release()  # the turn had been granted already
            raise
        if fresh:
            self.deadline = self._clock() + self._budget

    def release(self) -> None:
        """End the turn; while the budget lasts the next in the queue has it at once."""
        self._busy = False
        if self._waiters and self._clock() <= self.deadline:
            self._grant(fresh=False)

    async def pause(self) -> None:
        """Give the loop its rounds and take a turn again. Cancelled, the turn is lost."""
        self.release()
        await self.wait()

    def _open_budget(self) -> None:
        self._open = True
        self._opened = self._clock()
        self.deadline = self._opened + self._budget
        self._loop().call_soon(self._round, ROUNDS, context=self._context)

    def _round(self, left: int) -> None:
        if left == ROUNDS:
            self.lag = self._clock() - self._opened
            self.longest_lag = max(self.longest_lag, self.lag)
        if left > 1:
            self._loop().call_soon(self._round, left - 1, context=self._context)
            return
        self._open = False
        if self._waiters:
            self._open_budget()
            if not self._busy:
                self._grant(fresh=True)

    def _grant(self, *, fresh: bool) -> None:
        """Give the first in the queue who has not been cancelled the turn, with a fresh budget or what is left of this one."""
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                self._busy = True
                future.set_result(fresh)
                return
