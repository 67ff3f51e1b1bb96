"""GroupAgreements: decisions that a group takes together: every member applies what it has prepared, or none does.

Note [Agreement]
    Rank 0 decides (see `aiograd.transaction`). Each other member that is prepared asks it for the decision; that is its vote, and the answer comes
    once all have voted and rank 0 has applied its own part. A member that loses contact meanwhile asks rank 0 again, then the others, for as long
    as anybody may still tell; only if nobody can is the outcome unknown to it.

    Members agree on one thing after the other, and none goes on before it knows the last decision. So nobody needs to remember more than that, and
    whoever has come further knows that the earlier ones were to commit. It is remembered when the group has failed as well: somebody may ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from aiograd.coordination.asking import ask_outcome
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.messages.form import WireMessage
from aiograd.distributed.messages.groups import Decision, GroupOutcome, Vote
from aiograd.distributed.rpc.timers import wait_for
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import CollectiveError, CommitUnknown, DeadlineError, DistributedError, ProtocolError
from aiograd.running.log_fields import structured_logger
from aiograd.transaction import (
    Applied,
    Apply,
    ApplyFailed,
    Ask,
    Coordinator,
    Failed,
    Outcome,
    OutcomeReply,
    OwnerClosed,
    Participant,
    ParticipantsJoined,
    PeerLost,
    Prepared,
    Tick,
    TransactionEvent,
    TransactionState,
)

logger = structured_logger("aiograd.distributed")

#: how long a member that has lost contact asks for the decision, as a multiple of the time after which contact counts as lost
PATIENCE = 4

#: states in which nothing is decided yet
_OPEN = (TransactionState.ACTIVE, TransactionState.PREPARED, TransactionState.UNCERTAIN)


class AgreeingGroup(Protocol):
    """The part of a `Group` that its decisions use."""

    name: str
    names: tuple[str, ...]
    key: bytes

    @property
    def core(self) -> WorkerCore:
        """The worker."""

    def ask(self, peer: str, message: WireMessage, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another member."""

    def fail(self, error: DistributedError, tell: bool = True) -> None:
        """See `Group.fail`."""


