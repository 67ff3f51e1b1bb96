"""ReplicaCoordinator: all replicas as the coordinating process sees them: their steps, and their membership.

Note [Equal replicas]
    Replicas begin with one state and change it by the same commits, so a replica with the highest version has the state of all. Without a failure
    no versions are compared. After a failure, a loss or a change of the membership, before anything else: replicas are told the decisions that
    they have not confirmed, all are asked for their versions, a replica that is behind gets the state of one that is not, and all join a new group.
    So it does not matter how the failure came about.

Note [Lost after the decision]
    A step that is decided was taken, as soon as one replica confirms it: a replica that was lost before it could confirm settles it when it is
    reached again, or it is removed, or made anew with the state of another. If no replica confirms because all were out of reach, the outcome is not
    known (`CommitUnknown`). If all of them had aborted the step before they heard of the decision, no replica has taken it, and it may be tried
    again.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from aiograd.coordination.coordinator import GONE, restarted
from aiograd.coordination.decisions import StepDecision
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.session import WITNESSES, StepWork
from aiograd.distributed.data_parallel.absorption import results_or_loss
from aiograd.distributed.data_parallel.module_coordinator import ModuleCoordinator
from aiograd.distributed.data_parallel.remote_replica import RemoteReplica, missing_state
from aiograd.distributed.data_parallel.replica_member import SUBJECT, WORDING
from aiograd.distributed.data_parallel.replica_messages import ReplicaOptions, ReplicaResult, ReplicaVersion, ShardRun
from aiograd.distributed.data_parallel.shard_gradients import dealt, dealt_again
from aiograd.distributed.data_parallel.sharded_optimizer import covering, sent_stamp, shards_of, stamp_of
from aiograd.distributed.messages.library import CreateOptimizer, ask_library
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.engine.run.failures import mark_committed
from aiograd.engine.run.together import together
from aiograd.errors import CommitUnknown, DistributedError, ReferenceLostError, WorkerLostError
from aiograd.running.assembly import REPLICA_MEMBER_ADAPTER
from aiograd.transaction import Prepared

T = TypeVar("T")
ReplicaDecision = StepDecision[StepWork, RemoteReplica]

#: a part of the state of all that may be missing, and the advice for that
SHARD = (
    "a shard of the state of the optimizer, which is divided among the replicas (shard_optimizer=True)",
    "go on with that of a checkpoint: remove() the lost replicas or add() new ones, and call load_optimizer_state_dict()",
)


class ReplicaCoordinator(ModuleCoordinator[RemoteReplica]):
    """All replicas.

    Args:
        worker: this process's worker.
        module_class, args: of the module.
        optimizer, optimizer_options: of the optimizer, the class by its name.
        options: for `ReplicaMember`.
        timeout: seconds for each request; None: the worker's default.
    """

    def __init__(
        self,
        worker: Worker,
        module_class: Any,
        args: Sequence[Any],
        optimizer: str,
        optimizer_options: Mapping[str, Any],
        options: Mapping[str, Any],
        timeout: float | None,
    ) -> None:
        super().__init__(WORDING, worker, module_class, args, timeout)
        self._optimizer = optimizer
        self._optimizer_options = dict(optimizer_options)
        self._options = dict(options)
        #: steps until the optimizer takes one
        self.accumulate: int = int(options["accumulate"])
        self.is_sharded: bool = bool(options["shard_optimizer"])
        self.absorbs: bool = bool(options["absorb"])
        #: by name the replicas that were left out
        self.lost: dict[str, RemoteReplica] = {}
        #: how often a state of the optimizer was loaded from outside, where it is divided
        self._optimizer_loads = 0
        self._steps = 0
        #: the version of the state of all replicas, as far as it is known; and the number of loads of a state
        self.version: tuple[int, int] = (0, 0)
        #: nothing has happened since all have joined
        self._is_ready = False

    async def aclose(self) -> None:
        """Let every worker forget its replica, also those that were left out. Unreachable workers are left alone."""
        self._take_back()
        await super().aclose()

    # ---------------------------------------------------------------- replicas

    async def _make(self, name: str) -> RemoteReplica:
        refs: list[RemoteRef] = []
        worker, timeout = self.worker, self._timeout
        try:
            refs.append(await worker.remote(name, self._module_class, *self._args, timeout=timeout))
            message = CreateOptimizer(self._optimizer, refs[:1], self._optimizer_options)
            refs.append(await ask_library(worker, name, message, timeout))
            options = encode(ReplicaOptions(**self._options, optimizer=refs[1]))
            refs.append(await refs[0].adapt(REPLICA_MEMBER_ADAPTER, [], options, timeout=timeout))
        except BaseException:
            await self._forget(refs)
            raise
        return RemoteReplica(name, *refs)

    async def leave(self, replica: RemoteReplica) -> None:
        """Go on without a replica, which may have been left out already."""
        if self.lost.pop(replica.owner, None) is None:
            self._leave_out(replica)
            await self._divide_soon()
        await self.drop([replica])

    def _leave_out(self, replica: RemoteReplica, loss: WorkerLostError | None = None) -> None:
        self.remotes.remove(replica)
        self.decisions.forget(replica)
        self._is_ready = False
        if loss is not None:
            first = loss.__cause__ if isinstance(loss.__cause__, WorkerLostError) else loss
            self.lost[replica.owner] = replica
            replica.loss = WorkerLostError(str(first), worker=replica.owner, stage=first.stage, is_gone=first.is_gone)  # holds no frames

    async def enter(self, name: str) -> None:
        """Take in a new replica, in place of a lost one of the same worker if there is one."""
        before = self.find(name)
        if before is not None and await self._is_there(before):
            return
        source = await self.source()
        if source is before:  # it is there again
            return
        if name in self.lost:
            await self.drop([self.lost[name]])
        (made,) = await self.make([name])
        try:
            await self.check_equal([source, made])
            await self.synchronise([source, made])
        except BaseException:
            await self.drop([made])
            raise
        self._is_ready = False
        if before is None:
            self.remotes.append(made)
        else:
            self.remotes[self.remotes.index(before)] = made
            self.decisions.forget(before)
        self.lost.pop(name, None)
        await self._divide_soon()

    async def _divide_soon(self) -> None:
        """The replicas are others: divide the optimizer's state anew, so that others which are lost now take no shard with them.

        Where that fails the next step does it.
        """
        if self.is_sharded:
            with contextlib.suppress(DistributedError):
                await self.get_ready()

    async def _is_there(self, replica: RemoteReplica) -> bool:
        try:
            await self._version(replica)
        except WorkerLostError:
            return False
        return True

    # ---------------------------------------------------------------- states

    async def synchronise(self, replicas: Sequence[RemoteReplica]) -> None:
        """Give the state of the first of some replicas to the others."""
        names, group = self.gathering(replicas, self.worker)
        await results_or_loss({each: self.ask(each, "synchronise", names, group) for each in replicas})

    async def get_ready(self) -> None:
        """See that all replicas are there, have the same state and are in one group. See Note [Equal replicas].

        Raises:
            WorkerLostError: a replica is lost, or the others lack a part of the state that one which was left out may have. DistributedError: the
            replicas with the state of the last step are lost.
        """
        if self._is_ready:
            return
        await self._equalise()
        shards: list[Any] = [None] * len(self.remotes)
        if self.is_sharded:
            shards = await self._divide()
        refs = [each.ref for each in self.remotes]
        others = [[*refs[rank + 1 :], *refs[:rank]][:WITNESSES] for rank in range(len(refs))]
        asked = zip(self.remotes, others, shards, strict=True)
        names, group = self.gathering(self.remotes, self.worker)
        version, outcomes = list(self.version), self.refer(self.worker)
        await results_or_loss({each: self.ask(each, "join", names, group, version, outcomes, rest, stamp) for each, rest, stamp in asked})
        self._is_ready = True

    async def _equalise(self) -> None:
        """See that all replicas are there and have the same parameters and buffers; the state of the optimizer too, unless it is divided."""
        for remote, error in (await self._tell_all(None)).items():
            raise self.explained(restarted(remote, error) if isinstance(error, ReferenceLostError) else error)
        versions = dict(zip(self.remotes, await together([self._version(each) for each in self.remotes]), strict=True))
        source = self._newest(versions)
        for each, version in versions.items():
            if version != self.version:
                await self.synchronise([source, each])

    async def _divide(self) -> list[list[Any]]:
        """See that each replica has its part of the optimizer's state; returns the stamps of these parts.

        Raises:
            DistributedError: the state of a shard is lost.
        """
        held = [list(map(stamp_of, each)) for each in await together([self.ask(each, "held") for each in self.remotes])]
        sources = covering(held, self.version[1])
        if not sources and (self.version[1] or self._optimizer_loads):  # else there is no state yet
            raise self._missing(*SHARD)
        size, loads = len(self.remotes), sources[0][1][0] if sources else 0
        wanted = [(loads, self.version[1], size, shards_of(rank, size)) for rank in range(size)]
        sent = list(map(sent_stamp, wanted))
        if not all(mine in each for mine, each in zip(wanted, held, strict=True)):
            names, group = self.gathering(self.remotes, self.worker)
            told = [[rank, sent_stamp(stamp)] for rank, stamp in sources]
            dividing = zip(self.remotes, sent, strict=True)
            await results_or_loss({each: self.ask(each, "divide", names, group, mine, told) for each, mine in dividing})
        return sent

    async def shard_sources(self) -> list[RemoteReplica]:
        """Replicas that can be reached and have the optimizer's whole state between them.

        Raises:
            WorkerLostError: unreachable replicas may have the missing part. DistributedError: it is lost.
        """
        await self.source()  # settles earlier steps
        answers, failed = await self._ask_reachable(self.remotes, lambda each: self.ask(each, "held"))
        held = [list(map(stamp_of, answers.get(each, ())))[-1:] for each in self.remotes]  # the part in use
        sources = covering(held, self.version[1])
        if not sources:
            raise self._missing(*SHARD, failed)
        return [self.remotes[rank] for rank, _ in sources]

    async def begin_optimizer_load(self) -> RemoteReplica:
        """The replica that is to get a whole state of the optimizer from outside, which is divided then; see `end_optimizer_load`."""
        self._is_ready = False
        await self._equalise()
        await self.ask(self.remotes[0], "begin_optimizer_load")
        return self.remotes[0]

    async def end_optimizer_load(self) -> None:
        """Divide the state."""
        self._optimizer_loads += 1
        await self.ask(self.remotes[0], "end_optimizer_load", self._optimizer_loads)
        await self.get_ready()

    async def source(self) -> RemoteReplica:
        """A replica that has the state of all and can be reached.

        Raises:
            WorkerLostError: there is none, and unreachable replicas may have it. DistributedError: it is lost.
        """
        await self._tell_all(None)
        return self._newest(*await self._ask_reachable(self.remotes, self._version))

    async def _ask_reachable(
        self, replicas: Sequence[RemoteReplica], ask: Callable[[RemoteReplica], Awaitable[T]]
    ) -> tuple[dict[RemoteReplica, T], dict[RemoteReplica, DistributedError]]:
        """The answers of the replicas that can be reached, and the errors of the others."""
        answers: dict[RemoteReplica, T] = {}
        failed: dict[RemoteReplica, DistributedError] = {}
        for each, found in zip(replicas, await asyncio.gather(*map(ask, replicas), return_exceptions=True), strict=True):
            if isinstance(found, DistributedError):
                failed[each] = found
            elif isinstance(found, BaseException):
                raise found
            else:
                answers[each] = found
        return answers, failed

    async def _version(self, replica: RemoteReplica) -> tuple[int, int]:
        version = parse(ReplicaVersion, await self.ask(replica, "version"), replica.owner)
        return version.loads, version.taken

    def _newest(
        self, versions: Mapping[RemoteReplica, tuple[int, int]], failed: Mapping[RemoteReplica, DistributedError] | None = None
    ) -> RemoteReplica:
        """The first replica with the highest version; `failed` as of `missing_state`."""
        newest = max(versions.values(), default=(-1, -1))
        if newest < self.version:
            raise self._missing(f"the state after step {self.version[1]}", "make new replicas, and load a checkpoint", failed)
        self.version = newest
        return next(each for each, version in versions.items() if version == newest)

    def _missing(self, what: str, advice: str, failed: Mapping[RemoteReplica, DistributedError] | None = None) -> DistributedError:
        """See `missing_state`. Replicas that were left out may have the part: then all are taken back, and asked the next time."""
        left_out = {each: each.loss for each in self.lost.values() if each.loss is not None}
        error = missing_state(what, advice, {**left_out, **(failed or {})})
        if isinstance(error, WorkerLostError):
            self._take_back()
        return error

    async def begin_load(self) -> RemoteReplica:
        """The replica that is to get a state from outside, which all get then; see `end_load`."""
        await self.get_ready()
        first = self.remotes[0]
        self._is_ready = False
        await self.ask(first, "begin_load", self.version[0] + 1)
        return first

    async def end_load(self) -> None:
        """Give the state of the first replica to the others."""
        await self.get_ready()

    # ---------------------------------------------------------------- steps

    async def step(self, shards: Sequence[list[Any]], weights: Sequence[float], seed: Sequence[int]) -> list[Any]:
        """Take a step on all replicas, or on none.

        Returns:
            The loss of each shard.

        Raises:
            As `DataParallel.step`.
        """
        call, count = self._steps + 1, len(shards)
        runs: dict[RemoteReplica, range] = {}

        async def attempt() -> list[Any]:
            nonlocal runs
            dealing = dealt_again([runs[each] for each in self.remotes], count) if runs else dealt(count, len(self.remotes))
            runs = dict(zip(self.remotes, dealing, strict=True))
            is_in_turn, draws = any(len(run) > 1 for run in dealing[1:]), [*seed, self.version[1]]
            parts = [(run.start, list(shards[run.start : run.stop]), list(weights[run.start : run.stop])) for run in dealing]
            return await self._attempt([ShardRun(call, *part, draws, is_in_turn) for part in parts])

        return await self._absorbing(attempt)

    async def _absorbing(self, attempt: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The result of an attempt. It is repeated without a replica that is lost; see Note [Absorbing a loss] in `absorption`."""
        while True:
            were_lost = bool(self.lost)
            try:
                await self.get_ready()
                return await attempt()
            except WorkerLostError as error:
                self._is_ready = False
                lost = self.find(error.worker)
                if not self.absorbs or lost is None or (were_lost and not self.lost):  # taken back: the others lack a part of the state
                    raise
                if len(self.remotes) == 1:
                    self._take_back()
                    raise
                self._leave_out(lost, error)

    def _take_back(self) -> None:
        """One that was left out may have the newest state, and be reached again. Versions tell, as after each failure."""
        self._is_ready = self._is_ready and not self.lost
        self.remotes.extend(self.lost.values())
        self.lost.clear()

    async def _attempt(self, runs: Sequence[ShardRun]) -> list[Any]:
        self._steps += 1
        decision = self.decisions.begin(StepWork(self._steps), self.remotes)
        work = {replica: self._run(replica, decision, run) for replica, run in zip(self.remotes, runs, strict=True)}

        async def give_up() -> None:
            await self._try((each.ref, self.ask(each, "give_up", decision.step)) for each in self.remotes)

        try:
            losses = await (results_or_loss(work, give_up) if self.absorbs else together(work.values()))
            while asked := self._to_ask(decision):
                await self._collect(decision, asked)
        except BaseException as error:
            self._is_ready = False
            await self.abort(decision)
            if isinstance(error, WorkerLostError):
                raise self.explained(error) from error
            raise
        await self.commit(decision)
        return [loss for found in losses for loss in found]

    async def evaluate(self, shards: Sequence[list[Any]]) -> list[Any]:
        """The output for each shard."""

        async def attempt() -> list[Any]:
            runs = dealt(len(shards), len(self.remotes))
            asked = [self.ask(each, "evaluate", list(shards[run.start : run.stop])) for each, run in zip(self.remotes, runs, strict=True) if run]
            try:
                return [output for found in await together(asked) for output in found]
            except WorkerLostError as error:
                raise self.explained(error) from error

        return await self._absorbing(attempt)

    async def _run(self, replica: RemoteReplica, decision: ReplicaDecision, run: ShardRun) -> list[Any]:
        now = asyncio.get_running_loop().time
        began = now()
        result = parse(ReplicaResult, await self.ask(replica, "run", decision.step, encode(run)), replica.owner)
        decision.drive.handle(Prepared(began + result.kept, replica.name))
        self._promised, self._took = result.kept, now() - began
        return result.losses

    async def commit(self, decision: ReplicaDecision) -> None:
        """Take a prepared step on every replica. Cancelling does not stop it once it has begun. See Note [Lost after the decision].

        Raises:
            CommitUnknown: no replica has confirmed. DistributedError: all replicas had given it up; nothing has changed.
        """
        self._is_ready = False
        await self._decide(decision)
        remotes = list(self.remotes)
        try:
            failed = await self._to_its_end(self._tell_all(decision.step))
        except BaseException as error:
            mark_committed(error)
            raise
        if len(failed) < len(remotes):
            loads, taken = self.version
            self.version = loads, taken + 1
            self._is_ready = not failed
            for replica, failure in failed.items():
                if self.absorbs and isinstance(failure, GONE):
                    self._leave_out(replica, restarted(replica, failure) if isinstance(failure, ReferenceLostError) else failure)
            return
        unknown = self.decisions.unconfirmed()
        first = next(iter(failed.values()))
        if not unknown:
            raise DistributedError(f"a step of {SUBJECT} was given up: all replicas had dropped it before it was committed ({first})") from first
        doubt = CommitUnknown(
            f"a step of {SUBJECT} was committed, but no replica has confirmed it ({first}): it is in doubt on {', '.join(unknown)}. "
            f"{WORDING.unconfirmed}",
            workers=unknown,
        )
        mark_committed(doubt)
        raise doubt from first

    async def _tell_all(self, step: int | None) -> dict[RemoteReplica, BaseException]:
        """Tell replicas the decision about a step, or about all; returns the replicas that have not confirmed it, with their errors."""
        failed: dict[RemoteReplica, BaseException] = {}
        for told, error in (await self.decisions.attempt(step)).items():
            replica = next((each for each in self.remotes if each is told), None)
            if replica is None:
                continue
            if isinstance(error, ReferenceLostError) or type(error) is DistributedError:
                self.decisions.forget(replica)  # it has nothing of the step any more: its version says so
                if step is None and not isinstance(error, ReferenceLostError):
                    continue
            failed[replica] = error
        return failed
