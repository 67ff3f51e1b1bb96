"""StepExecution: the ranks of a pipeline that run in one process during one step: tasks of one loop, which hand values to each other directly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from aiograd.coordination.module_calls import ModuleCalls
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.pipeline.run.mailbox import Mailbox
from aiograd.pipeline.run.outbox import StepOutbox
from aiograd.pipeline.run.replicated_stages import ReplicaReduction
from aiograd.pipeline.run.together import together
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.step.accumulator import GradientAccumulator
from aiograd.pipeline.step.rank import Key, Rank
from aiograd.pipeline.step.stage import Stage
from aiograd.pipeline.step.stage_run import StageRun
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running.modes import current_mode


class ExecutedAction(NamedTuple):
    """An action that was carried out, in seconds of the loop's clock."""

    rank: int
    action: Action
    began: float
    ended: float


class StepSpec(NamedTuple):
    """The work of a step on the ranks of one process."""

    rows: Mapping[int, Sequence[Action]]
    stages: Mapping[int, Stage]
    stage_to_rank: tuple[int, ...]
    microbatches: int
    #: the stage that ends in the loss, or in the results
    last: int
    trains: bool
    loss_fn: Callable[..., Any] | None
    scale: float
    keep_outputs: bool
    random: StepRandom
    handlers: Mapping[ActionKind, Callable[[Action], Any]]
    calls: ModuleCalls


class StepRouter(Protocol):
    """The values of a step on their way to ranks."""

    mailboxes: dict[int, Mailbox]
    outbox: StepOutbox

    def put(self, rank: int, key: Key, value: Any) -> None:
        """Hand a value to a rank, here or elsewhere."""


class StepExecution:
    """The ranks of one process during one step, with the gradient accumulator that they share.

    Args:
        work: the work of the ranks.
        traffic: the messages for the ranks, and the destinations of those that they send.
        events: takes what is carried out, or None.
        reduction: adds up gradients over the replicas of these stages; None: there are no others.
    """

    def __init__(
        self, spec: StepSpec, router: StepRouter, events: list[ExecutedAction] | None = None, reduction: ReplicaReduction | None = None
    ) -> None:
        self.spec = spec
        self.router = router
        self.reduction = reduction
        leaves = {index: stage.leaves() for index, stage in spec.stages.items()}
        self.accumulator = GradientAccumulator(leaves, spec.microbatches, reduction) if spec.trains else None
        self.runs = {
            index: StageRun(
                stage,
                index,
                self.accumulator,
                is_last=index == spec.last,
                loss_fn=spec.loss_fn,
                scale=spec.scale,
                keep_outputs=spec.keep_outputs,
                random=spec.random,
                offload=spec.calls.offload,
            )
            for index, stage in spec.stages.items()
        }
        self.ranks: dict[str, Rank] = {}
        for rank, row in spec.rows.items():
            own = {index: run for index, run in self.runs.items() if spec.stage_to_rank[index] == rank}
            self.ranks[f"rank {rank}"] = Rank(rank, row, own, _Exchange(self, rank, events), spec.handlers)

    async def run(self) -> None:
        """Carry out every rank's actions. Cancelling ends all of them.

        Raises:
            PipelineError: an action failed.
        """
        try:
            await together({name: rank.run() for name, rank in self.ranks.items()}, self._whereabouts, self.router.outbox.failure)
        except BaseException:
            self.clear()
            raise

    def clear(self) -> None:
        """Let go of what is kept for microbatches, and of what ties ranks together."""
        for rank in self.ranks.values():
            rank.clear()
        self.ranks.clear()

    def _whereabouts(self, name: str) -> str:
        action = self.ranks[name].current
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
        """Whose gradients are staged."""
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
        """Losses and outputs by microbatch, where the last stage runs here. Once."""
        run = self.runs.get(self.spec.last)
        losses, outputs = (None, None) if run is None else ([part[i] for i in sorted(part)] for part in (run.losses, run.outputs))
        self.clear()
        return losses, outputs


class _Exchange:
    """How a rank of this process reaches the others."""

    __slots__ = ("has", "take", "receive", "_router", "_stage_to_rank", "_rank", "_step", "_events", "_profiler", "_now")

    def __init__(self, execution: StepExecution, rank: int, events: list[ExecutedAction] | None) -> None:
        self._router = execution.router
        self._stage_to_rank = execution.spec.stage_to_rank
        mailbox = self._router.mailboxes[rank]
        self.has, self.take, self.receive = mailbox.has, mailbox.take, mailbox.receive
        self._rank = rank
        self._step = execution.spec.random.seed
        self._events = events
        self._profiler = current_mode().profiler
        self._now = asyncio.get_running_loop().time

    def send(self, key: Key, value: Any) -> None:
        self._router.put(self._stage_to_rank[key[1]], key, value)

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
