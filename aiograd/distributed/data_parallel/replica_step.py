"""ReplicaStep: one step of a replica, up to the commit.

Note [A step of replicas]
    The loss of a replica is the mean over the rows of its shard. Its backward begins with the shard's part of all rows, so that the sum over the
    replicas, in the order of their ranks, is the gradient of the mean over the batch. Where the optimizer takes a step only after several of
    these, rank 0 begins its contribution with the sum so far, so all additions have the order of one process. With a compressor the sum of the
    decoded gradients of a step is added to the sum so far, which is not compressed again. Gradients are summed in buckets, while backward still runs.

    Gradients never get into ``grad``. New parameters, the state of the optimizer, the sum of gradients, residuals of the compressor and the buffers
    (rank 0's, for all) wait beside the old ones until the step is committed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.coordination.module_calls import BufferSnapshot
from aiograd.coordination.reduced_pass import ReducedPass
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.sharded_optimizer import ShardedOptimizer
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running.offloading import offload
from aiograd.running.random import Generator, drawing_from
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from aiograd.tensors.creation import asarray
from aiograd.tensors.passes import grad


class ReplicaStep:
    """One step of a replica. See Note [A step of replicas].

    Args:
        replica: the replica.
        group: it and the others.
    """

    #: gradients stay out of leaves
    leaves: frozenset[AccumulateGrad] = frozenset()

    def __init__(self, replica: Replica, group: Group) -> None:
        self._replica = replica
        self._group = group
        self._running: list[Array | None] | None = None
        self._sums = replica.reduced_pass(group)
        #: parameters with gradients that are being summed
        self._taken: set[int] = set()
        #: buffers as the loss has left them, and the buffers with the values that they are to have
        self._statistics: list[Array] = []
        self._buffers: list[tuple[Any, Array]] = []

    async def carry_out(self, shard: Sequence[Any], weight: float, seed: Sequence[int]) -> Any:
        """Do everything that can be done before the commit. Cancelling it makes the group fail.

        Args:
            shard: the arguments of the method that computes the loss.
            weight: of the shard: its part of the rows of the batch; 0: it has none, and the loss is not computed.
            seed: of the random numbers of the step on this replica.

        Returns:
            The loss, outside of any graph.
        """
        replica = self._replica
        sums = self._sums
        try:
            loss = await self._backward(shard, weight, seed, sums)
            for index in range(len(replica.parameters)):
                if index not in self._taken:
                    self._take(sums, index, None)
            reduced = await sums.results()
            if replica.compress is not None:
                reduced = [_sum_of(*each) for each in zip(replica.running, reduced, strict=True)]
        except BaseException:
            sums.cancel()
            raise
        buffers = list(replica.module.buffers())
        if buffers:
            values = await self._group.broadcast(self._statistics if self._group.rank == 0 else None)
            self._buffers = list(zip(buffers, values, strict=True))
        if (replica.taken + 1) % replica.accumulate:
            self._running = reduced
            return loss
        withdrawn: list[bool] = []
        try:
            await offload(self._update, reduced, withdrawn)
            if isinstance(replica.optimizer, ShardedOptimizer):
                await replica.optimizer.exchange(self._group)
        except BaseException:
            withdrawn.append(True)
            raise
        return loss

    async def _backward(self, shard: Sequence[Any], weight: float, seed: Sequence[int], sums: ReducedPass) -> Any:
        """The loss of the shard; its weighted gradients are being summed when this returns.

        Buffers are then as they were before, and `_statistics` has their new values.
        """
        replica = self._replica
        before = BufferSnapshot([replica.module])
        hooks: list[Any] = []

        def undo() -> None:
            self._statistics = [buffer._data.copy() for buffer in replica.module.buffers()]
            before.restore()

        try:
            if not weight:
                return make(np.asarray(np.nan, replica.parameters[0].dtype))
            with drawing_from(Generator(tuple(seed))):
                loss = await replica.loss(shard)
            for index, parameter in enumerate(replica.parameters):
                hooks.append(parameter.register_hook(functools.partial(self._take, sums, index)))
            part = make(np.full(loss.shape, weight, loss.dtype)).to(loss.device)
            await grad(loss, replica.parameters, part, allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()
            replica.release(undo)
        return loss.detach()

    def _take(self, sums: ReducedPass, index: int, mine: Any) -> None:
        """The gradient of a parameter is complete, or there is none: let it be summed with the others."""
        self._taken.add(index)
        array = None if mine is None else mine.detach()._data
        if self._group.rank == 0 and self._replica.compress is None:
            array = _sum_of(self._replica.running[index], array)
        sums.take(index, array)

    def _update(self, grads: Sequence[Array | None], withdrawn: Sequence[Any]) -> None:
        """Clip the gradients and compute the optimizer's step."""
        replica = self._replica
        grads = replica.clipped(grads)
        replica.optimizer.compute(
            [None if each is None else asarray(each).to(parameter.device)._data for parameter, each in zip(replica.parameters, grads, strict=True)],
            withdrawn,
        )

    def commit(self) -> None:
        """Write the step."""
        if self._running is None:
            self._replica.optimizer.commit()
        for buffer, values in self._buffers:
            inplace.write(buffer, asarray(values).to(buffer.device)._data)
        self._replica.committed(self._running, self._sums)

    async def after_commit(self) -> None:
        """Nothing follows."""


def _sum_of(first: Any, second: Any) -> Any:
    """The sum of two gradients, each of which may be missing."""
    return second if first is None else first if second is None else first + second
