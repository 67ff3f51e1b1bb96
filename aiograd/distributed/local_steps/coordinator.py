"""RoundCoordinator: the rounds of a training with local steps, in the coordinating process.

Note [A round]
    Each member without a computation is dealt batches, and computes. When all have computed, or the quorum has and patience is over, the results
    that are there enter the round. A member that is lost before the decision is left out, and the round is tried again without it: with the same
    results, since these wait here and on the members until a round has them. Its batches go back, and are dealt before all others. A member that is
    lost after the decision counted. A member that was not asked to prepare a round gets its answer later, before it computes or prepares again.

    Once it is decided, a round is over for the program. Its members are told so together with their next batches, which saves a round trip: a member
    computes when it has committed.

    With overlap the exchange of the last results runs beside the next computations, which wait for it after so many local steps.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiograd.coordination.decisions import StepDecision
from aiograd.coordination.member import follow
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.session import StepWork
from aiograd.distributed.local_steps.base_coordinator import BaseCoordinator
from aiograd.distributed.local_steps.member import StagedRound
from aiograd.distributed.local_steps.remote_local_member import RemoteContribution, RemoteLocalMember
from aiograd.distributed.local_steps.round_messages import ChangedBuffer, DealtBatch, LocalResult, PreparedRound, RoundAnswer
from aiograd.distributed.local_steps.round_record import RoundRecord
from aiograd.engine.run import current_engine
from aiograd.engine.run.failures import first_of, mark_committed
from aiograd.errors import ArgumentError, DistributedError, ProtocolError, QuorumError, WorkerLostError
from aiograd.running.offloading import offload
from aiograd.running.scalars import log
from aiograd.running.types import Array
from aiograd.transaction import Prepared

RoundDecision = StepDecision[StepWork, RemoteLocalMember]


class RoundCoordinator(BaseCoordinator):
    """All rounds. See Note [A round].

    Args:
        worker, module_class, args, options, timeout: as of `BaseCoordinator`.
    """

    #: computations and attempts at rounds so far
    _computations = _attempts = 0
    #: the time of the loop up to which `figures` have the time of members
    _counted_to = 0.0
    _record: RoundRecord | None = None
    digest: str
    residuals: list[Array | None]
    #: tells the members of the last round that it is committed
    _telling: asyncio.Task[None] | None = None

    async def round(self, before: int | None) -> RoundRecord | None:
        """Take a round.

        Args:
            before: the first epoch that no batch is dealt of; None: there is none.

        Returns:
            The round; None if all batches are read.

        Raises:
            As `LocalSteps.round`.
        """
        record: RoundRecord | None = None
        self._counted_to = asyncio.get_running_loop().time()
        try:
            while True:
                for member in self.remotes:
                    self._computed(member)
                self._check_quorum()
                overlaps = self.options.overlap > 0 and any(each.contribution is not None for each in self.remotes)
                self._deal(before)
                if all(each.computing is None and each.contribution is None for each in self.remotes):
                    return None
                if self.options.overlap:
                    record = await self._exchange() if overlaps else None
                    await self._gather(raises=record is None)
                    if record is not None or not overlaps:
                        return record or self._nothing()
                    continue
                await self._gather()
                record = await self._exchange()
                if record is not None:
                    return record
        except asyncio.CancelledError as error:
            if record is not None:
                mark_committed(error)
            if not getattr(error, "committed", False):
                await self.withdraw_all()
            raise
        finally:
            self._count_time()

    def _count_time(self) -> None:
        now = asyncio.get_running_loop().time()
        self.figures.elapsed += (now - self._counted_to) * len(self.remotes)
        self._counted_to = now

    def _check_quorum(self) -> None:
        if len(self.remotes) < self.options.quorum:
            lost = tuple(sorted({*self.lost}))
            raise QuorumError(
                f"LocalSteps has fewer members, {len(self.remotes)}, than its quorum, {self.options.quorum}; lost are {', '.join(lost) or 'none'}. "
                "Nothing has changed; take members in with `await training.add(name)`, and go on",
                lost=lost,
            )

    # ---------------------------------------------------------------- computations

    def _deal(self, before: int | None) -> None:
        """Deal batches to the members that have none; with overlap also to members with a contribution."""
        for member in self.remotes:
            is_there = member.can_carry and not member.is_fresh and member.version == self.base.version
            carries = self.options.overlap > 0 and is_there  # one that lacks rounds has to get them before it computes
            if member.computing is None and (member.contribution is None or carries):
                dealt = [self.ledger.take(before) for _ in range(self.options.steps)]
                member.batches = [place for place in dealt if place is not None]
                if member.batches:
                    task = self._compute(member, None if member.contribution is None else member.contribution.number)
                    member.computing = asyncio.get_running_loop().create_task(task, name=f"aiograd:local steps:{member.owner}")

    async def _compute(self, member: RemoteLocalMember, carried: int | None) -> None:
        """Let a member take local steps.

        Args:
            member: the member.
            carried: the number of its contribution that is in exchange meanwhile; None: there is none.
        """
        try:
            if carried is None:
                await self.update(member)
            self._computations += 1
            member.number, version = self._computations, member.version
            batches = [encode(DealtBatch(*batch)) for batch in member.batches]
            seconds = self.worker.limits.max_deadline if self._timeout is None else self._timeout
            request = member.number, version, batches, member.is_fresh, carried, self.options.overlap
            result = parse(LocalResult, await self.ask(member, "compute", *request, timeout=seconds), member.owner)
            await offload(self.form.unpack, result.payload, self.form.compress)
            self.figures.computing += result.seconds
            if (result.indices is None) == bool(self.outline.loader.sampler) or not version <= result.began <= self.base.version:
                raise ProtocolError(f"worker {member.owner} sent local steps from base {result.began}; expected {version}", code="local-steps")
            self._check_orders(member, result.orders or [])
            member.contribution, member.batches = RemoteContribution(member.number, member.batches, result, carried), []
            member.can_carry, member.is_fresh = True, False
        except WorkerLostError as error:
            self.lose(member, error)
        except Exception:
            await self.told()  # a member that has not gone on to the base is lost, also one that answers
            if member in self.remotes:
                raise

    def _check_orders(self, member: RemoteLocalMember, orders: Sequence[str]) -> None:
        """Raise unless the batches of a sampler are those that other members have drawn in the same epochs."""
        for epoch, order in zip(sorted({each.epoch for each in member.batches}), orders, strict=False):
            digest, owner = self._orders.setdefault(epoch, (order, member.owner))
            if digest != order:
                raise ArgumentError(
                    f"LocalSteps: the batches of epoch {epoch} that the sampler on {member.owner} has drawn differ from those on {owner}, so "
                    "examples would be read twice or never. Expected a batch_sampler that gives the same batches on every member in each epoch, "
                    "as one with a generator of the same seed does"
                )
        self._orders = {epoch: order for epoch, order in self._orders.items() if epoch >= self.ledger.first.epoch}

    async def _gather(self, *, raises: bool = True) -> None:
        """Wait until the results of a round are there.

        Args:
            raises: False: the error of a computation waits for the next round.
        """
        now = asyncio.get_running_loop().time
        ready_at: float | None = None
        while True:
            for member in self.remotes:
                if raises:
                    self._computed(member)
            if raises:
                self._check_quorum()
            running = [each.computing for each in self.remotes if each.computing is not None and not each.computing.done()]
            ready = sum(each.contribution is not None for each in self.remotes)
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
        """Take note of a computation that has ended.

        Raises:
            Its error.
        """
        computing = member.computing
        if computing is None or not computing.done():
            return
        member.computing = None
        if computing.cancelled():
            self.give_back(member)
        elif (error := computing.exception()) is not None:
            self.give_back(member)
            raise error

    async def rest(self) -> list[RemoteLocalMember]:
        """Wait for the computations that end without a round; returns the members that compute nothing."""
        running = [each.computing for each in self.remotes if each.computing is not None and each.contribution is None]
        if running:
            await asyncio.wait(running)
        return [each for each in self.remotes if each.computing is None or (each.computing.done() and each.contribution is not None)]

    def go_on(self, member: RemoteLocalMember, contribution: RemoteContribution | None, *, can_carry: bool) -> None:
        """A member goes on with the state of an earlier one.

        Args:
            member: the member.
            contribution: its contribution; the batches become dealt ones.
            can_carry: it is where its local steps have ended.
        """
        member.is_fresh, member.can_carry = False, can_carry
        if contribution is not None:
            self._computations = max(self._computations, contribution.number)
            member.contribution = contribution

    # ---------------------------------------------------------------- the exchange

    async def each(self, members: Sequence[RemoteLocalMember], ask: Callable[[RemoteLocalMember], Coroutine[Any, Any, Any]]) -> list[Any]:
        """Ask members side by side; all are awaited.

        Returns:
            The members that are lost, or were left meanwhile, with their errors.

        Raises:
            The error of another kind that came first in the order of the members, with the other errors as notes.
        """
        answers = await asyncio.gather(*map(ask, members), return_exceptions=True)
        failed = [(each, answer) for each, answer in zip(members, answers, strict=True) if isinstance(answer, BaseException)]
        for member, error in failed:
            if not isinstance(error, WorkerLostError) and member in self.remotes:
                raise first_of([(each.name, other) for each, other in failed], error)
        return failed

    def _lose_all(self, lost: Sequence[tuple[RemoteLocalMember, BaseException]]) -> bool:
        for member, error in lost:
            self.lose(member, error)
        return bool(lost)

    async def update_all(self) -> None:
        """Bring all members that compute nothing to the newest base; members that cannot be reached are lost."""
        members = [each for each in self.remotes if each.computing is None and each.version != self.base.version]
        self._lose_all(await self.each(members, self.update))

    async def _exchange(self) -> RoundRecord | None:
        """Take the results that are there into a round; None: no result is left."""
        while True:
            await self.told()
            self._check_quorum()
            if not self.decisions.are_acknowledged:
                for member, error in (await self.decisions.attempt()).items():
                    self.decisions.forget(member)
                    self.lose(member, error)
                continue
            members = [each for each in self.remotes if each.computing is None or each.contribution is not None]
            contributors = {each: each.contribution for each in members if each.contribution is not None}
            if not contributors:
                return None
            if self._lose_all(await self.each([each for each in members if each.version != self.base.version], self.update)):
                continue
            buffers: list[ChangedBuffer] = []
            if self.base.buffers:
                first = next(iter(contributors))
                try:
                    buffers = [parse(ChangedBuffer, each, first.owner) for each in await self.ask(first, "buffers", True)]
                except WorkerLostError as error:
                    self.lose(first, error)
                    continue
            record = await self._attempt(members, contributors, buffers)
            if record is not None:
                return record

    async def _attempt(
        self, members: Sequence[RemoteLocalMember], contributors: Mapping[RemoteLocalMember, RemoteContribution], buffers: list[ChangedBuffer]
    ) -> RoundRecord | None:
        """Try to take a round; None: a member was lost before the decision."""
        self._attempts += 1
        decision = self.decisions.begin(StepWork(self._attempts), members)
        withdrawn: list[bool] = []
        try:
            answer, digest, residuals = await offload(self._stage, [each.result for each in contributors.values()], buffers, withdrawn)
            sent, outcomes = encode(answer), self.refer(self.worker)
            seconds = self.seconds_for(sum(each._data.nbytes for each in answer.payloads))

            async def prepare(member: RemoteLocalMember) -> None:
                now = asyncio.get_running_loop().time
                began = now()
                number = contributors[member].number if member in contributors else None
                request = decision.step, self._without_own(answer, sent, [*contributors], member), number, outcomes
                found = parse(PreparedRound, await self.ask(member, "prepare", *request, timeout=seconds), member.owner)
                if found.digest != digest:
                    raise DistributedError(f"LocalSteps: {member.owner} computes another base of the same round: its arithmetic differs")
                decision.drive.handle(Prepared(began + found.kept, member.name))
                self._promised, self._took = found.kept, now() - began

            lost = await self.each(members, prepare)
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
        decision.prepared(StagedRound(lambda: self._decided(members, contributors, answer, sent, digest, residuals), self._log))
        await self.commit(decision)
        return self._record

    def _stage(
        self, results: Sequence[LocalResult], buffers: list[ChangedBuffer], withdrawn: Sequence[Any]
    ) -> tuple[RoundAnswer, str, list[Array | None]]:
        """The answer of a round, the digest of the next base, which is staged here, and the new residuals of answers."""
        rows = [each.rows for each in results]
        kind, payloads, residuals = self.form.formed([each.payload for each in results], rows, self.residuals)
        means = self.form.means(kind, payloads, rows)
        digest = self.base.stage(means, {each.name: each.values._data for each in buffers}, withdrawn)
        return RoundAnswer(self.base.version + 1, rows, kind, payloads, buffers), digest, residuals

    def _without_own(self, answer: RoundAnswer, sent: Any, contributors: list[RemoteLocalMember], member: RemoteLocalMember) -> Any:
        """The wire value of an answer to a member, without its own payload, which it has; `sent` is the wire value of the whole answer."""
        if answer.kind != "each" or member not in contributors:
            return sent
        payloads = [None if each is member else payload for each, payload in zip(contributors, answer.payloads, strict=True)]
        return encode(RoundAnswer(answer.version, answer.rows, answer.kind, payloads, answer.buffers))

    def _decided(
        self,
        members: Sequence[RemoteLocalMember],
        contributors: Mapping[RemoteLocalMember, RemoteContribution],
        answer: RoundAnswer,
        sent: Any,
        digest: str,
        residuals: list[Array | None],
    ) -> None:
        """The moment of decision."""
        self.base.commit()
        self.digest, self.residuals = digest, residuals
        self.keep_answer(sent, sum(each._data.nbytes for each in answer.payloads))
        given = {member.owner: each for member, each in contributors.items()}
        self._record = RoundRecord(
            number=self.base.version,
            epoch=min(min(each.batches) for each in given.values()).epoch,
            members=tuple(given),
            late=tuple(each.owner for each in self.remotes if each not in members),
            lost=tuple(sorted({*self.lost})),
            losses={name: each.result.loss for name, each in given.items()},
            rows={name: each.result.rows for name, each in given.items()},
            began={name: each.result.began for name, each in given.items()},
            batches={name: tuple((epoch, number) for epoch, number in each.batches) for name, each in given.items()},
            _order=self.order,
            _sampled={name: each.result.indices for name, each in given.items() if each.result.indices is not None},
        )
        self.lost.clear()
        self.figures.committed(self._record)
        for member in members:
            member.version = self.base.version
        for member, contribution in contributors.items():
            for batch in contribution.batches:
                self.ledger.read(batch)
            member.contribution = None

    def _nothing(self) -> RoundRecord:
        """The record of a call that has committed nothing."""
        return RoundRecord(self.base.version, self.ledger.first.epoch, (), (), (), {}, {}, {}, {})

    async def commit(self, decision: RoundDecision) -> None:
        """Commit a prepared round here, which decides it. The members are told beside what follows; see `told`."""
        after_commit = await self._decide(decision)
        self._telling = asyncio.get_running_loop().create_task(self._tell_members(decision), name="aiograd:local steps:commit")
        await follow(after_commit)

    async def _tell_members(self, decision: RoundDecision) -> None:
        self._lose_all(list((await self.decisions.attempt(decision.step)).items()))

    async def told(self) -> None:
        """Wait until the members have confirmed the last round; members that do not are lost. Cancelling does not stop that."""
        if self._telling is not None:
            await asyncio.shield(self._telling)

    async def aclose(self) -> None:
        """See `BaseCoordinator.aclose`; the last round is told before."""
        if self._telling is not None:
            await asyncio.wait([self._telling], timeout=current_engine().cancel_grace)
        await self._end(self._telling)
        await super().aclose()

    def _log(self) -> None:
        """Log the loss and the figures of the round, for the dashboard and ``/metrics``."""
        if self._record is not None:
            self._count_time()
            for name, value in self.statistics().scalars(self._record).items():
                log(f"local_steps/{name}", value, self._record.number)
