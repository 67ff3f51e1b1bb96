"""Failpoints: named points of the protocol at which a test can kill a worker, or observe that it has been reached.

The code calls `reach` at a point; nothing happens unless a test of this process has armed or observed the point.

Source: etcd's gofail.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Mapping
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

from aiograd.errors import ArgumentError

#: name of every point -> description of the event that it marks
POINTS: Mapping[str, str] = MappingProxyType(
    {
        "fwd.before_receive": "a call has arrived; nothing of it was read",
        "fwd.after_receive": "the call is known, and its function has not begun",
        "fwd.in_compute": "the function of the call runs",
        "fwd.before_reply": "the function has returned; its answer is not recorded",
        "fwd.mid_send": "a part of the answer was handed to the transport",
        "fwd.after_send": "all of the answer was handed to the transport",
        "bwd.before_receive": "gradients have arrived; nothing of them was read",
        "bwd.after_receive": "the gradients are known to have arrived, and are not used yet",
        "bwd.before_compute": "the nodes that wait for the gradients have not begun",
        "bwd.in_compute": "the nodes run",
        "bwd.after_accumulate": "gradients were added to what is staged; nothing was sent on",
        "bwd.after_send": "gradients for other workers were handed to the transport",
        "bwd.before_ack": "all of it is done, and the sender of the gradients was not told",
        "commit.before_prepare": "asked to prepare, and did nothing yet",
        "commit.after_prepare": "prepared, and did not say so",
        "commit.half": "some of the workers have committed",
        "commit.before_reply": "committed, and did not say so",
    }
)

_listeners: tuple[Callable[[str], None], ...] = ()


class RequestPoints(NamedTuple):
    """The points that a connection passes with requests of one kind; "" where there is none."""

    request_sent: str = ""
    #: between two frames of an answer
    answer_begun: str = ""
    answer_sent: str = ""


def reach(point: str) -> None:
    """Report that the running code has reached a point; "" is none. Costs next to nothing unless points are armed or observed.

    Raises:
        Exception: an exception of the action that was armed there.
        ArgumentError: points are armed or observed, and there is no such point.
    """
    if _listeners and point:
        _check(point)
        for listener in _listeners:
            listener(point)


def is_watched() -> bool:
    """True if points are armed or observed."""
    return bool(_listeners)


@types.coroutine
def reach_within(point: str, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Await `coroutine`, and report that a point is reached when it suspends for the first time, or has ended without suspending.

    Returns:
        The result of the coroutine.
    """
    step, value = coroutine.send, None
    is_first = True
    while True:
        try:
            pending = step(value)
        except StopIteration as stop:
            if is_first:
                reach(point)
            return stop.value
        if is_first:
            is_first = False
            try:
                reach(point)
            except BaseException:
                coroutine.close()
                raise
        try:
            step, value = coroutine.send, (yield pending)
        except BaseException as error:
            step, value = coroutine.throw, error


def observe(callback: Callable[[str], None]) -> Callable[[], None]:
    """Call `callback` with the name of every point that is reached in this process.

    Returns:
        A function that ends the observation; idempotent.
    """
    global _listeners

    def tell(point: str) -> None:  # of its own for each call, so that one callback may observe twice
        callback(point)

    def stop() -> None:
        global _listeners
        _listeners = tuple(listener for listener in _listeners if listener is not tell)

    _listeners = (*_listeners, tell)
    return stop


class Failpoint:
    """An action armed at a point, see `arm`. Leaving its ``with`` block disarms it."""

    __slots__ = ("point", "hits", "_action", "_hit", "_when", "_stop")

    def __init__(self, point: str, action: Callable[[], object], hit: int, when: Callable[[], bool] | None) -> None:
        self.point: str = point
        #: times that the point was reached
        self.hits: int = 0
        self._action = action
        self._hit = hit
        self._when = when
        self._stop = observe(self._reached)

    @property
    def has_fired(self) -> bool:
        """True if the action was called."""
        return self.hits >= self._hit

    def disarm(self) -> None:
        """Disarm the failpoint. Idempotent."""
        self._stop()

    def _reached(self, point: str) -> None:
        if point == self.point and (self._when is None or self._when()):
            self.hits += 1
            if self.hits == self._hit:
                self._action()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.disarm()


def arm(point: str, action: Callable[[], object], *, hit: int = 1, when: Callable[[], bool] | None = None) -> Failpoint:
    """Call `action` once, when the point is reached for the time number `hit`.

    Args:
        point: one of `POINTS`.
        action: the function to call; an exception of it propagates from `reach`.
        hit: counted from 1.
        when: returns True if a visit counts; None: all visits count.

    Raises:
        ArgumentError: no such point, or `hit` below 1.
    """
    _check(point)
    if hit < 1:
        raise ArgumentError(f"arm({point!r}, hit={hit}): visits are counted from 1")
    return Failpoint(point, action, hit, when)


def _check(point: str) -> None:
    if point not in POINTS:
        raise ArgumentError(f"no failpoint {point!r}; there are: {', '.join(POINTS)}")
