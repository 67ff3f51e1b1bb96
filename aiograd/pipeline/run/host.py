"""StageHost: the ranks of a pipeline that live in one process: this one, or a worker's.

On a worker it is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and asked by the process that has
the `Pipeline`: to carry out a step, to commit it, or to drop it. Hosts send values to each other directly. See Note [Steps] in
`aiograd.coordination.host`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.coordination.host import StepHost
from aiograd.coordination.module_calls import BufferSnapshot, ModuleCalls
from aiograd.coordination.session import HostWorker
from aiograd.errors import ArgumentError, ArgumentTypeError, PipelineError
from aiograd.pipeline.run.outbox import received
from aiograd.pipeline.run.replicated_stages import ReplicatedStages, outline
from aiograd.pipeline.run.session import SUBJECT, PipelineSession
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.step_execution import StepExecution, StepSpec
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.running.offloading import ready
from aiograd.tensors.core import TensorCore, make


class StageHost(StepHost[PipelineSession]):
    """The ranks of a pipeline that live in one process.

    Args:
        modules: of the stages, in the order of `assignment`.
        assignment: the stages of the host; from another worker a dict, see `StageAssignment.to_wire`.
        worker: the worker that it was made on for a pipeline elsewhere; None in the pipeline's own process, which decides.
    """

    subject = SUBJECT
    failure = PipelineError
    advice = "Let the pipeline settle() it, or restore all workers from one checkpoint and make a new Pipeline."
    restoring = "Restore all workers from one checkpoint"
    going_on = "Go on without its replica (`await pipe.remove({worker!r})`); `await pipe.add(stages)` takes in another one"

    def __init__(self, modules: list[Any], assignment: Any, worker: HostWorker | None = None) -> None:
        super().__init__(worker)
        self._assignment = assignment if isinstance(assignment, StageAssignment) else StageAssignment.parse(modules, assignment)
        #: where this is the host of one of several replicas, once it has joined the others
        self._replicated: ReplicatedStages | None = None
        self._calls = ModuleCalls()

    def _make_session(self, step: int) -> PipelineSession:
        assignment = self._assignment
        ranks = assignment.training.keys() | assignment.evaluation.keys()
        return PipelineSession(step, ranks, assignment.recovers, self._worker, self._ended)

    # ---------------------------------------------------------------- what others may call

    def _take(self, value: Any) -> None:
        """Take a value for a rank that lives here, from a `StepOutbox`; one that comes too late is dropped."""
        match value:
            case (int(step), int(rank), str(kind), int(stage), int(microbatch), value):
                session = self._find(step)
            case _:
                raise ArgumentError("a malformed value between ranks of a pipeline")
        if session is None:
            return
        assignment = self._assignment
        if rank not in session.mailboxes or stage not in assignment.stages or not 0 <= microbatch < assignment.microbatches:
            raise ArgumentError(f"a value for stage {stage}, microbatch {microbatch} on rank {rank} of a pipeline came to the wrong place")
        session.mailboxes[rank].put((kind, stage, microbatch), received(kind, value))

    async def outline(self) -> list[list[Any]]:
        """The parameters and buffers of the stages, as replicas compare them."""
        return outline(self._assignment.stages)

    async def join(self, names: list[str], group: str, copies: bool) -> bool:
        """Join the hosts of the same stages in other replicas; gradients are added up with theirs from then on.

        Args:
            names: of the workers, in the order of the replicas.
            group: name of the group.
            copies: parameters, buffers and gradients become those of the first. Failed or cancelled, they are as they were.

        Raises:
            PipelineError: this host has nothing to join them with. Otherwise as `join_group`.
        """
        if self._worker is None:
            raise PipelineError("a pipeline's own process has no replica of its stages")
        before, self._replicated = self._replicated, None
        if before is not None:
            await before.group.aclose()
        joined = ReplicatedStages(self._assignment.stages, await self._worker.join(names, group))
        try:
            if copies:
                await joined.copy_first()
        except BaseException:
            await joined.group.aclose()
            raise
        self._replicated = joined
        return True

    async def run(
        self, step: int, trains: bool, peers: dict[str, Any], driver: Any = None, seed: Any = None, share: Any = None, measures: bool = False
    ) -> dict[str, Any]:
        """Carry out every action of a step, in the caller's grad mode. Cancelling gives the step up.

        Args:
            step: its number; see Note [Steps].
            trains: with backward; the step is prepared then. Else an evaluation.
            peers: for each rank that lives elsewhere how often it has been replaced, and its host.
            driver: the host of the process that decides; None: it cannot be asked.
            seed: of the step's `StepRandom`; None: a new one.
            share: of this replica in the batch: the factor of its losses, and the number of its first microbatch; None: it is the only one.
            measures: return the sizes of gradients as well.

        Returns:
            Losses and outputs by microbatch, where the last stage is here; and `GradientAccumulator.sizes`.

        Raises:
            PipelineError: a stage failed, or the step comes too late. CommitUnknown: an earlier step is in doubt here.
        """
        random = StepRandom(seed)
        scale = self._assignment.scale
        if share is not None:
            scale, random.first = _checked_share(share)
        session = self._begin_to_run(step, driver, is_read_only=not trains)
        session.outbox.route(peers)
        assignment = self._assignment
        spec = StepSpec(
            rows=assignment.training if trains else assignment.evaluation,
            stages=assignment.stages,
            stage_to_rank=assignment.stage_to_rank,
            microbatches=assignment.microbatches,
            last=assignment.loss_stage if trains else assignment.last_stage,
            trains=trains,
            loss_fn=assignment.loss_fn,
            scale=scale,
            keep_outputs=session.keeps_outputs,
            random=random,
            handlers=assignment.handlers,
            calls=self._calls,
        )
        before: BufferSnapshot | None = None
        reduction = self._replicated.begin() if self._replicated is not None and trains else None
        try:
            await self._calls.settled()
            if trains:
                before = BufferSnapshot(stage.module for stage in assignment.stages.values())
            execution = StepExecution(spec, session, assignment.events, reduction)
            await execution.run()
            await session.outbox.drain()
            await execution.prepare()
            sizes = await execution.sizes() if measures else {}
            losses, outputs = execution.results()
            await ready((losses, outputs))
        except BaseException:
            if reduction is not None:
                reduction.cancel()
            self._calls.release(_nothing if before is None else before.restore)
            session.fail()
            raise
        if before is not None:
            before.seal()
            session.undo = before.restore
        session.end(execution)
        found: dict[str, Any] = {"losses": losses, "outputs": outputs}
        if measures:
            found["sizes"] = {str(stage): [make(np.asarray(size)) for size in each] for stage, each in sizes.items()}
        return found

    async def scale(self, step: int, factor: Any) -> bool:
        """Multiply the gradients of a step that is prepared. Cancelled, the step has to be dropped.

        Raises:
            PipelineError: it is not prepared here.
        """
        session = self._session
        if session is None or session.step != step or not isinstance(session.execution, StepExecution):
            raise PipelineError(f"step {step} of a pipeline is not prepared here, so its gradients cannot be scaled")
        if not isinstance(factor, TensorCore) or factor.ndim:
            raise ArgumentTypeError(f"the factor of gradients is a {type(factor).__name__}; expected a 0-d Tensor")
        await session.execution.scale(factor.detach()._data[()])
        session.hear()
        return True

    async def reroute(self, step: int, peers: dict[str, Any]) -> bool:
        """Ranks that were lost are somewhere else now: repeat what they had been sent."""
        session = self._find(step)
        if session is not None:
            await session.outbox.repeat(session.outbox.route(peers))
        return session is not None

    # ---------------------------------------------------------------- inside

    def _leave(self) -> None:
        super()._leave()
        if self._replicated is not None and self._worker is not None:
            self._worker.keep(self._replicated.group.aclose(), "leaving the other replicas of a pipeline")


def _nothing() -> None:
    """There is nothing to be undone."""


def _checked_share(share: Any) -> tuple[float, int]:
    """The share of a replica, which comes from another worker."""
    match share:
        case [float(scale), int(first)] if first >= 0:
            return scale, first
    raise ArgumentError("a malformed share of a replica in the batch of a pipeline; expected a factor and a number of a microbatch")
