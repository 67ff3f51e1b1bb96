"""StageHost: the ranks of a pipeline that live in one process: this one, or a worker's.

On a worker it is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and asked by the process that has
the `Pipeline`: to carry out a step, to commit it, or to drop it. Hosts send values to each other directly. See Note [Steps] in `aiograd.steps.host`.
"""

from __future__ import annotations

from typing import Any

from aiograd.errors import ArgumentError, PipelineError
from aiograd.offloading import ready
from aiograd.pipeline.run.outbox import received
from aiograd.pipeline.run.session import SUBJECT, PipelineSession
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.step_execution import StepExecution, StepSpec
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.steps.host import StepHost
from aiograd.steps.session import HostWorker


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

    def __init__(self, modules: list[Any], assignment: Any, worker: HostWorker | None = None) -> None:
        super().__init__(worker)
        self._assignment = assignment if isinstance(assignment, StageAssignment) else StageAssignment.parse(modules, assignment)

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

    async def run(self, step: int, trains: bool, peers: dict[str, Any], driver: Any = None, seed: Any = None) -> dict[str, Any]:
        """Carry out every action of a step, in the caller's grad mode. Cancelling gives the step up.

        Args:
            step: its number; see Note [Steps].
            trains: with backward; the step is prepared then. Else an evaluation.
            peers: for each rank that lives elsewhere how often it has been replaced, and its host.
            driver: the host of the process that decides; None: it cannot be asked.
            seed: of the step's `StepRandom`; None: a new one.

        Returns:
            Losses and outputs by microbatch, where the last stage is here.

        Raises:
            PipelineError: a stage failed, or the step comes too late. CommitUnknown: an earlier step is in doubt here.
        """
        random = StepRandom(seed)
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
            scale=assignment.scale,
            keep_outputs=session.keeps_outputs,
            random=random,
            handlers=assignment.handlers,
        )
        try:
            execution = StepExecution(spec, session, assignment.events)
            await execution.run()
            await session.outbox.drain()
            await execution.prepare()
            losses, outputs = execution.results()
            await ready((losses, outputs))
        except BaseException:
            session.fail()
            raise
        session.end(execution)
        return {"losses": losses, "outputs": outputs}

    async def reroute(self, step: int, peers: dict[str, Any]) -> bool:
        """Ranks that were lost are somewhere else now: repeat what they had been sent."""
        session = self._find(step)
        if session is not None:
            await session.outbox.repeat(session.outbox.route(peers))
        return session is not None
