"""LoopBudget: limits how long all passes together may keep one event loop before other tasks get their turn.

Note [One budget for all passes]
    The work of all passes between two rounds of the loop is charged to one time budget. A pass takes a turn before it computes on the
    loop. While the budget lasts, a turn that ends is given to the next pass at once; when it is spent, passes queue (first
    come, first served), the loop runs a few rounds for all other tasks, and the next pass in the queue gets a fresh budget. So a thousand
    passes in flight, or a training loop of many passes too short to be sliced, block the loop no longer than one pass does.
    A pass that was given the rest of a budget and has used it up keeps its place: it stays first in the queue, so each gets a whole
    budget in its turn.

    Three rounds rather than one: a timer or a socket needs two rounds until the coroutine behind it runs.

    Gates are asked before a pass gets a fresh budget: each returns how many seconds passes may be kept waiting, 0.0 to let them run. They are
    asked again every `GATE_PAUSE`; passes run as soon as all return 0.0, and at the latest after the longest of these times, which begins anew
    with every budget. So gates that never open slow passes down and do not stop them. A service adds one so that requests go before its
    training.

Pure of asyncio: uses only ``call_soon``, ``call_later`` and ``create_future`` of the loop it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

#: rounds of the loop between two budgets
ROUNDS = 3
#: seconds until gates that keep passes waiting are asked again
GATE_PAUSE = 0.0005


class LoopBudget:
    """The time budget that the passes of one loop share.

    Args:
        loop: returns the event loop (a weak reference to it).
        budget: seconds of computation between two pauses.
        clock: the clock that measures the budget, in seconds.
    """

    __slots__ = (
        "_loop", "_budget", "_clock", "_busy", "_has_rest", "_waiters", "_open", "_opened", "_context", "_held_since",
        "deadline", "gates", "lag", "longest_lag",
    )  # fmt: skip

    def __init__(self, loop: Callable[[], Any], budget: float, clock: Callable[[], float]) -> None:
        self._loop = loop
        self._budget = budget
        self._clock = clock
        self._busy = False
        #: True if the pass that has the turn was given the rest of a budget
        self._has_rest = False
        #: futures of the passes that wait for a turn; cancelled ones are skipped
        self._waiters: deque[Any] = deque()
        #: context of the callbacks that count rounds; empty, because the context of the task that opened the budget would keep its pass alive
        self._context = Context()
        #: True while a budget is open; it ends `ROUNDS` rounds of the loop after it was opened
        self._open = False
        self._opened = 0.0
        self.deadline: float = 0.0
        #: seconds from opening a budget to the next round of the loop, i.e. the delay of other tasks: the last and the longest
        self.lag: float = 0.0
        self.longest_lag: float = 0.0
        #: each returns the seconds that passes may be kept waiting, 0.0 for none
        self.gates: list[Callable[[], float]] = []
        #: time of the loop since when gates keep passes waiting
        self._held_since: float | None = None

    def over(self) -> bool:
        """True if the budget is spent."""
        return self._clock() > self.deadline

    def left(self) -> float:
        """Seconds that are left of the budget; below 0 if it is spent."""
        return self.deadline - self._clock()

    def is_taken(self) -> bool:
        """True if `take` would fail now."""
        return self._busy or bool(self._waiters) or (self._open and self._clock() > self.deadline)

    def take(self) -> bool:
        """Take a turn if that needs no waiting; returns True if taken."""
        if self.is_taken():
            return False
        if not self._open:
            self._open_budget()
        self._busy = True
        self._has_rest = False
        return True

    async def wait(self, *, first: bool = False) -> None:
        """Wait for a turn, at the end of the queue or as its first. Cancelling gives up the place in the queue."""
        future = self._loop().create_future()
        if first:
            self._waiters.appendleft(future)
        else:
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
        """End the turn; while the budget lasts, the next in the queue gets it at once."""
        self._busy = False
        if self._waiters and self._clock() <= self.deadline:
            self._grant(fresh=False)

    async def pause(self) -> None:
        """Let the loop run its rounds and take a turn again. If cancelled, the caller has no turn any more."""
        first = self._has_rest
        self.release()
        await self.wait(first=first)

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
        if self._waiters and self.gates and self._is_held():
            self._loop().call_later(GATE_PAUSE, self._round, 1, context=self._context)
            return
        self._held_since = None
        self._open = False
        if self._waiters:
            self._open_budget()
            if not self._busy:
                self._grant(fresh=True)

    def _is_held(self) -> bool:
        """True while gates keep passes waiting."""
        now = self._loop().time()
        if self._held_since is None:
            self._held_since = now
        return bool(now - self._held_since < max(gate() for gate in self.gates))

    def _grant(self, *, fresh: bool) -> None:
        """Give the turn to the first waiter that has not been cancelled, with a fresh budget or the rest of this one."""
        while self._waiters:
            future = self._waiters.popleft()
            if not future.done():
                self._busy = True
                self._has_rest = not fresh
                future.set_result(fresh)
                return
