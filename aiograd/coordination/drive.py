"""TransactionDrive: carries out the commands of a transaction, and turns time, answers and acknowledgements into its events.

Note [A transaction and its client]
    A machine of `aiograd.transaction` decides, its drive carries out the commands, and a `TransactionClient` knows the work and the messages. The
    drive of a participant has a timer, which reports the time that the machine is due, and carries out rounds of questions. The drive of a
    coordinator tells participants the outcome until each has acknowledged it. A client owns its drive, which refers to it weakly: a client is
    free at once when its transaction is over, and not when the garbage collector runs.
"""

from __future__ import annotations

import asyncio
import math
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from aiograd.coordination.asking import ask_outcome
from aiograd.coordination.client import AfterCommit, TransactionClient
from aiograd.coordination.silence import Untold, silent, stop
from aiograd.transaction import (
    Acknowledged,
    Applied,
    Apply,
    ApplyFailed,
    Ask,
    ClearDoubt,
    Coordinator,
    Drop,
    MarkInDoubt,
    Outcome,
    Participant,
    PeerLost,
    Settle,
    Tell,
    TellFailed,
    Tick,
    TransactionEvent,
    TransactionState,
)
from aiograd.transaction.tree import are_many

M = TypeVar("M", bound=Coordinator | Participant)


class TransactionDrive(Generic[M]):
    """Drives one machine for its client. See Note [A transaction and its client].

    Args:
        machine: the transaction.
        client: its work and its messages.
    """

    __slots__ = ("machine", "_client_ref", "_loop")

    def __init__(self, machine: M, client: TransactionClient) -> None:
        self.machine: M = machine
        self._client_ref = weakref.ref(client)
        self._loop = asyncio.get_running_loop()

    @property
    def client(self) -> TransactionClient:
        """The client.

        Raises:
            ReferenceError: it is gone.
        """
        client = self._client_ref()
        if client is None:
            raise ReferenceError(f"{type(self).__name__} was used after its client was gone")
        return client

    @property
    def state(self) -> TransactionState:
        """The state of the transaction here."""
        return self.machine.state

    def handle(self, event: TransactionEvent) -> AfterCommit:
        """Give the machine an event, and carry out its commands.

        Args:
            event: the event.

        Returns:
            A function, called and awaited after a commit that the event has led to, or None.

        Raises:
            TransactionError: the event cannot happen now. The error of a commit that failed; nothing has changed then.
        """
        after_commit: AfterCommit = None
        client = self.client
        for command in self.machine.handle(event, self._loop.time()):
            match command:
                case Apply():
                    after_commit = self._apply()
                case Drop():
                    client.drop(event)
                case MarkInDoubt():
                    client.mark_in_doubt()
                case ClearDoubt():
                    client.clear_doubt()
                case Ask(peers):
                    self._ask(peers)
                case Tell(peers, outcome):
                    client.decided(peers, outcome)
        client.changed()
        return after_commit

    def _apply(self) -> AfterCommit:
        client = self.client
        try:
            after_commit = client.apply()
        except BaseException as error:
            self.handle(ApplyFailed())
            client.apply_failed(error)
            return None
        self.handle(Applied())
        client.applied()
        return after_commit

    def _ask(self, peers: tuple[str, ...]) -> None:
        """A coordinator's question is for votes, which its client collects."""


