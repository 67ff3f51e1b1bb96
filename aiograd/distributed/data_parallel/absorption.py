"""The results of replicas in a step, of which some may be lost.

Note [Absorbing a loss]
    With `absorb` a replica that is lost before the decision is left out, and the step is attempted again without it, in the same call. The others
    keep their runs of shards, and those beside the lost one get its shards. They go on computing theirs while the loss is noticed: sums are given
    up, computations are not, and what is complete is kept, see Note [By shard] in `shard_gradients`. If two replicas have lost each other, and
    the coordinating process has lost neither, one of them is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from aiograd.distributed.data_parallel.remote_replica import RemoteReplica
from aiograd.engine.run import current_engine
from aiograd.engine.run.ending import end
from aiograd.errors import CollectiveError, WorkerLostError

T = TypeVar("T")


async def results_or_loss(
    work: Mapping[RemoteReplica, Coroutine[Any, Any, T]], give_up: Callable[[], Coroutine[Any, Any, None]] | None = None
) -> list[T]:
    """The results of all replicas. Cancelling cancels all.

    Args:
        work: of each replica.
        give_up: lets the other replicas end without the sums, which cannot be completed: where one is lost they end what they compute before the
            error is raised. None: an error is raised at once, but for one of the group, of which the loss of a replica may be the reason.

    Raises:
        WorkerLostError: a replica is lost. Otherwise the error of a replica.
    """
    tasks = {asyncio.ensure_future(coroutine): replica for replica, coroutine in work.items()}
    try:
        done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if give_up is not None and others and all(isinstance(task.exception(), (WorkerLostError, CollectiveError, type(None))) for task in done):
            await give_up()
            await asyncio.wait(others)
        while give_up is None and others and all(isinstance(task.exception(), (CollectiveError, type(None))) for task in done):
            done, others = await asyncio.wait(others, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        cancelled = await end(tasks, current_engine().cancel_grace)
    if cancelled is not None:
        raise cancelled
    failed = [(error, replica) for task, replica in tasks.items() if task.done() and not task.cancelled() and (error := task.exception())]
    if failed:
        raise min(failed, key=_order)[0]
    return [task.result() for task in tasks]


def _order(failed: tuple[BaseException, RemoteReplica]) -> int:
    """The place of an error of a replica among all errors: a loss that this process has seen comes before one that a replica tells of."""
    error, replica = failed
    if isinstance(error, WorkerLostError):
        return int(error.worker != replica.owner)
    return 3 if isinstance(error, CollectiveError) else 2