class GroupAgreements:
    """The decisions of a group, on one member.

    Args:
        group: the group.
    """

    def __init__(self, group: AgreeingGroup) -> None:
        self._group = group
        self.names = group.names
        #: the number of decisions that this member has voted on, and the last of them
        self._number = 0
        self._transaction: Coordinator | Participant | None = None
        self._apply: Callable[[], None] | None = None
        #: the error of the group, or of this member's part in the last decision
        self.error: BaseException | None = None
        #: this member could not apply its part
        self._has_raised = False
        self._changed: asyncio.Future[None] | None = None
        #: votes that wait for the decision
        self._waiting = 0

    async def agree(self, apply: Callable[[], None], seconds: float) -> None:
        """See `Group.commit`."""
        if self.error is not None:
            raise self.error.with_traceback(None)
        group, core = self._group, self._group.core
        due = core.now() + seconds
        decides = core.name == group.names[0]
        others = tuple(name for name in group.names if name != core.name)
        self._number += 1
        self._apply = apply
        asking: asyncio.Task[None] | None = None
        if decides:
            self._transaction = Coordinator(core.name, pause=core.limits.heartbeat)
            self._handle(ParticipantsJoined(others))
            self._handle(Prepared(peer=core.name))
        else:
            participant = self._transaction = Participant(group.names[0], lease=PATIENCE * core.limits.silence, pause=core.limits.heartbeat)
            participant.others = others[1:]
            self._handle(Prepared(due))
            asking = core.loop.create_task(self._vote(self._number, seconds), name=f"aiograd:{core.name}:vote")
        try:
            await self._decided(due)
            while self._waiting:  # answers to votes are on their way before anything else happens here
                await self._change(due)
        finally:
            self._apply = None
            if asking is not None and not asking.done():
                asking.cancel()

    async def _decided(self, due: float) -> None:
        """Wait for the decision."""
        group, core, transaction = self._group, self._group.core, self._transaction
        cancelled: asyncio.CancelledError | None = None
        while transaction is not None and transaction.state in _OPEN:
            decides = isinstance(transaction, Coordinator)
            when = due if decides else transaction.due
            try:
                await self._change(when)
            except asyncio.CancelledError as error:
                if decides and transaction.state in _OPEN:
                    group.fail(CollectiveError(f"group {group.name!r}: {core.name} was cancelled before the group had agreed", worker=core.name))
                    raise
                cancelled = error  # it has voted, and may not give up by itself any more
                continue
            if transaction.state in _OPEN and when is not None and core.now() >= when:
                if decides:
                    missing = ", ".join(transaction.missing(core.now())) if isinstance(transaction, Coordinator) else ""
                    group.fail(DeadlineError(f"group {group.name!r}: {missing} did not get ready to commit in time"))
                else:
                    self._handle(Tick())
        if transaction is not None and transaction.state is not TransactionState.COMMITTED:
            raise self._failure(transaction)
        if cancelled is not None:
            raise cancelled

    def _failure(self, transaction: Coordinator | Participant) -> BaseException:
        group = self._group
        if transaction.state is TransactionState.IN_DOUBT and not self._has_raised:
            text = f"group {group.name!r}: contact was lost when the group was about to commit, and nobody can tell if it has"
            unknown = CommitUnknown(text, workers=(group.names[0],))
            group.fail(CollectiveError(text, worker=group.core.name))
            return unknown
        first = group.names[0]
        error = self.error or CollectiveError(f"group {group.name!r}: {first} has given up before the group had agreed", worker=first)
        if isinstance(error, DistributedError):
            group.fail(error)
        return error.with_traceback(None)

    # ---------------------------------------------------------------- the transaction

    def _handle(self, event: TransactionEvent) -> None:
        transaction, core = self._transaction, self._group.core
        if transaction is None:
            return
        for command in transaction.handle(event, core.now()):
            match command:
                case Apply():
                    self._perform()
                case Ask(peers):
                    for peer in peers:
                        core.spawn(self._ask(peer, self._number), "outcome")
                case _:
                    pass  # what was prepared is dropped with an error; others are told in answers to their votes
        self._wake()

    def _perform(self) -> None:
        """Apply this member's part."""
        try:
            if self._apply is not None:
                self._apply()
        except BaseException as error:
            self.error, self._has_raised = error, True
            self._handle(ApplyFailed())
            if isinstance(self._transaction, Participant):
                self._handle(OwnerClosed())
        else:
            self._handle(Applied())

    async def _vote(self, number: int, seconds: float) -> None:
        """Ask rank 0 for the decision, once it is taken."""
        group = self._group
        event: TransactionEvent = PeerLost()
        try:
            decision: Decision = await group.ask(group.names[0], Vote(group.key, group.name, number), seconds)
            event = OutcomeReply(group.names[0], Outcome(decision.outcome))
            if decision.error is not None and self.error is None:
                self.error = from_wire(decision.error, group.names[0])
        except Exception as error:  # the vote may have arrived: the outcome is asked for
            logger.debug("no answer of %s to a vote: %s: %s", group.names[0], type(error).__name__, error)
        if number == self._number:
            self._handle(event)

    async def _ask(self, peer: str, number: int) -> None:
        """Ask a member for the outcome."""
        group = self._group
        event = await ask_outcome(peer, group.ask(peer, GroupOutcome(group.key, number), group.core.limits.silence))
        if number == self._number:
            self._handle(event)

    def failed(self, error: DistributedError) -> None:
        """Take note that the group has failed: nobody here votes any more, and what is not decided here is not.

        Args:
            error: the reason.
        """
        self.error = self.error or error
        if isinstance(self._transaction, Coordinator):
            self._handle(Failed())
        self._wake()

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
        transaction = self._transaction
        if number == self._number and transaction is not None:
            if transaction.state is TransactionState.ACTIVE:
                self._handle(Prepared(peer=peer))
            self._waiting += 1
            try:
                while transaction.state in _OPEN:
                    await self._change(None)
            finally:
                self._waiting -= 1
                self._wake()
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
        if number == self._number and self._transaction is not None:
            return self._transaction.outcome
        return Outcome.UNDECIDED if self.error is None else Outcome.ABORTED

    # ---------------------------------------------------------------- waiting

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None and not changed.done():
            changed.set_result(None)

    async def _change(self, when: float | None) -> None:
        """Wait until something has changed, at most until a time of the loop."""
        core = self._group.core
        if self._changed is None:
            self._changed = core.loop.create_future()
        if when is None:
            await asyncio.wait([self._changed])
        else:
            await wait_for(core.endpoint.context, self._changed, max(0.0, when - core.now()))
