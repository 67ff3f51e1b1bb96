"""ReplicaMember: one replica on its worker, as the coordinating process asks it.

Note [Order of a replica's life]
    A member is made around a module and its optimizer. Before the first step, and again after every failure and every change of the membership,
    all members join a group (`join`), with the version of their state; a member with an older state gets the state of another before
    (`synchronise`). Then there are steps: `run` computes and reduces gradients and leaves the member prepared, `commit` writes, `abort` drops.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.coordination.client import StepWording
from aiograd.coordination.compressor_message import received_form
from aiograd.coordination.member import StepMember
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.outline import ModuleOutline
from aiograd.coordination.session import StepSession, StepWork, kept_for
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.replica_messages import ReplicaOptions, ReplicaResult, ReplicaVersion, ShardRun
from aiograd.distributed.data_parallel.replica_state import ReceivedState, flatten_state
from aiograd.distributed.data_parallel.replica_step import ReplicaStep
from aiograd.distributed.data_parallel.sharded_optimizer import sent_stamp, stamp_of
from aiograd.distributed.objects.adapter_worker import AdapterWorker
from aiograd.errors import ArgumentError, CollectiveError, DistributedError
from aiograd.running.offloading import offload

SUBJECT = "data-parallel replicas"
WORDING = StepWording(
    subject=SUBJECT,
    failure=DistributedError,
    in_doubt="The next step or call of DataParallel settles it.",
    lost="Its state comes from another replica before the next step.",
    without=(
        "Go on without it (`await replicas.remove({worker!r})`), or once the worker runs again with a new replica there "
        "(`await replicas.add({worker!r})`), and take the step again"
    ),
    unconfirmed="The next call settles it, once they can be reached",
)


class ReplicaMember(StepMember[StepWork]):
    """A replica on its worker. See Note [Order of a replica's life].

    Args:
        modules: the module.
        options: the wire value of a `ReplicaOptions`.
        worker: the worker.

    Raises:
        ArgumentError: not one module. ProtocolError: malformed options.
    """

    wording = WORDING

    _worker: AdapterWorker

    def __init__(self, modules: list[Any], options: dict[str, Any], worker: Any) -> None:
        super().__init__(worker)
        self._replica = _make(modules, options)
        #: it and the others, once it has joined them
        self._group: Group | None = None
        self._coordinator: Any = None
        #: references to other replicas
        self.others: list[Any] = []

    def _make_work(self, step: int) -> StepWork:
        return StepWork(step)

    def _others(self, session: StepSession[StepWork]) -> Sequence[Any]:
        return self.others

    # ---------------------------------------------------------------- called by the coordinating process

    async def outline(self) -> list[Any]:
        """The `ModuleOutline` of the model."""
        return encode(ModuleOutline.of({"": self._replica.module}))  # type: ignore[no-any-return]

    async def version(self) -> list[int]:
        """See `Replica.version`."""
        replica = self._replica
        async with replica.alone():
            return encode(ReplicaVersion(*replica.version))  # type: ignore[no-any-return]

    async def begin_load(self, loads: int) -> bool:
        """The state is about to be replaced from outside, which makes it newer than the others' state.

        Args:
            loads: how often states have been loaded then.
        """
        replica = self._replica
        async with replica.alone():
            replica.loads = loads
            replica.forget_residuals()
        return True

    async def synchronise(self, names: list[str], group: str) -> bool:
        """Take the state of the first of some replicas, or give it. Cancelled or failed, the state is as it was.

        Args:
            names: of the workers; all get the first one's state.
            group: an unused name for the group of these workers.
        """
        replica, worker = self._replica, self._worker
        async with replica.alone(), await worker.join(names, group) as gathered:
            if gathered.rank == 0:
                optimizer = {"state": {}, "param_groups": []} if replica.is_sharded else replica.optimizer.current.state_dict()
                outline, arrays = flatten_state(replica.module, optimizer, replica.running, replica.version)
                await gathered.broadcast([outline])
                await gathered.broadcast(arrays)
            else:
                (outline,) = await gathered.broadcast()
                received = ReceivedState(outline, await gathered.broadcast(), replica.module, len(replica.parameters))
                self._forget_step()
                replica.load(received)
            await gathered.barrier()
        return True

    async def held(self) -> list[Any]:
        """The stamps of the parts of the optimizer's state that are here, that in use last. A load that has not ended is over."""
        replica = self._replica
        async with replica.alone():
            replica.drop_load()
            return [sent_stamp(each.stamp) for each in replica.parts()]

    async def divide(self, names: list[str], group: str, wanted: list[Any], sources: list[list[Any]]) -> bool:
        """Get this replica's part of the optimizer's state from replicas that together have all shards; it waits beside the old one until `join`.

        Args:
            names: of the workers of all replicas, in the order of their ranks.
            group: an unused name for the group of these workers.
            wanted: the stamp of the part.
            sources: ranks, with the stamps of the parts that they send; none: there is no state yet.
        """
        replica, worker = self._replica, self._worker
        loads, taken, size, shards = stamp_of(wanted)
        async with replica.alone(), await worker.join(names, group) as gathered:
            self._forget_step()
            divided = replica.sharded.divided(size, shards)
            mine = [replica.part(stamp_of(stamp)).flatten() for rank, stamp in sources if rank == gathered.rank]
            parts: list[Any] = []
            for number in range(max(Counter(rank for rank, _ in sources).values(), default=0)):  # a replica may send both of its parts
                parts += await gathered.all_gather(mine[number] if number < len(mine) else np.empty(0, np.uint8))
            await offload(divided.load_parts, [each for each in parts if each.size])
            divided.loads, divided.taken = loads, taken
            replica.divide(divided)
        return True

    async def begin_optimizer_load(self) -> bool:
        """A whole state of the optimizer is about to come from outside; until `end_optimizer_load` it is beside the one that is here."""
        replica = self._replica
        async with replica.alone():
            replica.begin_load()
        return True

    async def end_optimizer_load(self, loads: int) -> bool:
        """It has come.

        Args:
            loads: how often states of the optimizer have been loaded then.
        """
        replica = self._replica
        async with replica.alone():
            replica.end_load(loads)
        return True

    async def join(
        self, names: list[str], group: str, version: list[int], coordinator: Any, others: list[Any], shards: list[Any] | None = None
    ) -> bool:
        """Join the other replicas; steps can be taken from then on. Earlier steps are over, even if they are in doubt here.

        Args:
            names: of the workers, in the order of their ranks.
            group: name of the group.
            version: of the state that all have.
            coordinator: reference to the outcomes of steps in the coordinating process.
            others: references to other replicas, which are asked for the outcome of a step as well.
            shards: the stamp of this replica's part of the optimizer's state; None: it is not divided.

        Raises:
            DistributedError: this replica has another state. Otherwise as `join_group`.
        """
        replica, worker = self._replica, self._worker
        if list(replica.version) != version:
            raise DistributedError(f"the replica on {worker.name} has version {replica.version} of the state, the others {version}")
        self._forget_step()
        if shards is not None:
            replica.use(stamp_of(shards))
        if self._group is not None:
            await self._group.aclose()
        self._group = await worker.join(names, group)
        self._coordinator, self.others = coordinator, others
        return True

    async def run(self, step: int, run: list[Any]) -> dict[str, Any]:
        """Carry out a step up to the commit. Cancelling gives it up.

        Args:
            step: its number; see Note [Steps] in `aiograd.coordination.member`.
            run: the wire value of a `ShardRun`.

        Returns:
            The wire value of a `ReplicaResult`.

        Raises:
            DistributedError: the step comes too late, or the replica has joined no others. CommitUnknown: an earlier step is in doubt here.
            Exceptions of the loss.
        """
        replica, worker = self._replica, self._worker
        if self._group is None:
            raise DistributedError(f"the replica on {worker.name} has not joined the others")
        session = self._begin_to_run(step, self._coordinator)
        try:
            async with replica.alone():
                execution = ReplicaStep(replica, self._group, parse(ShardRun, run))
                losses = await execution.carry_out()
        except BaseException:
            session.failed()
            raise
        session.prepared(execution)
        return encode(ReplicaResult(losses, kept_for(worker.lease)))  # type: ignore[no-any-return]

    async def give_up(self, step: int) -> bool:
        """End the sums of a step that cannot succeed, since another replica is lost. `run` raises once the shards of this one are computed.

        Args:
            step: its number.
        """
        if self._group is not None and self._session is not None and self._session.step == step:
            self._group.fail(CollectiveError(f"a step of {SUBJECT} was given up: a replica is lost"))
        return True

    async def evaluate(self, shards: list[list[Any]]) -> list[Any]:
        """See `Replica.evaluate`; the output for each shard."""
        replica = self._replica
        async with replica.alone():
            return [await replica.evaluate(shard) for shard in shards]

    # ---------------------------------------------------------------- inside

    def _leave(self) -> None:
        super()._leave()
        if self._group is not None:
            self._worker.keep(self._group.aclose(), "leaving the other replicas")


def _make(modules: Sequence[Any], options: Any) -> Replica:
    """The replica of a request."""
    if len(modules) != 1:
        raise ArgumentError(f"a data-parallel replica of {len(modules)} modules; expected one")
    found = parse(ReplicaOptions, options)
    optimizer = found.optimizer.local_value()
    compress = received_form(found.compress)
    return Replica(
        modules[0], optimizer, found.method, found.clip_norm, found.accumulate, found.bucket_bytes, found.shard_optimizer, compress, found.absorb
    )
