"""StepHost: what takes part in steps on one worker, or decides about them in the process that drives them.

Note [Steps]
    Steps are numbered by the process that drives them, and every number is tried once. A message with a number above the last one makes the host
    drop its earlier steps; one with a lower number comes too late and changes nothing. A step that has been carried out is *prepared*: its
    effects wait until they are committed, all in one moment, or dropped. A host on a worker takes no further step before it
    knows which of the two: the process that decides sees to it that it does, and if nothing is heard of that the host finds out by itself
    (see Note [In doubt] in `session`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from aiograd.coordination.session import DRIVER, HostWorker, PreparedStep, StepSession, kept_for
from aiograd.engine.run.failures import mark_committed
from aiograd.errors import AiogradError, CommitUnknown, TransactionError
from aiograd.running.log_fields import structured_logger
from aiograd.transaction import AbortDecided, CommitDecided, Failed, History, Outcome, Prepared, TransactionState

S = TypeVar("S", bound=StepSession)
logger = structured_logger("aiograd.coordination")

#: committed steps that are remembered, for hosts that ask
REMEMBERED = 64


class StepHost(Generic[S]):
    """The steps of a host, one after the other.

    A subclass makes the sessions (`_make_session`), adds the method that carries a step out, and says in words whose steps they are.

    Args:
        worker: the worker that it was made on; None in the process that decides.
    """

    #: whose steps they are
    subject: str
    #: the class of errors about steps that cannot be taken
    failure: type[AiogradError]
    #: the advice about a step that is in doubt, and about one that was committed and is lost here
    advice: str
    restoring: str
    #: the advice where one of several equal hosts is lost: `{worker!r}` is the name of its worker
    going_on: str

    def __init__(self, worker: HostWorker | None) -> None:
        self._worker = worker
        self._session: S | None = None
        self._committed: History[int] = History(REMEMBERED)
        #: steps up to this one are forgotten
        self._forgotten = 0
        #: names of the workers that have not confirmed a commit, as the process that decides tells its own host
        self.unconfirmed: Callable[[], Sequence[str]] = tuple

    def _make_session(self, step: int) -> S:
        """A session for a step that is heard of for the first time."""
        raise NotImplementedError

    # ---------------------------------------------------------------- what others may call

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
        if step <= self._forgotten:
            return Outcome.UNKNOWN.value
        session = self._session
        if session is None or session.step < step:
            if self._worker is None:
                return Outcome.UNKNOWN.value
            session = self._begin(step)
            session.handle(Failed())  # who asks believes from now on that the step was dropped, so it must never run here
        if session.step == step:
            return session.transaction.outcome.value
        return (Outcome.ABORTED if session.step - step < REMEMBERED else Outcome.UNKNOWN).value

    async def commit(self, step: int) -> bool:
        """Commit a step that is prepared. Doing it again does nothing.

        Raises:
            PipelineError, DistributedError: it is not prepared here; nothing is written.
        """
        if step in self._committed:
            return True
        session = self._session
        try:
            if self._worker is None or session is None or session.step != step:
                raise TransactionError("there is no such step")
            execution = session.handle(CommitDecided())
        except TransactionError:
            raise self.failure(
                f"step {step} of {self.subject} cannot be committed: it is not prepared on this worker, or is no more; its gradients are gone. "
                f"{self.restoring}"
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

    def _begin(self, step: int) -> S:
        session = self._find(step)
        if session is None:
            raise self.failure(f"step {step} of {self.subject} has been begun before")
        return session

    def _begin_to_run(self, step: int, driver: Any, *, is_read_only: bool = False) -> S:
        """The session of a step that the running task carries out from now on; see `StepSession.begin`."""
        session = self._find(step)
        if session is None or session.has_begun:
            raise self.failure(f"step {step} of {self.subject} comes too late: its host has seen a later one, or this one before")
        session.begin(driver, is_read_only=is_read_only)
        return session

    def _find(self, step: int) -> S | None:
        """The session of a step, made if it is the first time that it is heard of; None if it comes too late.

        Raises:
            CommitUnknown: an earlier step is in doubt here.
        """
        session = self._session
        if step <= self._forgotten:
            return None
        if session is not None and session.step >= step:
            return session if session.step == step and session.state not in (TransactionState.ABORTED, TransactionState.IN_DOUBT) else None
        if session is not None:
            if self._worker is not None and session.transaction.is_doubtful:
                doubt = self._describe_doubt(session, self._worker)
                raise CommitUnknown(f"step {step} of {self.subject} cannot begin on this worker: {doubt}", workers=(self._worker.name,))
            session.give_up()
        self._session = session = self._make_session(step)
        return session

    def _forget_step(self) -> None:
        """Let go of the last step, whatever was decided about it: what became of it does not matter here any more."""
        session, self._session = self._session, None
        if session is not None:
            self._forgotten = session.step
            session.give_up()

    def _commit(self, session: S) -> PreparedStep | None:
        """This process, which decides, is prepared as well: commit a step here, unless what others have promised is over by now."""
        return session.handle(Prepared(peer=DRIVER))

    def _ended(self, session: StepSession) -> None:
        """A step is over here."""
        if session.state is TransactionState.COMMITTED:
            self._committed.remember(session.step, Outcome.COMMITTED)
        elif session.transaction.is_doubtful and self._worker is not None:
            logger.warning("worker %s: %s", self._worker.name, self._describe_doubt(session, self._worker))

    async def _after_commit(self, execution: PreparedStep | None) -> None:
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
            text = (
                f"the gradients on {', '.join(unconfirmed)} may not be complete: a step of {self.subject} is not known to be committed there. "
                f"{self.advice}"
            )
            return CommitUnknown(text, workers=tuple(unconfirmed))
        return None

    def _leave(self) -> None:
        """Whoever had the host made lets go of it."""
        if self._session is not None:
            self._session.give_up()

    def _describe_doubt(self, session: StepSession, worker: HostWorker) -> str:
        step = f"step {session.step} of {self.subject}"
        if session.transaction.is_prepared:
            return f"{step} is prepared on {worker.name}, which does not know yet whether it was committed. {self.advice}"
        return f"nobody could tell {worker.name} whether {step} was committed, so its gradients were dropped there. {self.advice}"
