"""RoundCoordinator: the rounds of a training with local steps, in the coordinating process.

Note [A round]
    Each member without a computation is dealt batches, and computes. When all have computed, or the quorum has and patience is over, the results
    that are there enter the round. A member that is lost before the decision is left out, and the round is tried again without it: with the same
    results, since these wait here and on the members until a round has them. Its batches go back, and are dealt before all others. A member that is
    lost after the decision counted. A member that was not asked to prepare a round gets its answer later, before it computes or prepares again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from aiograd.coordination.decisions import StepDecision
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.session import StepWork
from aiograd.distributed.local_steps.base_coordinator import BaseCoordinator
from aiograd.distributed.local_steps.remote_local_member import RemoteLocalMember
from aiograd.distributed.local_steps.round_messages import ChangedBuffer, DealtBatch, LocalResult, PreparedRound, RoundAnswer
from aiograd.distributed.local_steps.round_record import RoundRecord
from aiograd.engine.run.failures import mark_committed
from aiograd.errors import DistributedError, ProtocolError, QuorumError, WorkerLostError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.running.offloading import offload
from aiograd.transaction import Prepared

RoundDecision = StepDecision[StepWork, RemoteLocalMember]


class DecidedRound:
    """The work of the coordinating process for a round.

    Args:
        decide: goes on to the next base.
    """

    #: gradients stay out of leaves
    leaves: frozenset[AccumulateGrad] = frozenset()

    def __init__(self, decide: Callable[[], None]) -> None:
        self.commit = decide

    async def after_commit(self) -> None:
        """Nothing follows."""


class RoundCoordinator(BaseCoordinator):
    """All rounds. See Note [A round].

    Args:
        worker, module_class, args, options, timeout: as of `BaseCoordinator`.
    """

    #: computations and attempts at rounds so far
    _computations = _attempts = 0
    _record: RoundRecord | None = None

    async def round(self, before: int | None) -> RoundRecord | None:
        """Take a round.

        Args:
            before: the first epoch that no batch is dealt of; None: there is none.

        Returns:
            The round; None if all batches are read.

        Raises:
            As `LocalSteps.round`.
        """
        try:
            while True:
                self._check_quorum()
                self._deal(before)
                if all(each.computing is None and each.result is None for each in self.remotes):
                    return None
                await self._gather()
                record = await self._exchange()
                if record is not None:
                    return record
        except asyncio.CancelledError as error:
            if not getattr(error, "committed", False):
                await self.withdraw_all()
            raise

    def _check_quorum(self) -> None:
        if len(self.remotes) < self.options.quorum:
            lost = tuple(sorted({*self.lost}))
            raise QuorumError(
                f"a round of LocalSteps needs {self.options.quorum} members (quorum) and has {len(self.remotes)}: lost are {', '.join(lost)}. "
                "Nothing has changed; take members in with `await training.add(name)`, and go on",
                lost=lost,
            )

    # ---------------------------------------------------------------- computations

    def _deal(self, before: int | None) -> None:
        for member in self.remotes:
            if member.computing is None and member.result is None:
                dealt = [self.ledger.take(before) for _ in range(self.options.steps)]
                member.batches = [place for place in dealt if place is not None]
                if member.batches:
                    task = self._compute(member)
                    member.computing = asyncio.get_running_loop().create_task(task, name=f"aiograd:local steps:{member.owner}")

    async def _compute(self, member: RemoteLocalMember) -> None:
        try:
            await self.update(member)
            self._computations += 1
            member.number, member.began = self._computations, member.version
            batches = [encode(DealtBatch(*batch)) for batch in member.batches]
            seconds = self.worker.limits.max_deadline if self._timeout is None else self._timeout
            answer = await self.ask(member, "compute", member.number, member.began, batches, member.is_fresh, timeout=seconds)
            result = parse(LocalResult, answer, member.owner)
            self.form.unpack(result.payload)
            if (result.indices is None) == bool(self.outline.loader.sampler):
                raise ProtocolError(f"worker {member.owner} sent local steps with or without indices, other than expected", code="local-steps")
            member.result, member.is_fresh = result, False
        except WorkerLostError as error:
            self.lose(member, error)

    async def _gather(self) -> None:
        """Wait until the results of a round are there."""
        now = asyncio.get_running_loop().time
        ready_at: float | None = None
        while True:
            for member in self.remotes:
                if member.computing is not None and member.computing.done():
                    self._computed(member)
            self._check_quorum()
            running = [each.computing for each in self.remotes if each.computing is not None]
            ready = sum(each.result is not None for each in self.remotes)
            if not running:
                return
            left = None
            if self.options.patience is not None and ready >= min(self.options.quorum, ready + len(running)):
                ready_at = now() if ready_at is None else ready_at
                left = ready_at + self.options.patience - now()
                if left <= 0:
                    return
            await asyncio.wait(running, timeout=left, return_when=asyncio.FIRST_COMPLETED)

    def _computed(self, member: RemoteLocalMember) -> None:
        """A computation has ended."""
        computing = member.computing
        if computing is None or computing.cancelled() or computing.exception() is not None:
            self.withdraw(member)
            if computing is not None and not computing.cancelled():
                computing.result()  # raises
        member.computing = None

    # ---------------------------------------------------------------- the exchange

    async def _each(self, members: Sequence[RemoteLocalMember], ask: Callable[[RemoteLocalMember], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Ask members side by side; all are awaited.

        Returns:
            The members that are lost, with their errors.

        Raises:
            The error of another kind that came first in the order of the members.
        """
        answers = await asyncio.gather(*map(ask, members), return_exceptions=True)
        lost = [(each, answer) for each, answer in zip(members, answers, strict=True) if isinstance(answer, WorkerLostError)]
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerLostError):
                raise answer
        return lost

    def _lose_all(self, lost: Sequence[tuple[RemoteLocalMember, BaseException]]) -> bool:
        for member, error in lost:
            self.lose(member, error)
        return bool(lost)

    async def update_all(self) -> None:
        """Bring all members that compute nothing to the newest base; those that cannot be reached are lost."""
        members = [each for each in self.remotes if each.computing is None and each.version != self.base.version]
        self._lose_all(await self._each(members, self.update))

    async def _exchange(self) -> RoundRecord | None:
        """Take the results that are there into a round; None: no result is left."""
        while True:
            self._check_quorum()
            if not self.decisions.are_acknowledged:
                for member, error in (await self.decisions.attempt()).items():
                    self.decisions.forget(member)
                    self.lose(member, error)
                continue
            members = [each for each in self.remotes if each.computing is None]
            contributors = [each for each in members if each.result is not None]
            if not contributors:
                return None
            if self._lose_all(await self._each([each for each in members if each.version != self.base.version], self.update)):
                continue
            buffers: list[ChangedBuffer] = []
            if self.base.buffers:
                first = contributors[0]
                try:
                    buffers = [parse(ChangedBuffer, each, first.owner) for each in await self.ask(first, "buffers", True)]
                except WorkerLostError as error:
                    self.lose(first, error)
                    continue
            record = await self._attempt(members, contributors, buffers)
            if record is not None:
                return record

    async def _attempt(
        self, members: Sequence[RemoteLocalMember], contributors: Sequence[RemoteLocalMember], buffers: list[ChangedBuffer]
    ) -> RoundRecord | None:
        """Try to take a round; None: a member was lost before the decision."""
        self._attempts += 1
        decision = self.decisions.begin(StepWork(self._attempts), members)
        withdrawn: list[bool] = []
        try:
            results = [each.result for each in contributors if each.result is not None]
            answer, digest = await offload(self._stage, results, buffers, withdrawn)
            sent, outcomes = encode(answer), self.refer(self.worker)

            async def prepare(member: RemoteLocalMember) -> None:
                now = asyncio.get_running_loop().time
                began = now()
                number = member.number if member in contributors else None
                found = parse(PreparedRound, await self.ask(member, "prepare", decision.step, sent, number, outcomes), member.owner)
                if found.digest != digest:
                    raise DistributedError(f"LocalSteps: {member.owner} computes another base of the same round: its arithmetic differs")
                decision.drive.handle(Prepared(began + found.kept, member.name))
                self._promised, self._took = found.kept, now() - began

            lost = await self._each(members, prepare)
            while not lost and (asked := self._to_ask(decision)):
                gone = await self._collect(decision, asked)
                lost = [(each, WorkerLostError(f"{each.name} is lost", worker=each.owner)) for each in gone]
            has_changed = any(each not in self.remotes for each in members)
        except BaseException:
            withdrawn.append(True)
            await self.abort(decision)
            raise
        if lost or has_changed:
            await self.abort(decision)
            self._lose_all(lost)
            return None
        decision.prepared(DecidedRound(lambda: self._decided(members, contributors, answer, sent, digest)))
        await self.commit(decision)
        return self._record

    def _stage(self, results: Sequence[LocalResult], buffers: list[ChangedBuffer], withdrawn: Sequence[Any]) -> tuple[RoundAnswer, str]:
        """The answer of a round, and the digest of the next base, which is staged here."""
        rows, payloads = [each.rows for each in results], [each.payload for each in results]
        means = self.form.mean(payloads, rows)
        digest = self.base.stage(means, {each.name: each.values._data for each in buffers}, withdrawn)
        sent, is_mean = self.form.shortest(payloads, means)
        return RoundAnswer(self.base.version + 1, rows, sent, is_mean, buffers), digest

    def _decided(
        self, members: Sequence[RemoteLocalMember], contributors: Sequence[RemoteLocalMember], answer: RoundAnswer, sent: Any, digest: str
    ) -> None:
        """The moment of decision."""
        self.base.commit()
        self.digest = digest
        self.keep_answer(sent, sum(each._data.nbytes for each in answer.payloads))
        results = {each.owner: each.result for each in contributors if each.result is not None}
        self._record = RoundRecord(
            number=self.base.version,
            epoch=min(min(each.batches) for each in contributors)[0],
            members=tuple(results),
            late=tuple(each.owner for each in self.remotes if each.computing is not None),
            lost=tuple(sorted({*self.lost})),
            losses={name: each.loss for name, each in results.items()},
            rows={name: each.rows for name, each in results.items()},
            began={each.owner: each.began for each in contributors},
            batches={each.owner: tuple((epoch, number) for epoch, number in each.batches) for each in contributors},
            _order=self.order,
            _sampled={name: each.indices for name, each in results.items() if each.indices is not None},
        )
        self.lost.clear()
        for member in members:
            member.version = self.base.version
        for member in contributors:
            for batch in member.batches:
                self.ledger.read(batch)
            member.batches, member.result = [], None

    async def commit(self, decision: RoundDecision) -> None:
        """Commit a prepared round on every member. Cancelling does not stop it once it has begun. Members that do not confirm it are lost."""
        await self._decide(decision)
        try:
            failed = await self._to_its_end(self.decisions.attempt(decision.step))
        except BaseException as error:
            mark_committed(error)
            raise
        self._lose_all(list(failed.items()))
