"""ReplicaStep: one step of a replica, up to the commit.

Note [A step of replicas]
    The loss of a shard is the mean over its rows. Its backward begins with the shard's part of all rows, so that the sum over the shards, in their
    order, is the gradient of the mean over the batch. A replica with several shards computes them in turn, each from the buffers and with the random
    numbers that it would have on a replica of its own. Where the optimizer takes a step only after several of these, rank 0 begins its
    contribution with the sum so far, so all additions have the order of one process. With a compressor a replica adds up the gradients of its
    shards; the sum of the decoded gradients of a step is added to the sum so far, which is not compressed again. Gradients are summed in buckets,
    while backward of a replica's last shard still runs.

    Gradients never get into ``grad``. New parameters, the state of the optimizer, the sum of gradients, residuals of the compressor and the buffers
    (those of shard 0, for all) wait beside the old ones until the step is committed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.coordination.module_calls import BufferSnapshot
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.replica_messages import ShardRun
from aiograd.distributed.data_parallel.shard_gradients import sum_of
from aiograd.distributed.data_parallel.sharded_optimizer import ShardedOptimizer
from aiograd.errors import ModifiedError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running.offloading import offload
from aiograd.running.random import Generator, drawing_from
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import counter_of, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.passes import grad


class ReplicaStep:
    """One step of a replica. See Note [A step of replicas].

    Args:
        replica: the replica.
        group: it and the others.
        run: the shards of this replica.
    """

    #: gradients stay out of leaves
    leaves: frozenset[AccumulateGrad] = frozenset()

    def __init__(self, replica: Replica, group: Group, run: ShardRun) -> None:
        self._replica = replica
        self._group = group
        self._run = run
        self._shards = range(run.first, run.first + len(run.shards))
        self._work = replica.shard_gradients(run.call)
        self._running: list[Array | None] | None = None
        self._is_one = group.rank == 0 or replica.compress is not None
        self._sums = replica.reduced_pass(group, (1 if self._is_one else len(self._shards)) if run.is_in_turn else None)
        #: parameters with gradients that are being summed
        self._taken: set[int] = set()
        #: the buffers with the values that they are to have
        self._buffers: list[tuple[Any, Array]] = []

    async def carry_out(self) -> list[Any]:
        """Do everything that can be done before the commit. Cancelling it makes the group fail.

        Returns:
            The losses by shard, outside of any graph.
        """
        replica = self._replica
        sums, work = self._sums, self._work
        try:
            missing = [shard for shard in self._shards if shard not in work.losses]
            for shard in missing:
                if self._group.rank == 0:
                    work.add_up()
                work.losses[shard] = await self._backward(shard, is_last=shard == missing[-1])
            for index in range(len(replica.parameters)):
                if index not in self._taken:
                    self._take(index)
            losses = [work.losses[shard] for shard in self._shards]
            reduced = await sums.results()
            if replica.compress is not None:
                reduced = [sum_of(*each) for each in zip(replica.running, reduced, strict=True)]
        except BaseException:
            sums.cancel()
            raise
        buffers = list(replica.module.buffers())
        if buffers:
            values = await self._group.broadcast(work.statistics if self._group.rank == 0 else None)
            self._buffers = list(zip(buffers, values, strict=True))
        if (replica.taken + 1) % replica.accumulate:
            self._running = reduced
            return losses
        withdrawn: list[bool] = []
        try:
            await offload(self._update, reduced, withdrawn)
            if isinstance(replica.optimizer, ShardedOptimizer):
                await replica.optimizer.exchange(self._group)
        except BaseException:
            withdrawn.append(True)
            raise
        return losses

    async def _backward(self, shard: int, *, is_last: bool) -> Any:
        """The loss of a shard; its weighted gradients are there when this returns. Buffers are then as they were before.

        Args:
            shard: its index.
            is_last: the gradients of all shards are summed as soon as those of this one come.
        """
        replica = self._replica
        place = shard - self._shards.start
        weight, grads = self._run.weights[place], self._work.begin(shard)
        before = BufferSnapshot([replica.module])
        versions = [counter_of(parameter)[0] for parameter in replica.parameters]
        hooks: list[Any] = []

        def undo() -> None:
            if not shard:
                self._work.statistics = [buffer._data.copy() for buffer in replica.module.buffers()]
            before.restore()

        def come(index: int, mine: Any) -> None:
            grads[index] = None if mine is None else mine.detach()._data
            if is_last:
                self._take(index)

        try:
            if not weight:
                return make(np.asarray(np.nan, replica.parameters[0].dtype))
            with drawing_from(Generator((*self._run.seed, shard))):
                loss = await replica.loss(self._run.shards[place])
            for index, parameter in enumerate(replica.parameters):
                hooks.append(parameter.register_hook(functools.partial(come, index)))
            part = make(np.full(loss.shape, weight, loss.dtype)).to(loss.device)
            await grad(loss, replica.parameters, part, allow_unused=True)
            if versions != [counter_of(parameter)[0] for parameter in replica.parameters]:
                raise ModifiedError(
                    f"{type(replica.module).__name__}: the loss of a shard has written to parameters, so replicas would differ; no step was "
                    "taken. Write to buffers, or between steps, and give all replicas one state again, with load_state_dict"
                )
        finally:
            for hook in hooks:
                hook.remove()
            replica.release(undo)
        return loss.detach()

    def _take(self, index: int) -> None:
        """The gradients of a parameter are complete, or there are none: let them be summed with the others."""
        self._taken.add(index)
        self._sums.take(index, *self._work.addends(index, self._shards, is_one=self._is_one, is_kept=self._replica.absorb))

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
