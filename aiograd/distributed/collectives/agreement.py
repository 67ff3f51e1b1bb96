"""GroupAgreements: decisions that a group takes together: every member applies its prepared change, or none does.

Note [Agreement]
    Rank 0 decides (see `aiograd.transaction`). Each other member that is prepared asks it for the decision. That request is its vote, and the answer
    comes once all have voted and rank 0 has applied its own work. A member that loses contact meanwhile asks rank 0 again, then the others, for as
    long as any of them may still tell; only then is the outcome unknown to it.

    Members agree on one thing after the other, and none goes on before it knows the last decision. So each remembers only that decision, and a
    member that has come further knows that the earlier ones were to commit. It is remembered when the group has failed as well, for questions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Protocol

from aiograd.coordination.client import AfterCommit, TransactionClient
from aiograd.coordination.drive import CoordinatorDrive, ParticipantDrive
from aiograd.coordination.message_form import WireMessage
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.messages.groups import Decision, GroupOutcome, Vote
from aiograd.distributed.rpc.timers import call_at, wait_for
from aiograd.distributed.wait_tables import Awaited, OpenWork, WaitEdge, WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import CollectiveError, CommitUnknown, DeadlineError, DistributedError, ProtocolError
from aiograd.running.log_fields import structured_logger
from aiograd.transaction import (
    Coordinator,
    Failed,
    Outcome,
    OutcomeReply,
    OwnerClosed,
    Participant,
    ParticipantsJoined,
    PeerLost,
    Prepared,
    TransactionEvent,
    TransactionState,
)

logger = structured_logger("aiograd.distributed")

#: how long a member that has lost contact asks for the decision, as a multiple of the time after which contact counts as lost
PATIENCE = 4

#: states in which nothing is decided yet
_OPEN = (TransactionState.ACTIVE, TransactionState.PREPARED, TransactionState.UNCERTAIN)


def agreement_name(key: bytes, group: str, number: int) -> str:
    """A name of a decision of a group for reports, equal on all members."""
    return f"commit {number} of group {group:.24} ({key.hex()[:8]})"


class AgreeingGroup(Protocol):
    """The part of a `Group` that its decisions use."""

    name: str
    names: tuple[str, ...]
    key: bytes
    principal: str

    @property
    def core(self) -> WorkerCore:
        """The worker."""

    def ask(self, peer: str, message: WireMessage, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another member."""

    def fail(self, error: DistributedError, tell: bool = True) -> None:
        """See `Group.fail`."""


