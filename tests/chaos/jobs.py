"""Jobs on the executor that raise, come back late or never: what a stuck or failing kernel looks like from outside."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar

from aiograd.testing import SimulatedLoop
from aiograd.testing.jobs import InlineJobs

T = TypeVar("T")
#: seconds that a late job takes longer, at most
LATE = 3.0


class JobFailed(Exception):
    """The exception of a failing job: one of another library."""


@dataclass(frozen=True, kw_only=True)
class JobFaults:
    """Probabilities of the faults of a job."""

    raises: float = 0.0
    late: float = 0.0
    never: float = 0.0

    @classmethod
    def drawn(cls, random: Random) -> JobFaults:
        """Often nothing."""
        if random.random() < 0.6:
            return cls()
        return cls(
            raises=random.choice((0.0, 0.02, 0.1)), late=random.choice((0.0, 0.05, 0.2)), never=random.choice((0.0, 0.0, 0.02))
        )


class FaultyJobs(InlineJobs):
    """Runs jobs as `InlineJobs` does, apart from those that a fault hits."""

    def __init__(self, loop: SimulatedLoop, faults: JobFaults) -> None:
        super().__init__(loop, loop.stream("exec"))
        self.faults = faults
        #: how often each fault has hit a job
        self.hits: Counter[str] = Counter()
        self._random: Random = loop.stream("jobs")

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run `job` later, or do what a fault does to it."""
        faults = self.faults
        if faults == JobFaults():
            return super().submit(job)
        draw = self._random.random()
        if draw < faults.raises:
            self.hits["raises"] += 1
            return super().submit(_fail)
        draw -= faults.raises
        if draw < faults.never:
            self.hits["never"] += 1
            return self._loop.create_future()
        draw -= faults.never
        if draw >= faults.late:
            return super().submit(job)
        self.hits["late"] += 1
        result: asyncio.Future[Any] = self._loop.create_future()
        seconds = self._random.uniform(0, LATE)
        super().submit(job).add_done_callback(lambda done: self._loop.call_later(seconds, _hand_over, done, result))
        return result


def _fail() -> Any:
    raise JobFailed("a kernel that fails")


def _hand_over(done: asyncio.Future[Any], result: asyncio.Future[Any]) -> None:
    error = done.exception()
    if result.done():
        return
    if error is None:
        result.set_result(done.result())
    else:
        result.set_exception(error)
