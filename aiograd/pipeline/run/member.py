"""StageMember: the ranks of a pipeline that live on one worker.

It is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and the process that has the `Pipeline` asks it
to carry out a step, to commit it, or to drop it. Members send values to each other directly. See Note [Steps] in `aiograd.coordination.member`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiograd.coordination.client import StepWording
from aiograd.coordination.decisions import StepOutcomes
from aiograd.coordination.member import StepMember
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.outline import ModuleOutline
from aiograd.coordination.session import StepSession
from aiograd.errors import PipelineError
from aiograd.pipeline.run.messages import AbsorbedRows, RankValue, ReplicaShare
from aiograd.pipeline.run.remote_stages import RemoteStages
from aiograd.pipeline.run.replicated_stages import ReplicatedStages, modules_of
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.stage_ranks import StageRanks
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.transaction import TransactionState

WORDING = StepWording(
    subject="a pipeline",
    failure=PipelineError,
    in_doubt="Let the pipeline settle() it, or restore all workers from one checkpoint and make a new Pipeline.",
    lost="Restore all workers from one checkpoint",
    without="Go on without its replica (`await pipe.remove({worker!r})`); `await pipe.add(stages)` takes in another one",
    unconfirmed=(
        "Call the pipeline's settle() once they can be reached; where it says the same again, restore all workers from one checkpoint and make a "
        "new Pipeline"
    ),
)


class StageMember(StepMember[PipelineWork]):
    """The ranks of a pipeline that live on one worker.

    Args:
        modules: of the stages, in the order of `assignment`.
        assignment: the stages, see `StageAssignment.to_wire`.
        worker: the worker that it was made on.
    """

    wording = WORDING

    def __init__(self, modules: list[Any], assignment: Any, worker: Any) -> None:
        super().__init__(worker)
        self._ranks = StageRanks(StageAssignment.parse(modules, assignment))
        self._expiry: asyncio.TimerHandle | None = None

    def _make_work(self, step: int) -> PipelineWork:
        return self._ranks.work(step)

    def _others(self, session: StepSession[PipelineWork]) -> Iterable[Any]:
        return [*session.work.outbox.members, *session.work.witnesses]

    def _work_of(self, step: int) -> PipelineWork | None:
        session = self._find(step)
        return None if session is None else session.work

    # ---------------------------------------------------------------- what others may call

    def _take(self, value: Any) -> None:
        """Take a value for a rank that lives here, from a `StepOutbox`; one that comes too late is dropped."""
        sent = parse(RankValue, value)
        work = self._work_of(sent.step)
        if work is not None:
            self._ranks.put(work, sent)

    async def outline(self) -> list[Any]:
        """The `ModuleOutline` of the stages."""
        modules = modules_of(self._ranks.assignment.stages)
        return encode(ModuleOutline.of({f"{n}.": each for n, each in enumerate(modules)}))  # type: ignore[no-any-return]

    async def join(self, names: list[str], group: str, source: int | None) -> bool:
        """Join the members with the same stages in other replicas; gradients are added up with theirs from then on.

        Args:
            names: of the workers, in the order of the replicas.
            group: name of the group.
            source: the member, by its place in `names`, of which the others take parameters, buffers and gradients; None: all have them. Failed or
                cancelled, they are as they were.

        Raises:
            As `join_group`.
        """
        before, self._ranks.replicated = self._ranks.replicated, None
        if before is not None:
            await before.group.aclose()
        joined = ReplicatedStages(self._ranks.assignment.stages, await self._worker.join(names, group))
        try:
            if source is not None:
                await joined.copy_from(source)
        except BaseException:
            await joined.group.aclose()
            raise
        self._ranks.replicated = joined
        return True

    async def run(
        self,
        step: int,
        trains: bool,
        peers: dict[str, Any],
        coordinator: Any = None,
        seed: Any = None,
        share: Any = None,
        measures: bool = False,
        absorbed: Any = None,
    ) -> dict[str, Any]:
        """Carry out every action of a step, in the caller's grad mode. Cancelling gives the step up.

        Args:
            step: its number; see Note [Steps].
            trains: with backward; the step is prepared then. Else an evaluation.
            peers: for each rank that lives elsewhere how often it has been replaced, and its member.
            coordinator: reference to the outcomes of steps in the coordinating process; None: it cannot be asked.
            seed: of the step's `StepRandom`; None: a new one.
            share: the wire value of a `ReplicaShare`; None: there are no replicas.
            measures: return the sizes of gradients as well.
            absorbed: the wire value of `AbsorbedRows`; None: no rank is lost.

        Returns:
            The wire value of a `StageResults`, see `StageRanks.run`.

        Raises:
            PipelineError: a stage failed, or the step comes too late. CommitUnknown: an earlier step is in doubt here.
        """
        random = StepRandom(seed)
        found = ReplicaShare(self._ranks.assignment.scale, 0, []) if share is None else parse(ReplicaShare, share)
        random.first = found.first
        session = self._begin_to_run(step, coordinator, is_read_only=not trains)
        session.work.witnesses = found.witnesses
        session.work.outbox.route(peers)
        rows = None if absorbed is None else parse(AbsorbedRows, absorbed)
        try:
            results = await self._ranks.run(session, trains, random, found.scale, measures, rows)
        except (Exception, asyncio.CancelledError):
            self._keep_kept()
            raise
        self._keep_kept()
        return encode(results)  # type: ignore[no-any-return]

    async def known(self, repeats: int) -> dict[str, Any]:
        """The wire value of the `KnownValues` of a step that was given up, see `StageRanks.known`. Cancelling has no effect."""
        known = await self._ranks.known(repeats)
        self._keep_kept()
        return encode(known)  # type: ignore[no-any-return]

    async def scale(self, step: int, factor: Any) -> bool:
        """See `StageRanks.scale`."""
        session = self._session
        await self._ranks.scale(None if session is None else session.work, step, factor)
        if session is not None:
            session.hear()
        return True

    async def reroute(self, step: int, peers: dict[str, Any]) -> bool:
        """See `StageRanks.reroute`."""
        return await self._ranks.reroute(self._work_of(step), peers)

    def _ended(self, session: StepSession[PipelineWork]) -> None:
        super()._ended(session)
        if session.state is TransactionState.COMMITTED:
            self._drop_kept()

    def _keep_kept(self) -> None:
        """Keep the work for a step for the lease from now on: if the step is not repeated by then, it never is."""
        if self._expiry is not None:
            self._expiry.cancel()
        until = asyncio.get_running_loop().time() + self._worker.lease
        self._expiry = None if self._ranks.kept is None else self._worker.call_at(until, self._drop_kept)

    def _drop_kept(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = self._ranks.kept = None

    def _leave(self) -> None:
        super()._leave()
        self._drop_kept()
        if self._ranks.replicated is not None:
            self._worker.keep(self._ranks.replicated.group.aclose(), "leaving the other replicas of a pipeline")


class PipelineOutcomes(StepOutcomes[PipelineWork, RemoteStages]):
    """The decisions of the process that has the pipeline, as members ask for them, and the ranks there, to which they send values.

    Args:
        decisions: the decisions.
        ranks: the ranks.
    """

    def __init__(self, decisions: Any, ranks: Any) -> None:
        super().__init__(decisions)
        self._ranks: StageRanks = ranks

    def _take(self, value: Any) -> None:
        """Take a value for a rank that lives here, from a `StepOutbox`; one that comes too late is dropped."""
        sent = parse(RankValue, value)
        decision = self._decisions.last
        if decision is not None and decision.step == sent.step and decision.state is not TransactionState.ABORTED:
            self._ranks.put(decision.work, sent)
