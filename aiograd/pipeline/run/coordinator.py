"""PipelineCoordinator: all members of one pipeline, and the ranks of this process: the steps that they take together.

Note [Replacing a worker]
    With `respawn` the loss of a worker before a step is decided (see Note [Commit across workers] in `aiograd.coordination.coordinator`) is no
    failure. Its stages are put somewhere else, with the same parameters, and carry out the step from its start, since its sums of weight gradients
    are gone: every backward that it had done is done again, with the forward before it, and the others send their values again (see Note [Repeating
    sent values] in `outbox`). Members that are done are asked now and then whether they are still there, for as long as others are
    not: a replacement may wait for them. All that is computed again is computed in the same order from the same values and with the same random
    numbers (`StepRandom`), so the gradients are the same to the bit. Gradients of earlier steps that a lost worker held are gone with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.coordinator import GONE
from aiograd.coordination.decisions import StepDecision
from aiograd.coordination.message_form import encode, parse
from aiograd.coordination.session import COORDINATOR, PAUSE, WITNESSES
from aiograd.engine.evaluate import suspends
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError
from aiograd.pipeline.microbatch import Call
from aiograd.pipeline.run.batch import rows_of
from aiograd.pipeline.run.kept_step import keys_of
from aiograd.pipeline.run.lost_ranks import AbsorbedStep, LostRanks, placed
from aiograd.pipeline.run.messages import KnownValues, ReplicaShare, StageResults
from aiograd.pipeline.run.pipeline_members import PipelineMembers
from aiograd.pipeline.run.remote_stages import RemoteStages, owner_of, stages_on
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.together import together
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.step.rank import Key
from aiograd.pipeline.step.stage import as_stage
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.tensors.core import make
from aiograd.tensors.norms import factor_for, norm_of, sum_of
from aiograd.transaction import TransactionState

PipelineDecision = StepDecision[PipelineWork, RemoteStages]


class PipelineCoordinator(PipelineMembers):
    """The steps of all members of one pipeline.

    Args:
        replicas, is_replicated, worker, timeout, lost: see `PipelineMembers`.
        respawn: ``respawn(stage)`` gives another module for a stage of a lost worker; may be ``async def``. None: a loss is a failure.

    Raises:
        ArgumentError: see `PipelineMembers`.
    """

    def __init__(
        self,
        replicas: Sequence[StageAssignment],
        is_replicated: bool,
        respawn: Callable[[int], Any] | None,
        worker: Any,
        timeout: float | None,
        lost: LostRanks | None = None,
    ) -> None:
        super().__init__(replicas, is_replicated, worker, timeout, lost)
        self._respawn = respawn
        #: of the running step: what members do for lost ones; of its random numbers; the share of each replica; whether members say how large
        #: gradients are, and the factor for them
        self._absorbed: AbsorbedStep | None = None
        #: of a step that is repeated: the number that it had at first, and the values that need not be sent
        self._repeats: int | None = None
        self._known: set[Key] = set()
        self.seed: tuple[int, ...] = ()
        self._shares: Mapping[int, tuple[float, int]] = {}
        self._measures = False
        self._factor: Any = None
        self._replacing = asyncio.Lock()
        #: the number of members that are not done with the running step, and an event for its end
        self._busy = 0
        self._quiet = asyncio.Event()

    @property
    def _replaces(self) -> bool:
        return self._respawn is not None

    @property
    def computations(self) -> list[dict[int, int]]:
        """For each replica the number of computations in a step by rank."""
        return [{rank: sum(action.kind.is_compute for action in row) for rank, row in replica.training.items()} for replica in self.replicas]

    def address(self, replica: int, stage: int, microbatch: int) -> tuple[int, int]:
        """The rank that computes a stage of a microbatch in the step that was opened last, and the number of the stage there."""
        if self._absorbed is None:
            return self.replicas[replica].stage_to_rank[stage], stage
        return self._absorbed.rank_of(replica, stage, microbatch), replica * self._absorbed.plan.schedule.num_stages + stage

    def shares(self, calls: Sequence[Call], scales: bool) -> list[tuple[float, int]] | None:
        """The share of each replica in a batch: the factor of losses, and the number of the first microbatch. None: there are no replicas.

        Replicas weigh by their rows.

        Args:
            calls: the microbatches.
            scales: losses are means over their microbatches.

        Raises:
            ArgumentError: replicas have come or gone since the batch was split.
        """
        if not self.is_replicated:
            return None
        size = self.replicas[0].microbatches
        if len(calls) != size * len(self.replicas):
            raise ArgumentError(
                f"Pipeline: the batch was split for {len(calls)} microbatches, and the replicas of now take {size * len(self.replicas)}"
            )
        rows = [sum(map(rows_of, calls[first : first + size])) for first in range(0, len(calls), size)]
        weights = [count / sum(rows) if sum(rows) else 1.0 / len(rows) for count in rows]
        return [(weight / size if scales else 1.0, number * size) for number, weight in enumerate(weights)]

    # ---------------------------------------------------------------- a step

    def open(self, step: int, trains: bool = True) -> PipelineDecision:
        """Begin a step; values for it can be put into its work."""
        self._absorbed = None if self.lost is None else self.lost.step(self.replicas, trains)
        decision = self.decisions.begin(self.local.work(step), self.remotes)
        decision.work.outbox.route(self.peers(self.local_ranks))
        decision.work.known = self._known
        return decision

    async def ask_known(self, repeats: int | None) -> None:
        """Ask members for the `KnownValues` of a step that is repeated; cancelled or failed, the step is not begun.

        Args:
            repeats: the number that it had at first; None: it is a new one.

        Raises:
            WorkerLostError: another member is lost.
        """
        self._repeats, self._known = repeats, set()
        if repeats is not None:
            number = {id(replica): place for place, replica in enumerate(self.replicas)}
            answers = await together({remote.name: self.ask(remote, "known", repeats) for remote in self.remotes})
            for remote in self.remotes:
                first = number[id(remote.replica)] * len(remote.replica.stage_to_rank)
                self._known |= keys_of(parse(KnownValues, answers[remote.name], remote.owner), first)

    async def run(
        self,
        decision: PipelineDecision,
        trains: bool,
        random: StepRandom,
        shares: Sequence[tuple[float, int]] | None = None,
        clip_norm: float | None = None,
    ) -> StageResults:
        """Carry out a step on every member, up to the commit.

        Args:
            decision: the step.
            trains: with backward.
            random: the random numbers of forwards.
            shares: of the replicas in the batch, see `shares`.
            clip_norm: the largest norm of all gradients together; None: any.

        Returns:
            Losses and outputs, by replica and microbatch.

        Raises:
            PipelineError: a stage failed. DistributedError: something between workers. Nothing has changed then, anywhere.
        """
        step = decision.step
        self.seed, self._factor, self._measures = random.seed, None, clip_norm is not None
        self._shares = {} if shares is None else {id(replica): share for replica, share in zip(self.replicas, shares, strict=True)}
        run_here = functools.partial(self._run_here, decision, trains, random)
        if not self.remotes and clip_norm is None:
            return await run_here()
        try:
            work = {remote.name: self._run(remote, step, trains) for remote in self.remotes}
            # even without ranks this process sends microbatches and targets
            work[COORDINATOR] = self._counted(run_here)
            self._busy = len(work)
            self._quiet.clear()
            replica_of = {remote.name: remote.replica for remote in self.remotes}
            found = await together(work)
            parts = [[part for name, part in found.items() if replica_of.get(name, each) is each] for each in self.replicas]
            if self._absorbed is not None:
                parts = [list(found.values())]
            if clip_norm is not None:
                await self._clip(step, parts[0], clip_norm)
            if self._absorbed is not None:
                results = StageResults(placed(parts[0], "losses"), placed(parts[0], "outputs"))
            else:
                results = _joined([*map(_merged, parts)])
            while asked := self._to_ask(decision):
                for remote in await self._collect(decision, asked):
                    self._busy += 1
                    results = _merged([results, await self._run_elsewhere(remote, step, trains)])
            return results
        except BaseException as error:
            self._has_joined = not self.is_replicated
            await self.abort(decision)
            if isinstance(error, GONE):
                raise self.explained(error) from error
            raise

    async def _run_here(self, decision: PipelineDecision, trains: bool, random: StepRandom) -> StageResults:
        decision.work.begin()
        return await self.local.run(decision, trains, random, self.local.assignment.scale, self._measures)

    async def commit(self, decision: PipelineDecision) -> None:
        """Commit a prepared step on every member; see `StepCoordinator.commit`."""
        try:
            await super().commit(decision)
        except BaseException:
            self._has_joined = not self.is_replicated
            raise

    async def _clip(self, step: int, parts: Iterable[StageResults], clip_norm: float) -> None:
        """Scale the gradients of all members, so that the gradients of one replica together have at most this norm.

        Args:
            parts: the results of the members of one replica, or of all: the gradients of all replicas are the same.
        """
        by_stage = {int(stage): each for part in parts for stage, each in (part.sizes or {}).items()}
        sizes = [size.detach()._data[()] for stage in sorted(by_stage) for size in by_stage[stage]]
        factor = factor_for(norm_of(sum_of(sizes, 2.0), 2.0), clip_norm) if sizes else 1.0
        if factor != 1.0:
            self._factor = make(np.asarray(factor))
            scaling = {remote.name: self._scale(remote, step) for remote in self.remotes}
            await together({COORDINATOR: self._scale_here(step), **scaling})

    async def _scale_here(self, step: int) -> None:
        decision = self.decisions.last
        await self.local.scale(None if decision is None else decision.work, step, self._factor)

    async def _scale(self, remote: RemoteStages, step: int) -> None:
        try:
            await self.ask(remote, "scale", step, self._factor)
        except GONE:
            if self._respawn is None:
                raise
            self._busy += 1
            await self._run_elsewhere(remote, step, True)  # which scales as well, and returns the known results

    def _share_of(self, remote: RemoteStages) -> list[Any] | None:
        share = self._shares.get(id(remote.replica))
        if share is None:
            return None
        place = self.remotes.index(remote)
        others = [each.ref for each in (*self.remotes[place:], *self.remotes[:place]) if each.replica is not remote.replica]
        return encode(ReplicaShare(*share, others[:WITNESSES]))  # type: ignore[no-any-return]

    async def _run(self, remote: RemoteStages, step: int, trains: bool) -> StageResults:
        try:
            absorbed = self._absorbed
            peers, seed = self.peers(remote.ranks, remote.replica if absorbed is None else None), list(self.seed)
            share, rows = self._share_of(remote), []
            if absorbed is not None:
                shares = [self._shares[id(replica)] for replica in self.replicas]
                rows = [encode(absorbed.rows_of(remote, shares, self._repeats, self._known))]
            answer = await self.ask(remote, "run", step, trains, peers, self._outcomes_ref, seed, share, self._measures, *rows)
            if self._factor is not None:
                await self.ask(remote, "scale", step, self._factor)
        except GONE:
            if self._respawn is None:
                raise
            return await self._run_elsewhere(remote, step, trains)
        results = parse(StageResults, answer, remote.owner)
        self._done()
        while self._busy and self._respawn is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE):
                    await self._quiet.wait()
            if self._busy and not await self._is_prepared(remote, step):
                self._busy += 1
                return await self._run_elsewhere(remote, step, trains)
        return results

    async def _counted(self, run: Callable[[], Coroutine[Any, Any, StageResults]]) -> StageResults:
        results = await run()  # a coroutine made before would never be awaited where this one is cancelled before it begins
        self._done()
        return results

    def _done(self) -> None:
        self._busy -= 1
        if not self._busy:
            self._quiet.set()

    async def _run_elsewhere(self, remote: RemoteStages, step: int, trains: bool) -> StageResults:
        """Replace a lost worker, which counts as busy: see Note [Replacing a worker]."""
        if self._respawn is None:
            raise PipelineError(f"worker {remote.owner} was lost")
        async with self._replacing:
            replacements = await self._replace(remote, step, self._respawn)
        self._busy += len(replacements) - 1
        self._quiet.clear()
        work = {each.name: self._run(each, step, trains) for each in replacements}
        return _merged((await together(work)).values())

    async def _replace(self, remote: RemoteStages, step: int, respawn: Callable[[int], Any]) -> list[RemoteStages]:
        ranks = remote.ranks
        for index in remote.assignment.stages:
            module = respawn(index)
            stage = as_stage(await module if suspends(module) else module)
            if owner_of(stage) is None:
                raise ArgumentTypeError(f"respawn({index}) returned {stage!r}; expected a module on a worker, in place of the one on {remote.owner}")
            self.stages[index] = stage
        owners = (owner_of(self.stages[index]) for index in remote.assignment.stages)
        replacements = stages_on(remote.replica, self.stages, owners, ranks)
        await together({each.name: self._make(each) for each in replacements})
        self.remotes = [each for each in self.remotes if each is not remote] + replacements
        self.decisions.forget(remote)
        decision = self.decisions.last
        is_running = decision is not None and decision.step == step and decision.state is not TransactionState.ABORTED
        if decision is not None and is_running:
            decision.leave(remote)
            decision.join(replacements)
        for rank in ranks:
            self._generations[rank] += 1
        peers = {rank: place for rank, place in self.peers(set()).items() if int(rank) in ranks}
        others = [each.ref.call("reroute", step, peers, timeout=self._timeout) for each in self.remotes if each not in replacements]
        work = decision.work if decision is not None and is_running else None
        await asyncio.gather(self.local.reroute(work, peers), *map(_ignoring_loss, others))
        return replacements


def _merged(parts: Iterable[StageResults]) -> StageResults:
    """The results of all members of a replica: each has a part."""
    losses = outputs = None
    for part in parts:
        losses = losses if part.losses is None else part.losses
        outputs = outputs if part.outputs is None else part.outputs
    return StageResults(losses, outputs)


def _joined(replicas: Sequence[StageResults]) -> StageResults:
    """The results of all replicas, one after the other."""
    losses = [loss for each in replicas for loss in each.losses or ()]
    outputs = [output for each in replicas for output in each.outputs or ()]
    return StageResults(losses or None, outputs or None)


async def _ignoring_loss(coroutine: Coroutine[Any, Any, Any]) -> None:
    try:
        await coroutine
    except GONE:
        return  # running a step there will show it
