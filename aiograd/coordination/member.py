"""StepMember: the steps of one member, on its worker.

Note [Steps]
    Steps are numbered by the coordinating process, and every number is tried once. A message with a number above the last one makes the member
    drop its earlier steps; one with a lower number comes too late and changes nothing. A step that has been carried out is *prepared*: its
    effects wait until they are committed, all in one moment, or dropped. A member takes no further step before it knows which of the two: the
    coordinating process tells it, and if no message comes the member finds out by itself (see Note [In doubt] in `session`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Generic

from aiograd.coordination.client import AfterCommit, StepWording
from aiograd.coordination.session import MemberWorker, OpenStep, StepSession, W, kept_for
from aiograd.engine.run.failures import mark_committed
from aiograd.errors import CommitUnknown, TransactionError
from aiograd.running.log_fields import structured_logger
from aiograd.transaction import AbortDecided, CommitDecided, Failed, History, Outcome, OwnerClosed, TransactionState

logger = structured_logger("aiograd.coordination")

#: committed steps that are remembered, for members that ask
REMEMBERED = 64


class StepMember(Generic[W]):
    """The steps of a member, one after the other.

    A subclass makes the work of a step (`_make_work`), names the other members (`_others`), and adds the method that carries a step out.

    Args:
        worker: the worker that it was made on.
    """

    #: the words of its errors
    wording: StepWording

    def __init__(self, worker: MemberWorker) -> None:
        self._worker = worker
        self._session: StepSession[W] | None = None
        self._committed: History[int] = History(REMEMBERED)
        #: steps up to this one are forgotten
        self._forgotten = 0

    def _make_work(self, step: int) -> W:
        """The work of a step that is heard of for the first time."""
        raise NotImplementedError

    def _others(self, session: StepSession[W]) -> Iterable[Any]:
        """References to the other members, which may know the outcome of a step."""
        raise NotImplementedError

    # ---------------------------------------------------------------- called by others

    async def check(self, step: int) -> float:
        """The seconds, from now on, for which a step that is prepared here is surely kept; 0: it is not prepared."""
        session = self._session
        if session is None or session.step != step:
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
            session = self._begin(step)
            session.drive.handle(Failed())  # the asking member believes from now on that the step was dropped, so it must never run here
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
            if session is None or session.step != step:
                raise TransactionError("there is no such step")
            after_commit = session.drive.handle(CommitDecided())
        except TransactionError:
            raise self.wording.failure(
                f"step {step} of {self.wording.subject} cannot be committed: it is not prepared on this worker, or is no more; its gradients are "
                f"gone. {self.wording.lost}"
            ) from None
        await follow(after_commit)
        return True

    async def abort(self, step: int) -> bool:
        """Drop a step, which is then no longer in doubt. A committed step stays."""
        session = self._session
        if session is None or session.step != step:
            session = self._find(step)
        if session is not None:
            session.drive.handle(AbortDecided())
        return session is not None

    # ---------------------------------------------------------------- inside

    def _begin(self, step: int) -> StepSession[W]:
        session = self._find(step)
        if session is None:
            raise self.wording.failure(f"step {step} of {self.wording.subject} has been begun before")
        return session

    def _begin_to_run(self, step: int, coordinator: Any, *, is_read_only: bool = False) -> StepSession[W]:
        """The session of a step that the running task carries out from now on; see `StepSession.begin`."""
        session = self._find(step)
        if session is None or session.work.has_begun:
            raise self.wording.failure(
                f"step {step} of {self.wording.subject} comes too late: its member has seen a later one, or this one before"
            )
        session.begin(coordinator, is_read_only=is_read_only)
        return session

    def _find(self, step: int) -> StepSession[W] | None:
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
            if session.transaction.is_doubtful:
                raise CommitUnknown(
                    f"step {step} of {self.wording.subject} cannot begin on this worker: {self._describe_doubt(session)}",
                    workers=(self._worker.name,),
                )
            session.drive.handle(OwnerClosed())
        self._session = session = StepSession(self._make_work(step), self._ended, self.wording.subject, self._worker, self._others)
        return session

    def _forget_step(self) -> None:
        """Release the last step, decided or not: its outcome does not matter here any more."""
        session, self._session = self._session, None
        if session is not None:
            self._forgotten = session.step
            session.drive.handle(OwnerClosed())

    def _ended(self, session: StepSession[W]) -> None:
        """A step is over here."""
        if session.state is TransactionState.COMMITTED:
            self._committed.remember(session.step, Outcome.COMMITTED)
        elif session.transaction.is_doubtful:
            logger.warning("worker %s: %s", self._worker.name, self._describe_doubt(session))

    # ---------------------------------------------------------------- called by the worker itself

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """The error if gradients of these leaves are in doubt here; else None."""
        session = self._session
        if session is None or not session.transaction.is_doubtful or session.work.leaves.isdisjoint(leaves):
            return None
        return CommitUnknown(f"the gradients may not be complete: {self._describe_doubt(session)}", workers=(self._worker.name,))

    def _open_step(self) -> OpenStep | None:
        """The step that is under way here; None: there is none."""
        session = self._session
        if session is None or not (session.work.runner is not None or session.transaction.is_prepared):
            return None
        coordinator, work = session.coordinator, session.work
        tasks = [] if work.runner is None else [work.runner]
        decided_by = coordinator.owner if coordinator is not None and session.transaction.is_prepared else ""
        owner, key = ("", b"") if coordinator is None else (coordinator.owner, coordinator.key)
        messages = [(future, owner if sender is None else sender, message) for future, sender, message in work.messages()]
        return OpenStep(session.step, self.wording.subject, key, tasks, decided_by, [each.key for each in work.members()], messages)

    def _leave(self) -> None:
        """The last reference to the member has been deleted."""
        if self._session is not None:
            self._session.drive.handle(OwnerClosed())

    def _describe_doubt(self, session: StepSession[W]) -> str:
        step = f"step {session.step} of {self.wording.subject}"
        if session.transaction.is_prepared:
            return f"{step} is prepared on {self._worker.name}, which does not know yet whether it was committed. {self.wording.in_doubt}"
        return f"no peer could tell {self._worker.name} whether {step} was committed, so its gradients were dropped there. {self.wording.in_doubt}"


async def follow(after_commit: AfterCommit) -> None:
    """Run what follows a commit; its errors have ``committed`` True."""
    if after_commit is None:
        return
    try:
        await after_commit()
    except BaseException as error:
        mark_committed(error)
        raise
