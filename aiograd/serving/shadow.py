"""A shadow: a version that computes answered batches too, so that it can be compared before it serves."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import numpy as np

from aiograd.serving.batching import TaskBatch
from aiograd.serving.forward import BoundVersion, VersionedForward
from aiograd.serving.statistics import Comparison
from aiograd.tensors.core import host_array, make

#: batches that wait to be computed; further ones are left out
MOST_WAITING = 4


class DifferenceSum:
    """The sum of differences between a shadow's outputs and the answers."""

    def __init__(self) -> None:
        self.requests = self.errors = 0
        self._sum = 0.0
        self._count = 0

    def add(self, requests: int, answered: Any, found: Any) -> None:
        """Add the outputs of a batch; a Tensor or a tuple of them each."""
        left, right = _arrays(answered), _arrays(found)
        if [array.shape for array in left] != [array.shape for array in right]:
            self.fail(requests)
            return
        self.requests += requests
        for one, other in zip(left, right, strict=True):
            self._sum += float(np.abs(one.astype(np.float64) - other.astype(np.float64)).sum())
            self._count += one.size

    def fail(self, requests: int) -> None:
        """Count a batch for which the shadow raised."""
        self.requests += requests
        self.errors += requests

    @property
    def comparison(self) -> Comparison:
        """The figures so far."""
        return Comparison(self.requests, self.errors, self._sum / self._count if self._count else 0.0)


class Shadow:
    """Computes a share of the batches, from 0 to 1, with another version, after their answers have gone out."""

    def __init__(self, forward: VersionedForward, bound: BoundVersion, share: float, difference_sum: DifferenceSum) -> None:
        self.bound = bound
        self.share = share
        self._forward = forward
        self._difference_sum = difference_sum
        self._due = 0.0
        #: the columns of each request of a batch, its rows, and its outputs
        self._waiting: deque[tuple[list[tuple[Any, ...]], int, Any]] = deque()
        self._task: asyncio.Task[None] | None = None

    def add(self, batch: TaskBatch, outputs: Any) -> None:
        """Compare this batch, if it belongs to the share and there is room."""
        self._due = min(self._due, 1.0) + self.share
        if self._due < 1.0 or len(self._waiting) >= MOST_WAITING:
            return
        self._due -= 1.0
        parts = [tuple([_copy(column) for column in task.rows]) for task in batch.tasks]  # callers may change theirs after their answers
        self._waiting.append((parts, batch.size, tuple([make(array.copy()) for array in _arrays(outputs)])))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._compare(), name="aiograd:shadow")

    def stop(self) -> None:
        """Leave out the waiting batches, and cancel the one that is computed. Idempotent."""
        self._waiting.clear()
        if self._task is not None:
            self._task.cancel()

    async def aclose(self) -> None:
        """Stop, and wait for the end of the batch that is computed. Idempotent."""
        self.stop()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _compare(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)  # the answers of the batch go out first
            parts, size, outputs = self._waiting.popleft()
            try:
                found = await self._forward(self.bound, parts, size)
            except Exception:
                self._difference_sum.fail(len(parts))
            else:
                self._difference_sum.add(len(parts), outputs, found)


def _copy(tensor: Any) -> Any:
    return make(host_array(tensor).copy())


def _arrays(outputs: Any) -> list[Any]:
    return [host_array(output) for output in (outputs if isinstance(outputs, (tuple, list)) else (outputs,))]
