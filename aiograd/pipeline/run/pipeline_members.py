"""PipelineMembers: the members of one pipeline on workers, and the ranks of this process: which there are, and their groups.

Note [Replicas]
    Of a pipeline in replicas every replica has members of its own, which exchange values among themselves; its ranks have numbers of their own,
    too. The members with the same stages in all replicas form a group, which adds up gradients. All members of all replicas take one step
    together: there is one coordinator and one decision, as if they were one pipeline. After a failure, and whenever the replicas are others, the
    members form new groups before the next step; a member that is new gets the state of the first replica, which is the state of all.

Note [Absorbing a loss]
    With `LostRanks` a member that is lost before a step is decided is left out: the step is given up, which changes nothing, the others form new
    groups, and take the step again with the rows of `aiograd.pipeline.absorb` and the same random numbers, going on with the work that they
    have done for it (Note [Nothing is done twice] in `kept_step`); and so all later steps, until `fill` puts something in its place. A member that
    is lost before it had the state of the others is a failure all the same: it may have been the one to give it. See Note [Microbatches taken over]
    in `absorbed_execution` for the bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from aiograd.coordination.coordinator import GONE, StepCoordinator
from aiograd.errors import ArgumentError, CommitUnknown, WorkerLostError
from aiograd.pipeline.run.lost_ranks import LostRanks
from aiograd.pipeline.run.member import WORDING, PipelineOutcomes
from aiograd.pipeline.run.remote_stages import RemoteStages, check_apart, owner_of, owners_of, part_of, reference, stages_on
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.stage_ranks import StageRanks
from aiograd.pipeline.run.together import together
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.step.stage import as_stage
from aiograd.running.assembly import STAGE_MEMBER_ADAPTER


class PipelineMembers(StepCoordinator[PipelineWork, RemoteStages]):
    """The members of one pipeline.

    Args:
        replicas: for each everything that is to be done, as if it all were in this process.
        is_replicated: see Note [Replicas]. Otherwise there is one.
        worker: this process's Worker, where others have to send values here; None: the one of the stages' RemoteModules.
        timeout: seconds for a step on another worker; None: the worker's default.
        lost: takes the members that are lost before a step is decided; None: a loss is a failure.

    Raises:
        ArgumentError: the stages of one rank live in different places, or replicas are not on workers of their own.
    """

    def __init__(
        self, replicas: Sequence[StageAssignment], is_replicated: bool, worker: Any, timeout: float | None, lost: LostRanks | None
    ) -> None:
        self.replicas = list(replicas)
        self.is_replicated = is_replicated
        self.lost = lost
        self._worker = worker
        first = self.replicas[0]
        #: where stages of the first replica have been replaced
        self.stages = dict(first.stages)
        remotes = [remote for replica in self.replicas for remote in self._remotes_of(replica)]
        super().__init__(WORDING, timeout)
        #: the ranks of this process
        self.local = StageRanks(part_of(first, first.stages, self.local_ranks))
        self.outcomes = PipelineOutcomes(self.decisions, self.local)
        self.remotes = remotes
        if is_replicated:
            check_apart(self.replicas, remotes)
        #: how often each rank has been replaced
        self._generations: Counter[int] = Counter()
        #: the groups of members are formed
        self._has_joined = not is_replicated
        if self.remotes and (self.local_ranks or is_replicated) and self._worker is None:
            what = "replicas on workers ask this process" if is_replicated else "stages on other workers send values to stages here"
            raise ArgumentError(f"Pipeline: {what}; pass this process's Worker as worker=...")

    @property
    def local_ranks(self) -> set[int]:
        """The ranks of this process."""
        return {self.replicas[0].stage_to_rank[stage] for stage, item in self.stages.items() if owner_of(item) is None}

    def _remotes_of(self, replica: StageAssignment) -> list[RemoteStages]:
        """The members of a replica, which are new."""
        owners = owners_of(replica)
        if self._worker is None:
            self._worker = next((getattr(stage.module, "worker", None) for stage in replica.stages.values() if stage.is_remote), None)
        return stages_on(replica, replica.stages, owners)

    async def connect(self) -> None:
        """See that every worker has its member. Cancelled or failed midway, the next time goes on."""
        if self.remotes and self._worker is not None:
            self.refer(self._worker)
        await together({remote.name: self._make(remote) for remote in self.remotes if remote.ref is None})
        if not self._has_joined:
            try:
                await self._join()
            except GONE as error:
                raise self.explained(error) from error

    async def _make(self, remote: RemoteStages) -> None:
        refs = [reference(stage) for stage in remote.assignment.stages.values()]
        remote.ref = await refs[0].adapt(STAGE_MEMBER_ADAPTER, refs[1:], remote.assignment.to_wire(), timeout=self._timeout)

    async def _join(self) -> None:
        """Let the members of each stage form a group. See Note [Replicas]."""
        groups: dict[tuple[int, ...], list[RemoteStages]] = {}
        for remote in self.remotes:
            groups.setdefault(remote.stages, []).append(remote)
        #: of each group the member whose state the new ones get
        sources = {stages: next((each for each in members if not each.is_new), members[0]) for stages, members in groups.items()}
        new = {stages: [each for each in members if each.is_new and each is not sources[stages]] for stages, members in groups.items()}
        names = {stages: f"the replicas of stages {', '.join(map(str, stages))}" for stages in groups}
        await together({names[stages]: self.check_alike([sources[stages], *each], names[stages]) for stages, each in new.items() if each})
        joining: dict[str, Coroutine[Any, Any, Any]] = {}
        for stages, members in groups.items():
            source = members.index(sources[stages]) if any(each.is_new for each in members) else None
            gathering = self.gathering(members, self._worker)
            joining |= {each.name: self.ask(each, "join", *gathering, source) for each in members}
        await together(joining)
        for remote in self.remotes:
            remote.is_new = False
        self._has_joined = True

    async def leave(self, replica: StageAssignment) -> None:
        """Remove a replica."""
        gone = [remote for remote in self.remotes if remote.replica is replica]
        if self.lost is not None:
            self.lost.remotes = [remote for remote in self.lost.remotes if remote.replica is not replica]
        self.remotes = [remote for remote in self.remotes if remote.replica is not replica]
        self.replicas = [each for each in self.replicas if each is not replica]
        self.stages = dict(self.replicas[0].stages)
        self._has_joined = False
        for remote in gone:
            self.decisions.forget(remote)
        await self._forget(remote.ref for remote in gone if remote.ref is not None)

    async def enter(self, replica: StageAssignment) -> None:
        """Take in a new replica, with the state of the first. Cancelled or failed, the replicas are the same as before."""
        remotes = self._remotes_of(replica)
        self.replicas.append(replica)
        try:
            check_apart(self.replicas, [*self.remotes, *(() if self.lost is None else self.lost.remotes), *remotes])
            self.remotes += remotes
            self._has_joined = False
            await self.connect()
        except BaseException:
            await self.leave(replica)
            raise

    def lose(self, error: BaseException) -> bool:
        """Go on without a lost member, if losses are absorbed and the error is about one; then the others have taken all steps that were decided.

        Args:
            error: a WorkerLostError, or that an earlier step is in doubt on lost members alone.

        Returns:
            False: losses are not absorbed, or the error is another one.

        Raises:
            WorkerLostError: no replica has its stages any more.
        """
        if isinstance(error, CommitUnknown) and error.__cause__ is not None:
            error = error.__cause__
        if not isinstance(error, WorkerLostError):
            return False
        remote = next((each for each in self.remotes if each.owner == error.worker), None)
        if self.lost is None or remote is None or remote.is_new:
            return False
        self.lost.lose(remote, self.replicas, error)
        self.remotes = [each for each in self.remotes if each is not remote]
        self.decisions.forget(remote)
        self._has_joined = False
        return True

    async def fill(self, remote: RemoteStages, modules: Sequence[Any]) -> None:
        """Put modules in the place of a lost member, with the state of another one. Cancelled or failed, it is lost as before.

        Args:
            modules: one for each of its stages.
        """
        stages = {index: as_stage(module) for index, module in zip(remote.stages, modules, strict=True)}
        owners = {owner_of(stage) for stage in stages.values()}
        if len(owners) != 1 or None in owners or self.lost is None:
            raise ArgumentError(f"Pipeline.replace({remote.owner!r}): expected modules on one worker, found {sorted(map(str, owners))}")
        before = self.replicas, self.remotes, self.lost.remotes, [(each, each.replica) for each in (*self.remotes, *self.lost.remotes)]
        replica = remote.replica._replace(stages={**remote.replica.stages, **stages})
        (new,) = stages_on(replica, replica.stages, owners, remote.ranks)
        self.replicas = [replica if each is remote.replica else each for each in self.replicas]
        for each, found in before[3]:
            each.replica = replica if found is remote.replica else found
        self.lost.remotes = [each for each in self.lost.remotes if each is not remote]
        place = {id(each): number for number, each in enumerate(self.replicas)}
        self.remotes = sorted([*self.remotes, new], key=lambda each: place[id(each.replica)])
        self._has_joined = False
        try:
            check_apart(self.replicas, [*self.remotes, *self.lost.remotes])
            await self.connect()
        except BaseException:
            self.replicas, self.remotes, self.lost.remotes, given = before
            for each, found in given:
                each.replica = found
            self._has_joined = False
            await self._forget([new.ref] if new.ref is not None else [])
            raise
        self.stages = dict(self.replicas[0].stages)

    async def aclose(self) -> None:
        """Let every worker forget its member, lost ones as well, as far as they can be reached."""
        await super().aclose()
        if self.lost is not None:
            await self._forget(remote.ref for remote in self.lost.remotes)

    def peers(self, ranks: set[int], replica: StageAssignment | None = None) -> dict[str, Any]:
        """The places of all ranks but these, of one replica or of all."""
        places: dict[str, Any] = {}
        for remote in self.remotes:
            if replica is None or remote.replica is replica:
                places |= {str(rank): [self._generations[rank], remote.ref] for rank in remote.ranks - ranks}
        if self._outcomes_ref is not None:
            places |= {str(rank): [self._generations[rank], self._outcomes_ref] for rank in self.local_ranks - ranks}
        return places
