"""TransactionClient: the work of one transaction in one process, and the messages about it, as a `TransactionDrive` uses them."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aiograd.errors import AiogradError, Overloaded, RemoteError, WorkerLostError
from aiograd.transaction import Outcome, TransactionEvent, Trouble

#: awaited after the commit, such as hooks; None: nothing follows
AfterCommit = Callable[[], Coroutine[Any, Any, None]] | None


@dataclass(frozen=True)
class StepWording:
    """The words of errors about steps.

    Args:
        subject: the owner of the steps.
        failure: class of errors about steps that cannot be taken.
        in_doubt: advice about a step that is in doubt.
        lost: advice about a step that was committed and is lost here.
        without: advice where one of several equal members is lost; ``{worker!r}`` is the name of its worker.
        unconfirmed: advice where a commit is not confirmed.
    """

    subject: str
    failure: type[AiogradError]
    in_doubt: str
    lost: str
    without: str
    unconfirmed: str


class TransactionClient:
    """The work of one transaction in one process, and the messages about it.

    A subclass overrides the methods of its side: a participant answers questions with `ask` and needs timers, a coordinator tells with `tell`.
    """

    __slots__ = ()

    # ---------------------------------------------------------------- the work

    def apply(self) -> AfterCommit:
        """Make everything that was prepared visible, in one moment; where this raises, nothing has changed.

        Returns:
            A function, called and awaited after the commit, or None.
        """
        return None

    def apply_failed(self, error: BaseException) -> None:
        """`apply` has raised, and the transaction has taken note of it. By default the error is raised."""
        raise error

    def applied(self) -> None:
        """The transaction is committed here."""

    def drop(self, event: TransactionEvent) -> None:
        """Release everything that was done or prepared.

        Args:
            event: the event that has ended the transaction.
        """

    def mark_in_doubt(self) -> None:
        """The work is about to be dropped, and may be committed elsewhere."""

    def clear_doubt(self) -> None:
        """The transaction was aborted everywhere."""

    def changed(self) -> None:
        """The transaction has handled an event."""

    # ---------------------------------------------------------------- of a participant

    def ask(self, peer: str) -> Awaitable[str]:
        """Ask a peer for the outcome.

        Args:
            peer: its name.

        Returns:
            To be awaited: the value of an `Outcome`.
        """
        raise NotImplementedError

    def witnesses(self) -> Sequence[str]:
        """The names of the peers that may know the outcome, besides the coordinator."""
        return ()

    def spawn(self, coroutine: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run a coroutine apart from any request, for as long as the worker is open."""
        raise NotImplementedError

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        """Call a function at a time of the loop, in a context that belongs to no request."""
        raise NotImplementedError

    # ---------------------------------------------------------------- of a coordinator

    def decided(self, peers: tuple[str, ...], outcome: Outcome) -> None:
        """The transaction is decided, and these participants have to be told of it, with `CoordinatorDrive.tell`.

        Args:
            peers: their names.
            outcome: the decision.
        """

    async def tell(self, peer: str, outcome: Outcome) -> None:
        """Tell a participant the outcome, and wait until it acknowledges that.

        Args:
            peer: its name.
            outcome: the decision.

        Raises:
            The reason why it does not. An error with ``committed`` True comes from after the commit, and acknowledges it.
        """
        raise NotImplementedError

    def silence_left(self, peer: str) -> float:
        """Seconds in which a participant may still be heard, before it is lost; 0: it is. See Note [Silence is counted once] in `silence`."""
        return math.inf

    async def spread(self, peers: Sequence[str], outcome: Outcome) -> Mapping[str, BaseException | None]:
        """Tell many participants by a tree of them; see Note [A tree of receivers] in `aiograd.transaction.tree`.

        Args:
            peers: their names.
            outcome: the decision.

        Returns:
            None or an error, by name of each participant that has answered.
        """
        return {}

    def trouble(self, error: BaseException) -> Trouble:
        """The kind of an error of `tell`, which decides if the participant is told again."""
        return trouble_of(error)


def trouble_of(error: BaseException) -> Trouble:
    """The kind of an error with which a participant, or the connection to it, has answered."""
    if isinstance(error, WorkerLostError):
        return Trouble.REFUSED if error.is_gone else Trouble.LOST
    is_short = error.type_name.endswith("MemoryError") if isinstance(error, RemoteError) else isinstance(error, Overloaded | MemoryError)
    return Trouble.BUSY if is_short else Trouble.REFUSED
