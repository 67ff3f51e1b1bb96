"""StageHost: the ranks of a pipeline that live in one process: this one, or a worker's.

On a worker it is made around the modules of its stages, by name (see `aiograd.distributed.register_adapter`), and asked by the process that has
the `Pipeline`: to carry out a step, to commit it, or to drop it. Hosts send values to each other directly.

Note [Steps]
    Steps are numbered by the pipeline, and every number is tried once. A message with a number above the last one makes the host drop its
    earlier steps; one with a lower number comes too late and changes nothing. A step that has been carried out is *prepared*: its
    gradients wait in the accumulator until they are committed, all in one moment, or dropped. A host on a worker takes no further step before it
    knows which of the two: the pipeline sees to it that it does, and if nothing is heard of the pipeline the host finds out by itself
    (see Note [In doubt] in `session`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from aiograd.engine.run.failures import mark_committed
from aiograd.errors import ArgumentError, CommitUnknown, PipelineError, TransactionError
from aiograd.log_fields import structured_logger
from aiograd.offloading import ready
from aiograd.pipeline.run.outbox import received
from aiograd.pipeline.run.session import DRIVER, HostWorker, StepSession, kept_for
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.run.step_execution import StepExecution, StepSpec
from aiograd.pipeline.step.step_random import StepRandom
from aiograd.transaction import AbortDecided, CommitDecided, Failed, History, Outcome, Prepared, TransactionState

logger = structured_logger("aiograd.pipeline")

#: committed steps that are remembered, for hosts that ask
REMEMBERED = 64
#: the advice for a step that is in doubt
ADVICE = "Let the pipeline settle() it, or restore all workers from one checkpoint and make a new Pipeline."


class StageHost:
    """The ranks of a pipeline that live in one process.

    Args:
        modules: of the stages, in the order of `charge`.
        charge: the assignment of stages to the host; from another worker a dict, see `StageAssignment.to_wire`.
        home: the worker that it was made on for a pipeline elsewhere; None in the pipeline's own process, which decides.
    """

    def __init__(self, modules: list[Any], assignment: Any, worker: HostWorker | None = None) -> None:
        self._assignment = assignment if isinstance(assignment, StageAssignment) else StageAssignment.parse(modules, assignment)
        self._worker = worker
        self._session: StepSession | None = None
        self._committed: History[int] = History(REMEMBERED)
        #: names of the workers that have not confirmed a commit, as the pipeline tells its own host
        self.unconfirmed: Callable[[], Sequence[str]] = tuple

    # ---------------------------------------------------------------- what others may call

    async def receive(self, step: int, rank: int, kind: str, stage: int, microbatch: int, value: Any) -> bool:
        """A value for a rank that lives here. Returns whether it was of use; what comes too late is not."""
        session = self._find(step)
        if session is None:
            return False
        assignment = self._assignment
        if rank not in session.mailboxes or stage not in assignment.stages or not 0 <= microbatch < assignment.microbatches:
            raise ArgumentError(f"a value for stage {stage}, microbatch {microbatch} on rank {rank} of a pipeline came to the wrong place")
        session.mailboxes[rank].put((kind, stage, microbatch), received(kind, value))
        return True

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
        session = self._find(step)
        if session is None or session.has_begun:
            raise PipelineError(f"step {step} of a pipeline comes too late: its host has seen a later one, or this one before")
        session.begin(trains, driver)
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
            session.runner = None
            session.handle(Failed())
            raise
        session.end(execution)
        return {"losses": losses, "outputs": outputs}

    async def check(self, step: int) -> float:
        """For how many seconds, from now on, a step is surely kept that is prepared here; 0: it is not."""
        session = self._session
        if self._worker is None or session is None or session.step != step:
            return 0.0
        if not session.transaction.is_prepared and session.state is not TransactionState.COMMITTED:
            return 0.0
        session.hear()
        return kept_for(self._worker.lease)

    async def outcome(self, step: int) -> str:
        """The `Outcome` of a step here, or how far it is. See Note [In doubt] in `session`."""
        if step in self._committed:
            return Outcome.COMMITTED.value
        session = self._session
        if session is None or session.step < step:
            if self._worker is None:
                return Outcome.UNKNOWN.value
            session = self._begin(step)
            session.handle(Failed())  # who asks believes from now on that the step was dropped, so it must never run here
        if session.step == step:
            return session.transaction.outcome.value
        return (Outcome.ABORTED if session.step - step < REMEMBERED else Outcome.UNKNOWN).value

    async def reroute(self, step: int, peers: dict[str, Any]) -> bool:
        """Ranks that were lost are somewhere else now: repeat what they had been sent."""
        session = self._find(step)
        if session is not None:
            await session.outbox.repeat(session.outbox.route(peers))
        return session is not None

    async def commit(self, step: int) -> bool:
        """Write the gradients of a step that is prepared. Doing it again does nothing.

        Raises:
            PipelineError: it is not prepared here; nothing is written.
        """
        if step in self._committed:
            return True
        session = self._session
        try:
            if self._worker is None or session is None or session.step != step:
                raise TransactionError("there is no such step")
            execution = session.handle(CommitDecided())
        except TransactionError:
            raise PipelineError(
                f"step {step} of a pipeline cannot be committed: it is not prepared on this worker, or is no more; its gradients are gone. Restore "
                "all workers from one checkpoint"
            ) from None
        await self._after_commit(execution)
        return True

    async def abort(self, step: int) -> bool:
        """Drop a step, which is then no longer in doubt. A committed step stays."""
        session = self._session
        if session is None or session.step != step:
            session = self._find(step)
        if session is not None:
            session.handle(Failed() if self._worker is None else AbortDecided())
        return session is not None

    # ---------------------------------------------------------------- inside

    def _begin(self, step: int) -> StepSession:
        session = self._find(step)
        if session is None:
            raise PipelineError(f"step {step} of a pipeline has been begun before")
        return session

    def _find(self, step: int) -> StepSession | None:
        """The session of a step, made if it is the first time that it is heard of; None if it comes too late.

        Raises:
            CommitUnknown: an earlier step is in doubt here.
        """
        session = self._session
        if session is not None and session.step >= step:
            return session if session.step == step and session.state not in (TransactionState.ABORTED, TransactionState.IN_DOUBT) else None
        if session is not None:
            if self._worker is not None and session.transaction.is_doubtful:
                doubt = self._describe_doubt(session, self._worker)
                raise CommitUnknown(f"step {step} of a pipeline cannot begin on this worker: {doubt}", workers=(self._worker.name,))
            session.give_up()
        assignment = self._assignment
        ranks = assignment.training.keys() | assignment.evaluation.keys()
        self._session = session = StepSession(step, ranks, assignment.recovers, self._worker, self._ended)
        return session

    def _commit(self, session: StepSession) -> StepExecution | None:
        """This process, which decides, is prepared as well: write the gradients of a step, unless what others have promised is over by now."""
        return session.handle(Prepared(peer=DRIVER))

    def _ended(self, session: StepSession) -> None:
        """A step is over here."""
        if session.state is TransactionState.COMMITTED:
            self._committed.remember(session.step, Outcome.COMMITTED)
        elif session.transaction.is_doubtful and self._worker is not None:
            logger.warning("worker %s: %s", self._worker.name, self._describe_doubt(session, self._worker))

    async def _after_commit(self, execution: StepExecution | None) -> None:
        if execution is None:
            return
        try:
            await execution.after_commit()
        except BaseException as error:
            mark_committed(error)
            raise

    # ---------------------------------------------------------------- what the worker itself asks

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """The error if gradients of these leaves, or those on these workers, are in doubt; else None."""
        session = self._session
        if self._worker is not None and session is not None and session.transaction.is_doubtful and not session.leaves.isdisjoint(leaves):
            text = f"the gradients may not be complete: {self._describe_doubt(session, self._worker)}"
            return CommitUnknown(text, workers=(self._worker.name,))
        unconfirmed = sorted({*owners} & {*self.unconfirmed()})
        if unconfirmed:
            text = f"the gradients on {', '.join(unconfirmed)} may not be complete: a step of a pipeline is not known to be committed there. {ADVICE}"
            return CommitUnknown(text, workers=tuple(unconfirmed))
        return None

    def _leave(self) -> None:
        """The pipeline is closed."""
        if self._session is not None:
            self._session.give_up()

    @staticmethod
    def _describe_doubt(session: StepSession, worker: HostWorker) -> str:
        if session.transaction.is_prepared:
            return f"step {session.step} of a pipeline is prepared on {worker.name}, which does not know yet whether it was committed. {ADVICE}"
        step = f"step {session.step} of a pipeline"
        return f"nobody could tell {worker.name} whether {step} was committed, so its gradients were dropped there. {ADVICE}"
