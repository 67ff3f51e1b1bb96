"""StepExecution: the ranks of a pipeline that run in one process during one step: tasks of one loop, which hand values to each other directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Coroutine, Mapping
from typing import Any

from aiograd.coordination.module_calls import ModuleCalls
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.run.kept_step import KeptStep
from aiograd.pipeline.run.replicated_stages import ReplicaReduction, modules_of
from aiograd.pipeline.run.stage_assignment import ExecutedAction, StageAssignment
from aiograd.pipeline.run.together import together
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.schedule.action import Action
from aiograd.pipeline.step.accumulator import GradientAccumulator, Reduction
from aiograd.pipeline.step.rank import Key, Rank
from aiograd.pipeline.step.stage_run import GradientTaker, StageRun
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running.modes import current_mode
from aiograd.tensors.core import counter_of


class StepExecution:
    """The ranks of one process during one step, with the gradient accumulator that they share.

    Args:
        assignment: the stages and rows of the ranks.
        work: the values for the ranks, and the values that they send.
        trains: with backward; else an evaluation.
        random: the random numbers of forwards.
        calls: runs stages on the executor.
        reduction: adds up gradients over the replicas of these stages; None: there are no others.
    """

    #: the number of the first stage of this replica, where stages of all replicas are numbered through
    _first_stage = 0

    def __init__(
        self,
        assignment: StageAssignment,
        work: PipelineWork,
        trains: bool,
        random: StepRandom,
        calls: ModuleCalls,
        reduction: ReplicaReduction | None = None,
    ) -> None:
        self.assignment = assignment
        self.work = work
        self.random = random
        self.reduction = reduction
        self.end = assignment.end(trains)
        self._offload = calls.offload
        #: the values that ranks have made, and the versions of buffers, in case the step is repeated
        self._made: dict[Key, dict[Key, Any]] | None = {} if trains and assignment.absorbs else None
        self._buffers = versions(assignment) if trains and assignment.absorbs else {}
        #: the work that is done, once `run` is over; None: it is not kept
        self.kept: KeptStep | None = None
        leaves = {index: stage.leaves() for index, stage in assignment.stages.items()}
        self.accumulator = self._accumulator(leaves, reduction) if trains else None
        self.runs: dict[int, StageRun] = {}
        self.ranks: dict[str, Rank] = {}
        self._make_ranks(trains)

    def _accumulator(self, leaves: Mapping[int, Mapping[AccumulateGrad, None] | None], reduction: Reduction | None) -> GradientAccumulator:
        return GradientAccumulator(leaves, self.assignment.microbatches, reduction)

    def _make_ranks(self, trains: bool) -> None:
        """Make `runs` and `ranks`."""
        assignment = self.assignment
        self.runs |= {index: self._stage_run(index, self.accumulator, assignment.scale, self.random) for index in assignment.stages}
        for rank, row in assignment.rows(trains).items():
            own = {index: run for index, run in self.runs.items() if assignment.stage_to_rank[index] == rank}
            self.ranks[f"rank {rank}"] = Rank(rank, row, own, RankExchange(self, rank), assignment.handlers, made=self._made)

    def _stage_run(self, index: int, accumulator: GradientTaker | None, scale: float, random: StepRandom) -> StageRun:
        """A stage in this step."""
        return StageRun(
            self.assignment.stages[index],
            index,
            accumulator,
            is_last=index == self.end,
            loss_fn=self.assignment.loss_fn,
            scale=scale,
            keep_outputs=self.work.keeps_outputs,
            random=random,
            offload=self._offload,
            links=self.assignment.links,
        )

    async def run(self) -> None:
        """Carry out every rank's actions. Cancelling ends all of them.

        Raises:
            PipelineError: an action failed.
        """
        try:
            await together(self._running(), self._whereabouts, self.work.outbox.failure)
            self.kept = self._keep()
        except BaseException:
            self.kept = self._keep()
            if self.accumulator is not None:
                self.accumulator.clear()
            self.clear()
            raise

    def _keep(self) -> KeptStep | None:
        """See Note [Nothing is done twice] in `kept_step`."""
        if self._made is None or self.accumulator is None or versions(self.assignment) != self._buffers:
            return None
        gradients = self.accumulator.copied()
        first, own = self._first_stage, self.assignment.stages
        if gradients is None:
            return None
        values = self.work.take_left()
        for rank in self.ranks.values():
            values |= rank.received
        return KeptStep(
            self.repeats,
            {stage: self.runs[first + stage].progress() for stage in own if first + stage in self.runs},
            {key: _shifted(each, first) for key, each in _of_stages(self._made, first, own).items()},
            _of_stages(values, first, own),
            gradients,
            self.assignment.microbatches,
        )

    @property
    def repeats(self) -> int:
        """The number that the step had at first."""
        return self.work.step

    def _running(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Everything that is to be done, by name."""
        return {name: rank.run() for name, rank in self.ranks.items()}

    def clear(self) -> None:
        """Drop the values of all microbatches, and the references between ranks."""
        for rank in self.ranks.values():
            rank.clear()
        self.ranks.clear()

    def _whereabouts(self, name: str) -> str:
        action = self.ranks[name].current if name in self.ranks else None
        return "" if action is None else f", in {action}"

    async def prepare(self) -> None:
        """Wait until nothing can hold up the commit any more."""
        if self.accumulator is not None:
            await self.accumulator.prepare()

    async def sizes(self) -> dict[int, list[Any]]:
        """See `GradientAccumulator.sizes`."""
        return {} if self.accumulator is None else await self.accumulator.sizes()

    async def scale(self, factor: Any) -> None:
        """Multiply the gradients as they will be."""
        if self.accumulator is not None:
            await self.accumulator.scale(factor)

    @property
    def leaves(self) -> frozenset[AccumulateGrad]:
        """The leaves with staged gradients."""
        return frozenset() if self.accumulator is None else self.accumulator.leaves

    def commit(self) -> None:
        """Write every gradient, in one step."""
        if self.reduction is not None:
            self.reduction.write_buffers()
        if self.accumulator is not None:
            self.accumulator.commit()

    async def after_commit(self) -> None:
        """Call the hooks of the leaves."""
        if self.accumulator is not None:
            await self.accumulator.after_commit()

    def results(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Losses and outputs by microbatch, where the last stage runs here. Called once."""
        run = self.runs.get(self.end)
        losses, outputs = (None, None) if run is None else ([part[i] for i in sorted(part)] for part in (run.losses, run.outputs))
        self.clear()
        return losses, outputs


def versions(assignment: StageAssignment) -> dict[str, tuple[int, int]]:
    """Of the buffers of stages, by name: which Tensor each is, and its version."""
    modules = enumerate(modules_of(assignment.stages))
    return {f"{n}.{name}": (id(buffer), counter_of(buffer)[0]) for n, module in modules for name, buffer in module.named_buffers()}


def _of_stages(values: Mapping[Key, Any], first: int, stages: Collection[int]) -> dict[Key, Any]:
    """The values of stages; in keys their numbers are higher by `first`."""
    return {(kind, stage - first, microbatch): value for (kind, stage, microbatch), value in values.items() if stage - first in stages}


def _shifted(values: Mapping[Key, Any], first: int) -> dict[Key, Any]:
    """Values by keys whose stages are lower by `first`."""
    return {(kind, stage - first, microbatch): value for (kind, stage, microbatch), value in values.items()}


class RankExchange:
    """How a rank of this process reaches the others."""

    __slots__ = ("has", "take", "receive", "_work", "_stage_to_rank", "_rank", "_step", "_events", "_profiler", "_now")

    def __init__(self, execution: StepExecution, rank: int) -> None:
        self._work = execution.work
        self._stage_to_rank = execution.assignment.stage_to_rank
        mailbox = self._work.mailboxes[rank]
        self.has, self.take, self.receive = mailbox.has, mailbox.take, mailbox.receive
        self._rank = rank
        self._step = execution.random.seed
        self._events = execution.assignment.events
        self._profiler = current_mode().profiler
        self._now = asyncio.get_running_loop().time

    def send(self, key: Key, value: Any) -> None:
        self._work.put(self._stage_to_rank[key[1]], key, value)

    async def both(self, first: Coroutine[Any, Any, None], second: Coroutine[Any, Any, None]) -> None:
        await together({f"rank {self._rank}: forward": first, f"rank {self._rank}: backward": second})

    def began(self) -> tuple[float, int]:
        return (
            0.0 if self._events is None else self._now(),
            0 if self._profiler is None else time.perf_counter_ns(),
        )

    def ended(self, action: Action, began: tuple[float, int]) -> None:
        if self._profiler is not None:
            self._profiler.end_pipeline_action(began[1], self._step, self._rank, action)
        if self._events is not None:
            self._events.append(ExecutedAction(self._rank, action, began[0], self._now()))
