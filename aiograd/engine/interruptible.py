"""Interruptible: awaits user code in the runner's own task, so that user code cannot keep a cancelled pass from ending.

Note [Cancelled while awaited inline]
    A coroutine that is awaited inline has the cancellation of the pass thrown into it. It might catch that and return as if nothing had
    happened, or go on for a minute. So it is stepped by hand: its result or error is dropped once the pass has been
    cancelled, and if it suspends again, the rest of the coroutine is put into `rest`, which the runner runs as a task of its own and waits
    for as long as for every other coroutine of the pass. Modes that it had entered (`no_grad`) go with it. Cancellations from within the
    coroutine (a timeout inside it) do not concern the pass; the coroutine handles them as usual.

Rejected: a task for every coroutine (4 µs each, even for coroutines that never suspend, most of all).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from typing import Any


class Interruptible:
    """An awaitable to be awaited in place of `coroutine`.

    Args:
        coroutine: a coroutine that has not been started.
        is_cancelled: returns True if the pass has been cancelled.
    """

    __slots__ = ("_coroutine", "_is_cancelled", "rest")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], is_cancelled: Callable[[], bool]) -> None:
        self._coroutine = coroutine
        self._is_cancelled = is_cancelled
        #: the rest of the coroutine, if it suspended again after the cancellation; else None
        self.rest: Coroutine[Any, Any, Any] | None = None

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine = self._coroutine
        thrown: BaseException | None = None
        value: Any = None
        while True:
            try:
                waits_for = coroutine.send(value) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                if thrown is None or not self._is_cancelled():
                    return stop.value
            except BaseException:
                if thrown is None or not self._is_cancelled():
                    raise
            else:
                if thrown is not None and self._is_cancelled():
                    self.rest = _resumed(_Remainder(coroutine, waits_for))
                else:
                    try:
                        value, thrown = (yield waits_for), None
                    except BaseException as error:
                        thrown = error
                    continue
            raise thrown


class _Remainder:
    """A coroutine that has been started and waits for something."""

    __slots__ = ("_coroutine", "_waits_for")

    def __init__(self, coroutine: Coroutine[Any, Any, Any], waits_for: Any) -> None:
        self._coroutine = coroutine
        self._waits_for = waits_for

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, waits_for = self._coroutine, self._waits_for
        while True:
            value, thrown = None, None
            try:
                value = yield waits_for
            except BaseException as error:
                thrown = error
            try:
                waits_for = coroutine.send(value) if thrown is None else coroutine.throw(thrown)
            except StopIteration as stop:
                return stop.value


async def _resumed(remainder: _Remainder) -> Any:
    return await remainder
