"""ReducedPass: the gradients of one pass or step on their way through a group of workers, in buckets, while others are still computed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from aiograd.coordination.buckets import GradientBuckets
from aiograd.running.types import Array


class ReducingGroup(Protocol):
    """The part of a `Group` that a reducer uses."""

    name: str
    rank: int
    size: int
    names: tuple[str, ...]

    def all_reduce(self, arrays: Any, op: str = "sum", *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """See `Group.all_reduce`."""

    def sum_in_turn(self, arrays: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """See `Group.sum_in_turn`."""

    def all_gather(self, array: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """See `Group.all_gather`."""

    def broadcast(self, arrays: Any = None, root: int = 0, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """See `Group.broadcast`."""

    async def aclose(self) -> None:
        """See `Group.aclose`."""

    def abandon(self, what: str, error: BaseException) -> None:
        """See `Group.abandon`."""


class ReducedPass:
    """The gradients of one pass on their way through the group.

    It does not depend on the engine: `take` gradients in any order, then await `results`.

    Args:
        group: the workers.
        buckets: of the parameters.
        op: "sum" or "mean".
        timeout: seconds for each bucket; None: the worker's default.
        marks: travel with the first bucket, see `marks`.
        addends: gradients of each parameter on this rank; the members add theirs in turn, see `Group.sum_in_turn`. None: each has one.
    """

    def __init__(
        self,
        group: ReducingGroup,
        buckets: GradientBuckets,
        op: str = "mean",
        timeout: float | None = None,
        marks: Sequence[bool] = (),
        addends: int | None = None,
    ) -> None:
        self._group = group
        self._bucket_of = buckets.bucket_of
        self._op = op
        self._timeout = timeout
        self._marks = marks
        self._is_in_turn = addends is not None
        self._buckets = buckets.empty(addends or 1)
        self._taken: set[int] = set()
        self._reducing: list[asyncio.Task[Any]] = []
        #: combined marks, once there are results
        self.marks: list[float] = []

    def take(self, index: int, *grads: Array | None) -> None:
        """Take the gradients of a parameter, which must not change any more; begins to reduce complete buckets.

        Args:
            index: of the parameter.
            grads: as many as `addends`; None: there is none on this rank.
        """
        self._taken.add(index)
        self._buckets[self._bucket_of[index]].put(index, *grads)
        while len(self._reducing) < len(self._buckets) and not self._buckets[len(self._reducing)].missing:
            number = len(self._reducing)
            self._reducing.append(watched(self._begin(number), f"bucket {number}"))

    def _begin(self, number: int) -> Coroutine[Any, Any, Any]:
        """Begin to reduce a bucket; `_split` takes the result."""
        arrays = self._buckets[number].arrays(() if number else self._marks)
        if self._is_in_turn:
            return self._group.sum_in_turn(arrays, timeout=self._timeout)
        return self._group.all_reduce(arrays[0], self._op, timeout=self._timeout)

    def _split(self, number: int, result: Any) -> tuple[dict[int, Array | None], list[float]]:
        """The gradients by parameter, and the marks, of a bucket that is reduced."""
        return self._buckets[number].split(result)

    def take_rest(self) -> None:
        """All other parameters have no gradients on this rank."""
        for index in self._bucket_of:
            if index not in self._taken:
                self.take(index, None)

    async def results(self) -> list[Array | None]:
        """The combined gradients in the order of the parameters, None where no rank had one. Cancelling makes the group fail."""
        reducing = self._reducing
        try:
            found: dict[int, Array | None] = {}
            for number, task in enumerate(reducing):
                grads, marks = self._split(number, await task)
                found |= grads
                self.marks += marks
        except BaseException:
            self.cancel()
            await asyncio.gather(*reducing, return_exceptions=True)
            raise
        return [found[index] for index in range(len(found))]

    def cancel(self) -> None:
        """Give up. Where a bucket is under way, the group fails."""
        for task in self._reducing:
            task.cancel()


def watched(operation: Coroutine[Any, Any, Any], what: str) -> asyncio.Task[Any]:
    """A task that waits for a collective. Its error is looked at, so that it is not reported where the pass fails with another one."""
    task = asyncio.get_running_loop().create_task(operation, name=f"aiograd:reduce {what}")
    task.add_done_callback(lambda task: task.cancelled() or task.exception())
    return task