class ParticipantDrive(TransactionDrive[Participant]):
    """Drives a participant: its timer, and its rounds of questions.

    Args:
        machine, client: as for `TransactionDrive`.
    """

    __slots__ = ("timer", "_timer_at")

    def __init__(self, machine: Participant, client: TransactionClient) -> None:
        super().__init__(machine, client)
        #: reports that the machine is due
        self.timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None

    def handle(self, event: TransactionEvent) -> AfterCommit:
        """See `TransactionDrive.handle`."""
        if isinstance(event, (Tick, PeerLost)):  # a union would be made anew in each call
            self.machine.others = tuple(self.client.witnesses())
        try:
            return super().handle(event)
        finally:
            self.arm()

    def arm(self) -> None:
        """Set the timer to the time that the machine is due."""
        due = self.machine.due
        when = None if due is None or due == math.inf else due
        if when == self._timer_at:
            return
        self.disarm()
        if when is not None:
            self._timer_at = when
            self.timer = self.client.call_at(when, self._tick)

    def disarm(self) -> None:
        """Stop the timer, until the next event."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = self._timer_at = None

    def _tick(self) -> None:
        self.timer = self._timer_at = None
        if self._client_ref() is not None:
            self.handle(Tick())

    def _ask(self, peers: tuple[str, ...]) -> None:
        client = self.client
        for peer in peers:
            client.spawn(self._question(client, peer), "outcome")

    async def _question(self, client: TransactionClient, peer: str) -> None:
        after_commit = self.handle(await ask_outcome(peer, client.ask(peer)))
        if after_commit is not None:
            await after_commit()


class CoordinatorDrive(TransactionDrive[Coordinator]):
    """Drives a coordinator: tells participants the outcome until each has acknowledged it.

    Args:
        machine, client: as for `TransactionDrive`.
    """

    __slots__ = ("failures", "untold")

    def __init__(self, machine: Coordinator, client: TransactionClient) -> None:
        super().__init__(machine, client)
        #: the last error of each participant that could not be told, or that failed after its commit
        self.failures: dict[str, BaseException] = {}
        #: the participants that are being told
        self.untold: Untold = Untold()

    async def attempt(self, names: Iterable[str], worker_of: Callable[[str], str], at_least: float) -> dict[str, BaseException]:
        """As `tell`, for as long as participants may be heard; see Note [Silence is counted once] in `silence`.

        Args:
            names: of participants.
            worker_of: returns the name of the worker of one.
            at_least: seconds for a participant that is lost, to be reached again.
        """
        told = frozenset(names) & self.machine.unacknowledged
        if not told:
            return {}
        self.untold.names |= told
        telling = self._loop.create_task(self.tell(told), name="aiograd:tell")
        try:
            await self.untold.wait(self.client.silence_left, among=told, at_least=at_least)
            if self.untold.names.isdisjoint(told):
                return await telling
            for name in self.untold.names & told:
                self.failures.setdefault(name, silent(worker_of(name), self.machine.outcome.value))
        finally:
            await stop(telling)
        return self._failed(told)

    async def tell(self, names: Iterable[str] | None = None) -> dict[str, BaseException]:
        """Tell participants the outcome until each has acknowledged it or need not be told again. Many are told by a tree of them.

        Cancelling stops the telling.

        Args:
            names: of participants; None: all that have not acknowledged it.

        Returns:
            The error of each that has not acknowledged it, or that failed after its commit.
        """
        client = self.client
        chosen = None if names is None else set(names)
        self.machine.handle(Settle(), self._loop.time())
        told = sorted(name for name in self.machine.unacknowledged if chosen is None or name in chosen)
        self.untold.names.update(told)
        try:
            await self._tell_all(client, told)
        finally:
            self.untold.discard(told)
        return self._failed(told)

    async def _tell_all(self, client: TransactionClient, told: list[str]) -> None:
        outcome = self.machine.outcome
        heard = [name for name in told if client.silence_left(name) > 0] if are_many(told) else []  # a lost one would keep its branch waiting
        if are_many(heard):
            for name, error in (await client.spread(heard, outcome)).items():
                if error is None or getattr(error, "committed", False):
                    self._told(name, error)
                else:
                    self.failures[name] = error
        left = [name for name in told if name in self.machine.unacknowledged]
        results = await asyncio.gather(*(self._tell(client, name, outcome) for name in left), return_exceptions=True)
        self.failures |= {name: error for name, error in zip(left, results, strict=True) if error is not None}

    def _failed(self, names: Iterable[str]) -> dict[str, BaseException]:
        return {name: self.failures[name] for name in sorted(names) if name in self.failures}

    async def _tell(self, client: TransactionClient, name: str, outcome: Outcome) -> None:
        while True:
            error: Exception | None = None
            try:
                await client.tell(name, outcome)
            except Exception as failure:
                error = failure
            again = self._told(name, error)
            if again is None:
                return
            await asyncio.sleep(again)

    def _told(self, name: str, error: BaseException | None) -> float | None:
        """Take note of a participant's answer; returns the seconds until it is told again, or None."""
        event: TransactionEvent = Acknowledged(name)
        if error is None:
            self.failures.pop(name, None)
        else:
            self.failures[name] = error
            if not getattr(error, "committed", False):
                event = TellFailed(name, self.client.trouble(error))
        commands: list[Any] = self.machine.handle(event, self._loop.time())
        self.client.changed()
        again = next((command.after for command in commands if isinstance(command, Tell)), None)
        if again is None:
            self.untold.discard((name,))
        return again
