"""AbsorbedExecution: the ranks of one member in a step after a loss: with microbatches of other replicas, whose ranks are lost.

Note [Microbatches taken over]
    Of each replica that has lost a stage, some microbatches are computed here: with its factor of losses, and with its random numbers. Their weight
    gradients are kept apart: each goes to one member, the adder of the lost stage, which adds them up in the order of microbatches, as the lost rank
    would have, and adds the sum to those of the replicas where its place is; see `Group.sum_in_turn`. So gradients have the bits of a step
    without a loss. Stages are numbered through over all replicas, replica by replica, in rows and in keys of values; all values between
    stages go through mailboxes, since the next stage of a microbatch may be anywhere.

    A step in which forwards change buffers where a stage is lost, such as running statistics, fails and changes nothing. Buffers belong to a
    replica: its microbatches change them one after another, and may read them, beginning with the step's. The microbatches of a lost replica
    are dealt to several workers and computed there among the workers' own, so they would see, and leave behind, the buffers of no replica.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.module_calls import ModuleCalls
from aiograd.errors import ArgumentError, GraphError, PipelineError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.run.kept_step import KeptStep, keys_of
from aiograd.pipeline.run.messages import AbsorbedRows
from aiograd.pipeline.run.replicated_stages import ReplicaReduction
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.step_execution import RankExchange, StepExecution, versions
from aiograd.pipeline.run.work import PipelineWork
from aiograd.pipeline.schedule.action import Action
from aiograd.pipeline.step.accumulator import GradientAccumulator, Reduction
from aiograd.pipeline.step.microbatch_state import to_device
from aiograd.pipeline.step.rank import WEIGHTS, Key, Rank
from aiograd.pipeline.step.stage_run import GradientTaker
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make


def addends_of(absorbed: AbsorbedRows, assignment: StageAssignment) -> list[int]:
    """The replicas whose gradients a member adds to the sum, ascending; none: no replica has lost its stages."""
    count = len(assignment.stage_to_rank)
    lost = {int(stage): adder for stage, adder in absorbed.adders.items() if int(stage) % count in assignment.stages}
    if not lost:
        return []
    return sorted({absorbed.replica, *(stage // count for stage, adder in lost.items() if adder in assignment.training)})


class AbsorbedExecution(StepExecution):
    """The ranks of one member during a step after a loss; see Note [Microbatches taken over].

    Args:
        assignment: of the member without a loss.
        absorbed: its part.
        work, trains, random, calls, reduction: as of `StepExecution`.
        kept: the work for the step that is done already; None: there is none.

    Raises:
        ArgumentError: the rows do not fit the stages that live here. PipelineError: values will not be sent that are not here any more.
    """

    def __init__(
        self,
        assignment: StageAssignment,
        absorbed: AbsorbedRows,
        work: PipelineWork,
        trains: bool,
        random: StepRandom,
        calls: ModuleCalls,
        reduction: ReplicaReduction | None,
        kept: KeptStep | None = None,
    ) -> None:
        self._absorbed = absorbed
        self._kept = kept
        self._count = len(assignment.stage_to_rank)
        self._replica_reduction = reduction
        #: of lost replicas whose gradients are added up here
        self._inherited: dict[int, GradientAccumulator] = {}
        self._first_stage = absorbed.replica * self._count
        super().__init__(assignment, work, trains, random, calls, reduction)
        if trains:
            self._resume()

    @property
    def repeats(self) -> int:
        return self.work.step if self._absorbed.repeats is None else self._absorbed.repeats

    def _accumulator(self, leaves: Mapping[int, Mapping[AccumulateGrad, None] | None], reduction: Reduction | None) -> GradientAccumulator:
        whole = self._replica_reduction
        addends = addends_of(self._absorbed, self.assignment)
        own = self._absorbed.replica
        if whole is not None and addends:
            self._inherited = {each: super(AbsorbedExecution, self)._accumulator(leaves, whole.of(each)) for each in addends if each != own}
            reduction = whole.of(own)
        kept = None if self._kept is None else self._kept.gradients.copied(reduction)
        return super()._accumulator(leaves, reduction) if kept is None else kept

    def _make_ranks(self, trains: bool) -> None:
        absorbed, assignment, count = self._absorbed, self.assignment, self._count
        homes = {int(stage): tuple(ranks) for stage, ranks in absorbed.homes.items()}
        replicas = len(absorbed.scales)
        if homes.keys() != set(range(count * replicas)) or any(len(ranks) != assignment.microbatches for ranks in homes.values()):
            raise ArgumentError(
                f"AbsorbedRows with ranks of {len(homes)} stages; expected {assignment.microbatches} for each stage of {replicas} replicas"
            )
        own = range(self._first_stage, self._first_stage + count)
        strange = sorted(stage for stage in map(int, absorbed.adders) if stage not in homes or (stage in own and stage % count in assignment.stages))
        if strange or len(absorbed.firsts) != replicas or absorbed.replica >= replicas:
            raise ArgumentError(
                f"AbsorbedRows for replica {absorbed.replica} of {replicas}, with {len(absorbed.firsts)} first microbatches and lost stages "
                f"{sorted(map(int, absorbed.adders))}; expected one number for each replica, and stages of replicas that have lost them"
            )
        randoms = [StepRandom(self.random.seed) for _ in range(replicas)]
        for random, first in zip(randoms, absorbed.firsts, strict=True):
            random.first = first
        for name, text in absorbed.rows.items():
            rank = int(name)
            if rank not in self.work.mailboxes:
                raise ArgumentError(f"AbsorbedRows with a row of rank {rank}; expected ranks {sorted(self.work.mailboxes)}")
            row = [self._checked(Action.parse(cell), homes) for cell in text.split()]
            exchange = _AbsorbedExchange(self, rank, homes)
            runs = {}
            for stage in dict.fromkeys(action.stage for action in row):
                replica, real = divmod(stage, count)
                taker = self._taker(stage, exchange) if trains else None
                runs[stage] = self.runs[stage] = self._stage_run(real, taker, absorbed.scales[replica], randoms[replica])
            left = [action for action in row if not self._has_done(action)]
            self.ranks[f"rank {rank}"] = Rank(rank, left, runs, exchange, assignment.handlers, stages=count, made=self._made)

    def _has_done(self, action: Action) -> bool:
        kept, stage = self._kept, action.stage - self._first_stage
        return kept is not None and 0 <= stage < self._count and kept.has_done(stage, action)

    def _resume(self) -> None:
        """Go on with the kept work, and send the values that others have not got; see Note [Nothing is done twice] in `kept_step`."""
        first, work, kept, homes = self._first_stage, self.work, self._kept, self._absorbed.homes
        work.known = set() if self._absorbed.known is None else keys_of(self._absorbed.known)
        expected = {key for key in work.known if key[1] - first in self.assignment.stages}
        if not expected <= (set() if kept is None else keys_of(kept.known(), first)):
            raise PipelineError(f"a step of a pipeline cannot be repeated: the work for step {self.repeats} is not kept any more on this worker")
        if kept is None:
            return
        for stage, progress in kept.stages.items():
            if first + stage in self.runs:
                self.runs[first + stage].resume(progress)
        if self._made is not None:
            self._made |= {
                (kind, first + stage, microbatch): {(name, first + to, number): value for (name, to, number), value in each.items()}
                for (kind, stage, microbatch), each in kept.made.items()
            }
        for (kind, stage, microbatch), value in kept.values.items():
            work.mailboxes[homes[str(first + stage)][microbatch]].put((kind, first + stage, microbatch), value)
        for (kind, stage, microbatch), value in kept.sent.items():
            key = (kind, first + stage, microbatch)
            work.put(homes[str(key[1])][microbatch], key, value)
            work.known.add(key)
        self._kept = None

    def _checked(self, action: Action | None, homes: Mapping[int, Sequence[int]]) -> Action:
        if action is None or action.stage not in homes or action.stage % self._count not in self.assignment.stages:
            raise ArgumentError(f"AbsorbedRows with the action {action}; expected stages {sorted(self.assignment.stages)} of replicas")
        return action

    def _taker(self, stage: int, exchange: RankExchange) -> GradientTaker | None:
        """The taker of the gradients of a stage, numbered through."""
        replica = stage // self._count
        if replica == self._absorbed.replica:
            return self.accumulator
        if replica in self._inherited:
            return self._inherited[replica]
        return _SentGradients(self._leaves, stage, self._send_weights)

    @property
    def _leaves(self) -> Sequence[AccumulateGrad]:
        return [] if self._replica_reduction is None else self._replica_reduction.leaves

    def _send_weights(self, stage: int, microbatch: int, grads: list[Any]) -> None:
        self.work.put(self._absorbed.adders[str(stage)], (WEIGHTS, stage, microbatch), grads)

    def _running(self) -> dict[str, Coroutine[Any, Any, None]]:
        receiving = {}
        for name, adder in self._absorbed.adders.items():
            stage, mine = int(name), self.work.mailboxes.get(adder)
            if mine is not None and self.accumulator is not None and stage % self._count in self.assignment.stages:
                receiving[f"the gradients of stage {stage % self._count} of replica {stage // self._count}"] = self._receive(stage, mine.receive)
        return super()._running() | receiving

    async def _receive(self, stage: int, receive: Callable[[Key], Coroutine[Any, Any, Any]]) -> None:
        """Take the gradients of the microbatches of a lost stage that others have taken over."""
        replica, real = divmod(stage, self._count)
        accumulator, leaves = self._inherited[replica], self._leaves
        for microbatch, rank in enumerate(self._absorbed.homes[str(stage)]):
            if rank in self.work.mailboxes:
                continue
            grads = await receive((WEIGHTS, stage, microbatch))
            if len(grads) != len(leaves) or not all(grad is None or isinstance(grad, TensorCore) for grad in grads):
                raise ArgumentError(f"{len(grads)} gradients of a microbatch that was taken over; expected Tensors or None for {len(leaves)} weights")
            found = {leaf: await _own(grad, leaf.device) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None}
            accumulator.deliver(real, microbatch, found)
            await accumulator.fold()

    async def prepare(self) -> None:
        if self._buffers and addends_of(self._absorbed, self.assignment) and versions(self.assignment) != self._buffers:
            raise PipelineError(
                f"forwards of stages {sorted(self.assignment.stages)} change buffers, such as running statistics, and a replica has lost these "
                "stages: other replicas cannot compute its buffers. Fill its place with Pipeline.replace, or go on without it (Pipeline.remove)"
            )
        for accumulator in self._inherited.values():
            await accumulator.fold()
            if not accumulator.is_complete or accumulator.waiting:
                raise GraphError("a pipeline step ended before the adder of a lost stage had the gradients of every microbatch")
        await super().prepare()

    def results(self) -> tuple[list[Any] | None, list[Any] | None]:
        """Losses and outputs by microbatch of all replicas, None for each that is elsewhere. Called once."""
        size, replicas = self.assignment.microbatches, len(self._absorbed.scales)
        losses: list[Any] = [None] * (size * replicas)
        outputs = list(losses)
        for stage, run in self.runs.items():
            if run.index == self.end:
                for found, values in ((losses, run.losses), (outputs, run.outputs)):
                    for microbatch, value in values.items():
                        found[stage // self._count * size + microbatch] = value
        self.clear()
        return losses, outputs


async def _own(grad: TensorCore, device: str) -> Array:
    """The data of a Tensor that came from elsewhere, on a device, to be written to."""
    data = (await to_device(grad, device))._data
    return data.copy() if isinstance(data, np.ndarray) and not data.flags.writeable else data


class _SentGradients:
    """Sends the gradients of microbatches that were taken over to the member that adds them up.

    Args:
        leaves: in the order in which they travel.
        stage: numbered through.
        send: takes the stage, a microbatch and the gradients.
    """

    def __init__(self, leaves: Sequence[AccumulateGrad], stage: int, send: Callable[[int, int, list[Any]], None]) -> None:
        self._leaves = leaves
        self._stage = stage
        self._send = send

    def deliver(self, stage: int, microbatch: int, grads: Mapping[AccumulateGrad, Array]) -> None:
        """See `GradientAccumulator.deliver`."""
        unknown = grads.keys() - set(self._leaves)
        if unknown:
            shapes = ", ".join(sorted(str(list(leaf.shape)) for leaf in unknown))
            raise GraphError(f"a replica of a pipeline has gradients for leaves of shapes {shapes} that are no parameters of its stages' modules")
        self._send(self._stage, microbatch, [make(grads[leaf]) if leaf in grads else None for leaf in self._leaves])

    async def fold(self) -> None:
        """There is nothing to add up here. Cancelling has no effect."""


class _AbsorbedExchange(RankExchange):
    """How a rank reaches the others in a step after a loss."""

    __slots__ = ("_homes",)

    def __init__(self, execution: StepExecution, rank: int, homes: Mapping[int, Sequence[int]]) -> None:
        super().__init__(execution, rank)
        self._homes = homes

    def send(self, key: Key, value: Any) -> None:
        self._work.put(self._homes[key[1]][key[2]], key, value)
