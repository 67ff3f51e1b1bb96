"""StageRanks: the ranks of a pipeline that live in one process, from step to step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from aiograd.coordination.module_calls import BufferSnapshot, ModuleCalls
from aiograd.coordination.session import StepClient
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError
from aiograd.pipeline.run.absorbed_execution import AbsorbedExecution, addends_of
from aiograd.pipeline.run.kept_step import KeptStep, known_values
from aiograd.pipeline.run.messages import AbsorbedRows, KnownValues, RankValue, StageResults, received
from aiograd.pipeline.run.replicated_stages import ReplicatedStages
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.step_execution import StepExecution
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running.offloading import ready
from aiograd.tensors.core import TensorCore, make


class StageRanks:
    """The ranks of a pipeline that live in one process.

    Args:
        assignment: their stages and rows.
    """

    def __init__(self, assignment: StageAssignment) -> None:
        self.assignment = assignment
        #: the same stages of other replicas, once these ranks have joined them
        self.replicated: ReplicatedStages | None = None
        self.calls = ModuleCalls()
        #: the work for a step that is not committed, in case it is repeated without a lost worker
        self.kept: KeptStep | None = None
        #: done when the step that runs has ended
        self._over: asyncio.Future[None] | None = None

    def work(self, step: int) -> PipelineWork:
        """The work of a step that has not begun."""
        assignment = self.assignment
        work = PipelineWork(step, assignment.training.keys() | assignment.evaluation.keys(), assignment.recovers)
        work.stage_to_rank = assignment.stage_to_rank
        return work

    def put(self, work: PipelineWork, sent: RankValue) -> None:
        """Take a value from another process for a rank that lives here.

        Raises:
            ArgumentError: there is no such rank or stage here. ProtocolError: the value does not fit its kind.
        """
        rank, stage, microbatch = sent.rank, sent.stage, sent.microbatch
        assignment = self.assignment
        real = stage % len(assignment.stage_to_rank)  # after a loss, stages are numbered through over all replicas
        if rank not in work.mailboxes or stage < 0 or real not in assignment.stages or not 0 <= microbatch < assignment.microbatches:
            raise ArgumentError(f"a value for stage {stage}, microbatch {microbatch} on rank {rank} of a pipeline came to the wrong place")
        work.mailboxes[rank].put((sent.kind, stage, microbatch), received(sent.kind, sent.value))

    async def run(
        self,
        client: StepClient[PipelineWork, Any],
        trains: bool,
        random: StepRandom,
        scale: float,
        measures: bool,
        absorbed: AbsorbedRows | None = None,
    ) -> StageResults:
        """Carry out every action of a step, which is prepared then. Failed or cancelled, it is given up.

        Args:
            client: the step; its task is the running one.
            trains: with backward; else an evaluation.
            random: the random numbers of forwards.
            scale: the factor of losses.
            measures: return the sizes of gradients as well.
            absorbed: of a step after a loss; None: every rank is where it was.

        Returns:
            Losses and outputs, and the sizes of `GradientAccumulator.sizes`.

        Raises:
            PipelineError: a stage failed.
        """
        work = client.work
        before: BufferSnapshot | None = None
        addends = () if absorbed is None else addends_of(absorbed, self.assignment)
        reduction = self.replicated.begin(addends) if self.replicated is not None and trains else None
        execution: StepExecution | None = None
        kept, self.kept = self.kept, None
        over = self._over = asyncio.get_running_loop().create_future()
        try:
            await self.calls.settled()
            if trains:
                before = BufferSnapshot(stage.module for stage in self.assignment.stages.values())
            if absorbed is None:
                execution = StepExecution(self.assignment._replace(scale=scale), work, trains, random, self.calls, reduction)
            else:
                kept = kept if trains and kept is not None and kept.repeats == absorbed.repeats else None
                execution = AbsorbedExecution(self.assignment, absorbed, work, trains, random, self.calls, reduction, kept)
            kept = None
            await execution.run()
            await work.outbox.drain()
            await execution.prepare()
            sizes = await execution.sizes() if measures else {}
            losses, outputs = execution.results()
            await ready((losses, outputs))
        except BaseException:
            if reduction is not None:
                reduction.cancel()
            self.calls.release(_nothing if before is None else before.restore)
            client.failed()
            raise
        finally:
            self.kept = None if execution is None else execution.kept
            work.take_left()  # where nothing is kept, it is dropped here
            over.set_result(None)
        if before is not None:
            before.seal()
            work.undo = before.restore
        client.prepared(execution)
        measured = {str(stage): [make(np.asarray(size)) for size in each] for stage, each in sizes.items()} if measures else None
        return StageResults(losses, outputs, measured)

    async def known(self, repeats: int) -> KnownValues:
        """The values that a step needs no more if it is repeated. Waits until it has ended here; cancelling stops waiting.

        Args:
            repeats: the number that it had at first.
        """
        if self._over is not None:
            await asyncio.wait([self._over])
        kept = self.kept
        return known_values(set()) if kept is None or kept.repeats != repeats else kept.known()

    @staticmethod
    async def scale(work: PipelineWork | None, step: int, factor: Any) -> None:
        """Multiply the gradients of a step that is prepared. Cancelled, the step has to be dropped.

        Raises:
            PipelineError: it is not prepared here.
        """
        if work is None or work.step != step or not isinstance(work.execution, StepExecution):
            raise PipelineError(f"step {step} of a pipeline is not prepared here, so its gradients cannot be scaled")
        if not isinstance(factor, TensorCore) or factor.ndim:
            raise ArgumentTypeError(f"the factor of gradients is a {type(factor).__name__}; expected a 0-d Tensor")
        await work.execution.scale(factor.detach()._data[()])

    @staticmethod
    async def reroute(work: PipelineWork | None, peers: Mapping[str, Any]) -> bool:
        """Lost ranks have been replaced: repeat the values that they had been sent. Returns False if the step is over here."""
        if work is not None:
            await work.outbox.repeat(work.outbox.route(peers))
        return work is not None


def _nothing() -> None:
    """There is nothing to be undone."""
