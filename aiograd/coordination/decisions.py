"""StepDecisions: the decisions on steps in the coordinating process, which members may ask for, and are told until they acknowledge them.

Note [Until it is acknowledged]
    A member that has prepared a step takes no other before it knows the outcome. So a decision that a member has not acknowledged is kept, and
    told again before anything else is begun. A commit that is not acknowledged means doubt: the member may have written its gradients, or do so
    when it is told or finds out by itself (see Note [In doubt] in `session`); or it has lost them, and then it never acknowledges.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from aiograd.coordination.client import AfterCommit, StepWording
from aiograd.coordination.drive import CoordinatorDrive
from aiograd.coordination.member import REMEMBERED
from aiograd.coordination.session import COORDINATOR, PAUSE, OpenStep, StepClient, W
from aiograd.errors import CommitUnknown, ReferenceLostError
from aiograd.transaction import Coordinator, Failed, History, Outcome, ParticipantsJoined, ParticipantsLeft, Prepared, TransactionState

#: seconds for which a busy member is told again, where requests have no timeout of their own
TELLING = 60.0


class RemoteMember(Protocol):
    """A member on a worker, as the coordinating process sees it."""

    #: name of the worker
    owner: str
    #: reference to the member; None: it has not been made, or was let go
    ref: Any

    @property
    def name(self) -> str:
        """Its name among the participants of a step."""


R = TypeVar("R", bound=RemoteMember)


class StepDecision(StepClient[W, CoordinatorDrive], Generic[W, R]):
    """One step in the coordinating process, which decides it.

    Args:
        work: the work of this process.
        remotes: the members.
        timeout: seconds for telling one; None: the worker's default.
        has_tree: many are told by a tree of them; False: members do not call each other.
    """

    __slots__ = ("remotes", "has_tree", "_timeout")

    def __init__(self, work: W, remotes: Iterable[R], timeout: float | None, *, has_tree: bool = True) -> None:
        super().__init__(work, lambda decision: None)
        self.remotes: dict[str, R] = {remote.name: remote for remote in remotes if remote.ref is not None}
        self.has_tree: bool = has_tree
        self._timeout = timeout
        self.drive: CoordinatorDrive = CoordinatorDrive(Coordinator(COORDINATOR, pause=PAUSE), self)
        self.drive.handle(ParticipantsJoined(tuple(self.remotes)))

    @property
    def unacknowledged(self) -> list[R]:
        """The members that have not acknowledged the outcome."""
        return [remote for name, remote in self.remotes.items() if name in self.drive.machine.unacknowledged]

    def leave(self, remote: R) -> None:
        """A member takes part no more."""
        if self.remotes.get(remote.name) is remote:
            del self.remotes[remote.name]
            self.drive.handle(ParticipantsLeft((remote.name,)))

    def join(self, remotes: Iterable[R]) -> None:
        """Members take part, in place of one that has left."""
        new = {remote.name: remote for remote in remotes}
        self.remotes |= new
        self.drive.handle(ParticipantsJoined(tuple(new)))

    async def attempt(self, among: Iterable[R] | None = None) -> dict[R, BaseException]:
        """Tell members the outcome, all side by side, for as long as they may be heard. See Note [Silence is counted once] in `silence`.

        Args:
            among: the members to tell; None: all that have not acknowledged it.

        Returns:
            The errors by member.
        """
        seconds = TELLING if self._timeout is None else self._timeout
        self.drive.machine.tell_until = asyncio.get_running_loop().time() + seconds
        told = {remote.name: remote for remote in (self.unacknowledged if among is None else among) if remote.ref is not None}
        failed = await self.drive.attempt(told, lambda name: told[name].owner, PAUSE)
        return {told[name]: error for name, error in failed.items()}

    # ---------------------------------------------------------------- as a client

    async def tell(self, peer: str, outcome: Outcome) -> None:
        """Let a member commit the step, or drop it."""
        ref = self.remotes[peer].ref
        if outcome is Outcome.COMMITTED:
            await ref.call("commit", self.step, timeout=self._timeout)
            return
        with contextlib.suppress(ReferenceLostError):  # then there is nothing to drop any more
            await ref.call("abort", self.step, timeout=self._timeout)

    def silence_left(self, peer: str) -> float:
        """See `RemoteRef.silence_left`; a member that has left counts as lost."""
        remote = self.remotes.get(peer)
        return 0.0 if remote is None else float(remote.ref.silence_left)

    async def spread(self, peers: Sequence[str], outcome: Outcome) -> Mapping[str, BaseException | None]:
        """The same, for many members."""
        if not self.has_tree:
            return {}
        refs = [self.remotes[peer].ref for peer in peers]
        method = "commit" if outcome is Outcome.COMMITTED else "abort"
        answers = await refs[0].call_all(refs, method, self.step, timeout=self._timeout)
        return {
            peer: answer if isinstance(answer, BaseException) else None
            for peer, answer in zip(peers, answers, strict=True)
            if answer is not None
        }


class StepDecisions(Generic[W, R]):
    """The decisions on steps, one after the other.

    Args:
        wording: the words of errors.
        timeout: seconds for telling a member; None: the worker's default.
    """

    def __init__(self, wording: StepWording, timeout: float | None) -> None:
        self.wording = wording
        #: see `StepDecision`
        self.has_tree = True
        self._timeout = timeout
        #: the last step
        self.last: StepDecision[W, R] | None = None
        self._committed: History[int] = History(REMEMBERED)
        #: by step, in order: a member that is in doubt listens to nothing about later steps
        self._pending: dict[int, StepDecision[W, R]] = {}

    def begin(self, work: W, remotes: Iterable[R]) -> StepDecision[W, R]:
        """Begin a step, and give up the last one unless it is decided.

        Args:
            work: the work of this process.
            remotes: the members.

        Returns:
            The step.
        """
        if self.last is not None:
            if work.step <= self.last.step:
                raise self.wording.failure(f"step {work.step} of {self.wording.subject} has been begun before")
            self.last.drive.handle(Failed())
        self.last = StepDecision(work, remotes, self._timeout, has_tree=self.has_tree)
        return self.last

    def _commit(self, decision: StepDecision[W, R]) -> AfterCommit:
        """This process is prepared as well: commit a step here, unless the promises of members are over by now."""
        after_commit = decision.drive.handle(Prepared(peer=COORDINATOR))
        if decision.state is TransactionState.COMMITTED:
            self._committed.remember(decision.step, Outcome.COMMITTED)
        return after_commit

    def outcome(self, step: int) -> Outcome:
        """The outcome of a step, or how far it is."""
        if step in self._committed:
            return Outcome.COMMITTED
        last = self.last
        if last is None or step > last.step or last.step - step >= REMEMBERED:
            return Outcome.UNKNOWN
        return last.transaction.outcome if last.step == step else Outcome.ABORTED

    # ---------------------------------------------------------------- telling

    @property
    def are_acknowledged(self) -> bool:
        """True if every member has acknowledged every decision."""
        return not self._open()

    def _open(self) -> dict[int, StepDecision[W, R]]:
        self._pending = {step: each for step, each in self._pending.items() if each.drive.machine.unacknowledged}
        return self._pending

    def unconfirmed(self) -> tuple[str, ...]:
        """Names of the workers with members that have not acknowledged a commit."""
        committed = (each for each in self._open().values() if each.transaction.outcome is Outcome.COMMITTED)
        return tuple(dict.fromkeys(remote.owner for each in committed for remote in each.unacknowledged))

    def keep(self, decision: StepDecision[W, R]) -> None:
        """A step is decided: keep the decision until it is acknowledged."""
        self._pending[decision.step] = decision

    def forget(self, remote: R) -> None:
        """A member is gone, and another may be in its place."""
        for decision in self._pending.values():
            decision.leave(remote)

    async def attempt(self, step: int | None = None) -> dict[R, BaseException]:
        """Tell members the decisions that they have not acknowledged, on one step or on all. Cancelling stops it.

        Args:
            step: its number; None: all steps.

        Returns:
            The errors by member.
        """
        failed: dict[R, BaseException] = {}
        for number, decision in list(self._open().items()):
            if step in (None, number):
                failed |= await decision.attempt([each for each in decision.unacknowledged if each not in failed])
        return failed

    async def tell(self, step: int | None, what: str) -> dict[R, BaseException]:
        """As `attempt`, where no commit may be left unacknowledged.

        Args:
            step: its number; None: all steps.
            what: the committed step, in words.

        Returns:
            The errors by member.

        Raises:
            CommitUnknown: a commit is not acknowledged.
        """
        failed = await self.attempt(step)
        unknown = self.unconfirmed()
        if unknown:
            first = next((error for remote, error in failed.items() if remote.owner in unknown), None)
            raise CommitUnknown(
                f"{what} was committed, but not confirmed by {', '.join(unknown)} ({first}): it is in doubt there. {self.wording.unconfirmed}",
                workers=unknown,
            ) from first
        return failed


class StepOutcomes(Generic[W, R]):
    """The decisions of the coordinating process, as members ask for them. An adapter, to which members have a reference.

    Args:
        decisions: the decisions.
    """

    def __init__(self, decisions: Any) -> None:  # as a peer would make it, by the schema of exposed classes
        self._decisions: StepDecisions[W, R] = decisions

    async def outcome(self, step: int) -> str:
        """The `Outcome` of a step, or how far it is."""
        return self._decisions.outcome(step).value

    def _open_step(self) -> OpenStep | None:
        """The last step, if it is not over; None: there is none."""
        last = self._decisions.last
        if last is None or (last.state in (TransactionState.COMMITTED, TransactionState.ABORTED) and not last.unacknowledged):
            return None
        tasks = [] if last.work.runner is None else [last.work.runner]
        members = [remote.ref.key for remote in last.remotes.values() if remote.ref is not None]
        members += [each.key for each in last.work.members()]
        return OpenStep(last.step, self._decisions.wording.subject, None, tasks, "", members, last.work.messages())

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """The error if gradients on these workers are in doubt; else None."""
        unconfirmed = sorted({*owners} & {*self._decisions.unconfirmed()})
        if not unconfirmed:
            return None
        wording = self._decisions.wording
        return CommitUnknown(
            f"the gradients on {', '.join(unconfirmed)} may not be complete: a step of {wording.subject} is not known to be committed there. "
            f"{wording.in_doubt}",
            workers=tuple(unconfirmed),
        )

    def _leave(self) -> None:
        """The last reference to this object has been deleted."""
        if self._decisions.last is not None:
            self._decisions.last.drive.handle(Failed())
