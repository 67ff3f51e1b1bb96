"""PipelineCoordinator: all the hosts of one pipeline: the one in this process and those on workers, and what they do together.

Note [Replacing a worker]
    With `respawn` the loss of a worker before a step is decided (see Note [Commit across workers] in `aiograd.steps.coordinator`) is no failure.
    Its stages are put somewhere else, with the same parameters, and carry out
    the step from its start, since its sums of weight gradients are gone, and so every backward that it had done has to be done again, with the
    forward before it; the others repeat what they had sent (see Note [Repeating what was sent] in `outbox`). Hosts that are done are asked now and
    then whether they are still there, for as long as others are not: a replacement may wait for them. All that is computed again is computed in
    the same order from the same values and with the same random numbers (`StepRandom`), so the gradients are the same to the bit. Gradients of
    earlier steps that a lost worker held are gone with it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from aiograd.assembly import STAGE_HOST_ADAPTER
from aiograd.engine.evaluate import suspends
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError
from aiograd.pipeline.run.host import StageHost
from aiograd.pipeline.run.session import PipelineSession
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.together import together
from aiograd.pipeline.step.stage import Stage, as_stage
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.steps.coordinator import GONE, StepCoordinator
from aiograd.steps.session import PAUSE
from aiograd.transaction import ParticipantsJoined, ParticipantsLeft

#: the advice to whoever has to wait until a commit is confirmed
SETTLING = (
    "Call the pipeline's settle() once they can be reached; where it says the same again, restore all workers from one checkpoint and make a new "
    "Pipeline"
)


class RemoteHost:
    """A host on a worker."""

    __slots__ = ("owner", "assignment", "ref")

    def __init__(self, owner: str, assignment: StageAssignment) -> None:
        #: name of the worker
        self.owner = owner
        self.assignment = assignment
        #: the host over there
        self.ref: Any = None

    @property
    def ranks(self) -> set[int]:
        """The ranks that live there."""
        return {self.assignment.stage_to_rank[stage] for stage in self.assignment.stages}

    @property
    def name(self) -> str:
        """The name of the host in messages, unique within the pipeline."""
        return f"rank {' and '.join(map(str, sorted(self.ranks)))} on worker {self.owner}"


class PipelineCoordinator(StepCoordinator[PipelineSession, RemoteHost]):
    """All the hosts of one pipeline.

    Args:
        assignment: everything that is to be done, as if it all were in this process.
        respawn: ``respawn(stage)`` gives another module for a stage whose worker was lost; may be ``async def``. None: a loss is a failure.
        worker: this process's Worker, where others have to send values here; None: the one of the stages' RemoteModules.
        timeout: seconds for a step on another worker; None: the worker's default.

    Raises:
        ArgumentError: the stages of one rank live in different places.
    """

    local: StageHost

    def __init__(self, assignment: StageAssignment, respawn: Callable[[int], Any] | None, worker: Any, timeout: float | None) -> None:
        self.assignment = assignment
        self.stages = dict(assignment.stages)
        self._respawn = respawn
        self._worker = worker
        homes: dict[int, str | None] = {}
        for index, stage in assignment.stages.items():
            rank, owner = assignment.stage_to_rank[index], owner_of(stage)
            if homes.setdefault(rank, owner) != owner:
                raise ArgumentError(
                    f"Pipeline: rank {rank} has stages {_place(homes[rank])} and {_place(owner)}; all stages of a rank have to live in one place"
                )
            if owner is not None and self._worker is None:
                self._worker = getattr(stage.module, "worker", None)
        local = StageHost([], self._part(assignment.stages, {rank for rank, owner in homes.items() if owner is None}))
        super().__init__(local, timeout, SETTLING)
        self.remotes = self._remotes(owner for owner in homes.values())
        #: how often each rank has been replaced
        self._generations = dict.fromkeys(homes, 0)
        #: of the random numbers of the running step
        self._seed: tuple[int, ...] = ()
        self._replacing = asyncio.Lock()
        #: hosts that are not done with the running step, and whether all are
        self._busy = 0
        self._quiet = asyncio.Event()
        if self.remotes and self.local_ranks and self._worker is None:
            raise ArgumentError("Pipeline: stages on other workers send values to stages here; pass this process's Worker as worker=...")

    @property
    def _replaces(self) -> bool:
        return self._respawn is not None

    @property
    def local_ranks(self) -> set[int]:
        """The ranks of this process."""
        return {self.assignment.stage_to_rank[stage] for stage, item in self.stages.items() if owner_of(item) is None}

    def _part(self, stages: Mapping[int, Stage], ranks: set[int]) -> StageAssignment:
        """The part of the assignment for a host of some ranks."""
        assignment = self.assignment
        return assignment._replace(
            stages={index: stage for index, stage in stages.items() if assignment.stage_to_rank[index] in ranks},
            training={rank: row for rank, row in assignment.training.items() if rank in ranks},
            evaluation={rank: row for rank, row in assignment.evaluation.items() if rank in ranks},
        )

    def _remotes(self, owners: Iterable[str | None], among: set[int] | None = None) -> list[RemoteHost]:
        """A host for each worker, of the ranks that it has."""
        found: list[RemoteHost] = []
        for owner in dict.fromkeys(owners):
            if owner is None:
                continue
            ranks = {self.assignment.stage_to_rank[index] for index, stage in self.stages.items() if owner_of(stage) == owner}
            found.append(RemoteHost(owner, self._part(self.stages, ranks if among is None else ranks & among)))
        return found

    # ---------------------------------------------------------------- hosts

    async def connect(self) -> None:
        """See that every worker has its host. Cancelled or failed midway, the next time goes on."""
        if self.remotes and self._worker is not None and self._local_ref is None:
            self._local_ref = self._worker.refer(self.local)
        await together({remote.name: self._make(remote) for remote in self.remotes if remote.ref is None})

    async def _make(self, remote: RemoteHost) -> None:
        refs = [reference(stage) for stage in remote.assignment.stages.values()]
        remote.ref = await refs[0].adapt(STAGE_HOST_ADAPTER, refs[1:], remote.assignment.to_wire(), timeout=self._timeout)

    def peers(self, ranks: set[int]) -> dict[str, Any]:
        """Where all ranks but these live."""
        places: dict[str, Any] = {}
        for remote in self.remotes:
            places |= {str(rank): [self._generations[rank], remote.ref] for rank in remote.ranks - ranks}
        if self._local_ref is not None:
            places |= {str(rank): [self._generations[rank], self._local_ref] for rank in self.local_ranks - ranks}
        return places

    # ---------------------------------------------------------------- a step

    def open(self, step: int) -> PipelineSession:
        """Begin a step; values for it can be put into the session."""
        session = super().open(step)
        session.outbox.route(self.peers(self.local_ranks))
        return session

    async def run(self, session: PipelineSession, trains: bool) -> dict[str, Any]:
        """Carry out a step on every host, up to the commit.

        Returns:
            Losses and outputs.

        Raises:
            PipelineError: a stage failed. DistributedError: something between workers. Nothing has changed then, anywhere.
        """
        step = session.step
        self._seed = StepRandom().seed
        if not self.remotes:
            return await self.local.run(step, trains, {}, None, self._seed)
        try:
            work = {remote.name: self._run(remote, step, trains) for remote in self.remotes}
            # even without ranks this process sends microbatches and targets
            work["this process"] = self._counted(self.local.run(step, trains, {}, None, self._seed))
            self._busy = len(work)
            self._quiet.clear()
            results = _merged((await together(work)).values())
            while asked := self._to_ask(session):
                for remote in await self._collect(session, asked):
                    self._busy += 1
                    results |= _given(await self._run_elsewhere(remote, step, trains))
            return results
        except BaseException:
            await self.abort(session)
            raise

    async def _run(self, remote: RemoteHost, step: int, trains: bool) -> dict[str, Any]:
        try:
            peers, seed = self.peers(remote.ranks), list(self._seed)
            results = await remote.ref.call("run", step, trains, peers, self._local_ref, seed, timeout=self._timeout)
        except GONE:
            if self._respawn is None:
                raise
            return await self._run_elsewhere(remote, step, trains)
        if not isinstance(results, dict):
            raise PipelineError(f"worker {remote.owner} gave a malformed answer to a step of a pipeline")
        self._done()
        while self._busy and self._respawn is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await self._quiet.wait()
            if self._busy and not await self._is_prepared(remote, step):
                self._busy += 1
                return await self._run_elsewhere(remote, step, trains)
        return results

    async def _counted(self, running: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        results = await running
        self._done()
        return results

    def _done(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._quiet.set()

    async def _run_elsewhere(self, remote: RemoteHost, step: int, trains: bool) -> dict[str, Any]:
        """A worker is lost that counts as busy: see Note [Replacing a worker]."""
        if self._respawn is None:
            raise PipelineError(f"worker {remote.owner} was lost")
        async with self._replacing:
            replacements = await self._replace(remote, step, self._respawn)
        self._busy += len(replacements) - 1
        self._quiet.clear()
        work = {each.name: self._run(each, step, trains) for each in replacements}
        return _merged((await together(work)).values())

    async def _replace(self, remote: RemoteHost, step: int, respawn: Callable[[int], Any]) -> list[RemoteHost]:
        ranks = remote.ranks
        for index in remote.assignment.stages:
            module = respawn(index)
            stage = as_stage(await module if suspends(module) else module)
            if owner_of(stage) is None:
                raise ArgumentTypeError(f"respawn({index}) returned {stage!r}; expected a module on a worker, in place of the one on {remote.owner}")
            self.stages[index] = stage
        replacements = self._remotes((owner_of(self.stages[index]) for index in remote.assignment.stages), ranks)
        await together({each.name: self._make(each) for each in replacements})
        self.remotes = [each for each in self.remotes if each is not remote] + replacements
        self.pending.forget(remote)
        session = self.local._session
        if session is not None and session.step == step:
            session.handle(ParticipantsLeft((remote.name,)))
            session.handle(ParticipantsJoined([each.name for each in replacements]))
        for rank in ranks:
            self._generations[rank] += 1
        peers = {rank: place for rank, place in self.peers(set()).items() if int(rank) in ranks}
        others = [each.ref.call("reroute", step, peers, timeout=self._timeout) for each in self.remotes if each not in replacements]
        await asyncio.gather(self.local.reroute(step, peers), *map(_ignoring_loss, others))
        return replacements


def owner_of(stage: Stage) -> str | None:
    """Name of the worker that a stage lives on; None for this process."""
    return str(reference(stage).owner) if stage.is_remote else None


def reference(stage: Stage) -> Any:
    """The reference to a stage's module on another worker."""
    return getattr(stage.module, "ref", stage.module)


def _place(owner: str | None) -> str:
    return "in this process" if owner is None else f"on worker {owner}"


def _given(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in results.items() if value is not None}


def _merged(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of all hosts: each has a part."""
    results: dict[str, Any] = {"losses": None, "outputs": None}
    for part in parts:
        results |= _given(part)
    return results


async def _ignoring_loss(coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        await coroutine
    except GONE:
        return  # whoever runs a step there will see