class GroupAgreements(TransactionClient):
    """The decisions of a group, on one member; the client of the last one.

    Args:
        group: the group.
    """

    def __init__(self, group: AgreeingGroup) -> None:
        self._group = group
        self.names: tuple[str, ...] = group.names
        #: the number of decisions that this member has voted on, and the last of them
        self._number = 0
        self._drive: CoordinatorDrive | ParticipantDrive | None = None
        self._apply: Callable[[], None] | None = None
        #: the error of the group, or of this member's work in the last decision
        self.error: BaseException | None = None
        #: this member could not apply its work
        self._has_raised = False
        self._changed: asyncio.Future[None] | None = None
        #: votes that wait for the decision
        self._waiting = 0

    async def agree(self, apply: Callable[[], None], seconds: float) -> None:
        """See `Group.commit`."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        core, first = self._group.core, self.names[0]
        due = core.now() + seconds
        self._number += 1
        self._apply = apply
        asking: asyncio.Task[None] | None = None
        if core.name == first:
            deciding = self._drive = CoordinatorDrive(Coordinator(first, pause=core.limits.heartbeat), self)
            deciding.handle(ParticipantsJoined(self.names[1:]))
            deciding.handle(Prepared(peer=first))
        else:
            machine = Participant(first, lease=PATIENCE * core.limits.silence, pause=core.limits.heartbeat)
            voting = self._drive = ParticipantDrive(machine, self)
            voting.handle(Prepared(due))
            asking = core.loop.create_task(self._vote(voting, self._number, seconds), name=f"aiograd:{core.name}:vote")
        try:
            await self._decided(self._drive, due)
            while self._waiting:  # answers to votes are on their way before anything else happens here
                await self._change(due)
        finally:
            self._apply = None
            if asking is not None and not asking.done():
                asking.cancel()

    async def _decided(self, drive: CoordinatorDrive | ParticipantDrive, due: float) -> None:
        """Wait for the decision."""
        group, core = self._group, self._group.core
        cancelled: asyncio.CancelledError | None = None
        while drive.state in _OPEN:
            decides = isinstance(drive, CoordinatorDrive)
            try:
                await self._change(due if decides else None)
            except asyncio.CancelledError as error:
                if decides and drive.state in _OPEN:
                    group.fail(CollectiveError(f"group {group.name!r}: {core.name} was cancelled before the group had agreed", worker=core.name))
                    raise
                cancelled = error  # it has voted, and may not give up by itself any more
                continue
            if isinstance(drive, CoordinatorDrive) and drive.state in _OPEN and core.now() >= due:
                missing = ", ".join(drive.machine.missing(core.now()))
                group.fail(DeadlineError(f"group {group.name!r}: {missing} did not get ready to commit in time"))
        if drive.state is not TransactionState.COMMITTED:
            raise self._failure(drive.state)
        if cancelled is not None:
            raise cancelled

    def _failure(self, state: TransactionState) -> BaseException:
        group, first = self._group, self.names[0]
        if state is TransactionState.IN_DOUBT and not self._has_raised:
            text = f"group {group.name!r}: contact was lost when the group was about to commit, and no member can tell if it has"
            group.fail(CollectiveError(text, worker=group.core.name))
            return CommitUnknown(text, workers=(first,))
        error = self.error or CollectiveError(f"group {group.name!r}: {first} has given up before the group had agreed", worker=first)
        if isinstance(error, DistributedError):
            group.fail(error)
        return error.with_traceback(None)

    async def _vote(self, drive: ParticipantDrive, number: int, seconds: float) -> None:
        """Ask rank 0 for the decision, once it is taken."""
        group, first = self._group, self.names[0]
        event: TransactionEvent = PeerLost()
        try:
            decision: Decision = await group.ask(first, Vote(group.key, group.name, number), seconds)
            event = OutcomeReply(first, Outcome(decision.outcome))
            if decision.error is not None and self.error is None:
                self.error = from_wire(decision.error, first)
        except Exception as failure:  # the vote may have arrived: the outcome is asked for
            logger.debug("no answer of %s to a vote: %s: %s", first, type(failure).__name__, failure)
        drive.handle(event)

    def failed(self, error: DistributedError) -> None:
        """The group has failed: this member votes no more, so undecided agreements abort.

        Args:
            error: the reason.
        """
        self.error = self.error or error
        if isinstance(self._drive, CoordinatorDrive):
            self._drive.handle(Failed())
        self.changed()

    def waits(self) -> Iterator[WaitEntry]:
        """The decision that is under way, for a report of what waits."""
        drive, group = self._drive, self._group
        if drive is None or drive.state not in _OPEN:
            return
        core, name = group.core, agreement_name(group.key, group.name, self._number)
        missing = drive.machine.missing(core.now()) if isinstance(drive, CoordinatorDrive) else ()
        edges = [WaitEdge(peer, f"{name}: the vote of {peer}", message="vote") for peer in missing if peer != core.name]
        yield OpenWork(name, group.principal, (), None, edges, "commit")
        if self._changed is not None:
            yield Awaited(self._changed, WaitEdge(core.name, name), group.principal, needs_row=False)

    # ---------------------------------------------------------------- as the client of a transaction

    def apply(self) -> AfterCommit:
        """Apply this member's work."""
        if self._apply is not None:
            self._apply()
        return None

    def apply_failed(self, error: BaseException) -> None:
        """Note that this member's work is lost; a participant drops it, for either decision."""
        self.error, self._has_raised = error, True
        if isinstance(self._drive, ParticipantDrive):
            self._drive.handle(OwnerClosed())

    def ask(self, peer: str) -> Coroutine[Any, Any, str]:
        """Ask a member for the outcome."""
        group = self._group
        question = group.ask(peer, GroupOutcome(group.key, self._number), group.core.limits.silence)
        return group.core.unless_silent(question, peer, "COLLECTIVE", group.principal)

    def witnesses(self) -> Sequence[str]:
        """All other members that do not decide."""
        return [name for name in self.names[1:] if name != self._group.core.name]

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """See `WorkerCore.spawn`."""
        return self._group.core.spawn(coroutine, name)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """See `rpc.timers.call_at`."""
        core = self._group.core
        return call_at(core.endpoint.context, core.loop, when, callback)

    def changed(self) -> None:
        """Wake the tasks that wait for a change."""
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    # ---------------------------------------------------------------- requests of other members

    async def vote(self, peer: str, number: int) -> Decision:
        """Another member is prepared, and waits for the decision of this one. Cancelling changes nothing.

        Args:
            peer: name of the member.
            number: of the decision.

        Returns:
            The outcome, and the error for the wire where it is not to commit.

        Raises:
            ProtocolError: this member decides nothing.
        """
        if self._group.names[0] != self._group.core.name:
            raise ProtocolError(f"{peer} votes where nothing is decided", code="collective")
        while number > self._number and self.error is None:
            await self._change(None)
        drive = self._drive
        if number == self._number and drive is not None:
            if drive.state is TransactionState.ACTIVE:
                drive.handle(Prepared(peer=peer))
            self._waiting += 1
            try:
                while drive.state in _OPEN:
                    await self._change(None)
            finally:
                self._waiting -= 1
                self.changed()
        outcome, error = self.outcome(number), self.error
        is_told = error is not None and outcome is not Outcome.COMMITTED
        return Decision(outcome.value, to_wire(error, self._group.core.name, "commit", "") if is_told else None)  # type: ignore[arg-type]

    def outcome(self, number: int) -> Outcome:
        """This member's answer to a question about a decision.

        Args:
            number: of the decision.
        """
        if number < self._number:
            return Outcome.COMMITTED
        if number == self._number and self._drive is not None:
            return self._drive.machine.outcome
        return Outcome.UNDECIDED if self.error is None else Outcome.ABORTED

    async def _change(self, when: float | None) -> None:
        """Wait until something has changed, at most until a time of the loop."""
        core = self._group.core
        if self._changed is None:
            self._changed = core.loop.create_future()
        if when is None:
            await asyncio.wait([self._changed])
        else:
            await wait_for(core.endpoint.context, self._changed, max(0.0, when - core.now()))
