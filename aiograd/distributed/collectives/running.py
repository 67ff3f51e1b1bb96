"""RunningOperations: the operations of a group that are under way on one rank: sending and receiving their messages.

Note [Begun when called]
    An operation gets its number, and its first messages are sent, when the method is called, not when its result is awaited: so operations that
    are handed to `asyncio.gather` begin in the order of the calls, and an operation with a task that is cancelled before it runs does not make the
    others wait.

Note [One request for two messages]
    Where two ranks exchange one message each (`CollectiveExchange.is_symmetric`) the lower one asks the higher one, and the answer is the other
    message.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from aiograd.coordination.device_copies import on_host
from aiograd.coordination.message_form import WireMessage
from aiograd.distributed.collectives.exchange import CollectiveExchange, Message
from aiograd.distributed.collectives.operation import Operation
from aiograd.distributed.collectives.ring import new_exchange
from aiograd.distributed.messages.groups import GroupPiece, PieceContent
from aiograd.distributed.rpc.tensor_table import WireTensor
from aiograd.distributed.rpc.timers import call_at
from aiograd.distributed.wait_tables import Awaited, OpenWork, WaitEdge, WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import CollectiveError, DeadlineError, DistributedError, ProtocolError, WorkerLostError
from aiograd.running.types import Array

#: requests with pieces that are under way to one rank at a time
WINDOW = 4


def operation_name(key: bytes, group: str, number: int) -> str:
    """A name of an operation of a group for reports, equal on all members."""
    return f"operation {number} of group {group:.24} ({key.hex()[:8]})"


class OperatingGroup(Protocol):
    """The part of a `Group` that its operations use."""

    name: str
    names: tuple[str, ...]
    rank: int
    size: int
    key: bytes
    error: DistributedError | None
    principal: str

    @property
    def core(self) -> WorkerCore:
        """The worker."""

    def ask(self, peer: str, message: WireMessage, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another member."""

    def fault(self, number: int) -> DistributedError | None:
        """See `Group.fault`."""

    def fail(self, error: DistributedError, tell: bool = True) -> None:
        """See `Group.fail`."""


class RunningOperation:
    """An operation that is under way on this rank."""

    __slots__ = ("number", "exchange", "finished", "queues", "active", "senders", "answers", "due", "began", "timer")

    def __init__(self, number: int, exchange: CollectiveExchange, due: float, began: float, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.exchange = exchange
        self.due = due
        self.began = began
        #: done when it is complete, or the group has failed
        self.finished: asyncio.Future[None] = loop.create_future()
        #: makes the group fail when the operation is late
        self.timer: asyncio.TimerHandle | None = None
        #: by rank the messages that wait, and the number of tasks that send them
        self.queues: dict[int, deque[Message]] = {}
        self.active: dict[int, int] = {}
        self.senders: set[asyncio.Task[None]] = set()
        #: messages that are answers to requests of lower ranks
        self.answers: dict[int, Message] = {}

    @property
    def is_complete(self) -> bool:
        """True if everything has arrived, and the others have taken everything that this rank sends."""
        return not self.senders and self.exchange.is_done

    def finish(self) -> None:
        """Nothing more is to come."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.finished.done():
            self.finished.set_result(None)


class RunningOperations:
    """The operations of a group on one rank.

    Args:
        group: the group.

    Attributes:
        next: the number of the next operation.
        running: the operations that are under way, by number.
        labels: how many labels have been given out, see `new_label`.
        here: this rank, for messages.
    """

    def __init__(self, group: OperatingGroup) -> None:
        self._group = group
        self._names = group.names
        self.next: int = 0
        #: numbers of operations that have not begun
        self._unstarted: set[int] = set()
        self.running: dict[int, RunningOperation] = {}
        self.labels: int = 0
        #: the reducer with a pass under way, whose commit no other pass may meet
        self.reducing: Any = None
        #: the label of the operations that begin
        self._label = 0
        #: set and replaced whenever an operation begins, or the group is over
        self._changed = asyncio.Event()
        self.here: str = f"{group.names[group.rank]} (rank {group.rank})"

    def __str__(self) -> str:
        return ", ".join(str(running.exchange.operation) for running in self.running.values())

    def new_label(self) -> int:
        """A label for the operations of one model: the number of labels before it, the same on all members that make their models in one order."""
        self.labels += 1
        return self.labels - 1

    @contextlib.contextmanager
    def labelled(self, label: int) -> Iterator[None]:
        """A block without awaits: operations that begin in it belong together only with operations of the same label on other members.

        Args:
            label: see `new_label`.
        """
        before, self._label = self._label, label
        try:
            yield
        finally:
            self._label = before

    def begin(self, operation: Operation, data: list[Any], timeout: float | None, single: bool = False) -> Coroutine[Any, Any, Any]:
        """Begin an operation. See Note [Begun when called].

        Args:
            operation: as this rank carries it out.
            data: its arrays, of the host or of a device.
            timeout: seconds; None: `Limits.default_deadline`.
            single: the result is the one array, None where there is none, not a list.

        Returns:
            To be awaited: the result. Cancelling makes the group fail.
        """
        seconds = self._group.core.time_for(timeout)
        number = self.next
        operation = operation._replace(label=self._label) if self._label else operation
        if self._group.fault(number) is None:
            self.next += 1
            self._unstarted.add(number)
            due = self._group.core.now() + seconds
            if all(array.__class__ is np.ndarray for array in data):
                return self._finish(self._start(number, operation, data, due, seconds), single)
            return self._start_later(number, operation, data, due, seconds, single)
        return self._refuse(number)

    async def _refuse(self, number: int) -> Any:
        fault = self._group.fault(number)
        if fault is not None:
            raise fault

    async def _start_later(self, number: int, operation: Operation, data: list[Any], due: float, seconds: float, single: bool) -> Any:
        """As `begin`, where arrays are on a device."""
        try:
            hosted = [array if array.__class__ is np.ndarray else await on_host(array) for array in data]
        except BaseException as error:
            self._group.fail(CollectiveError(f"group {self._group.name!r}: {operation} (operation {number}) could not begin on {self.here}: {error}"))
            raise
        if self._group.error is not None:
            raise self._group.error.with_traceback(None)
        return await self._finish(self._start(number, operation, [np.ascontiguousarray(array) for array in hosted], due, seconds), single)

    def _start(self, number: int, operation: Operation, arrays: list[Array], due: float, seconds: float) -> RunningOperation:
        core = self._group.core
        largest = min(core.limits.message_bytes, core.limits.bytes_per_peer)
        exchange = new_exchange(operation, self._group.rank, self._group.size, arrays, largest)
        running = self.running[number] = RunningOperation(number, exchange, due, due - seconds, core.loop)
        running.timer = call_at(core.endpoint.context, core.loop, due, self._late, running, seconds)
        messages = exchange.begin()
        if exchange.is_symmetric:
            running.answers = {message.to: message for message in messages if message.to < self._group.rank}
            messages = [message for message in messages if message.to > self._group.rank]
        self._post(running, messages)
        self._unstarted.discard(number)
        self.wake()
        self._advance(running)
        return running

    def _late(self, running: RunningOperation, seconds: float) -> None:
        self._group.fail(DeadlineError(f"{self._describe(running)}: not complete after {seconds:g} s; {self._describe_missing(running)}"))

    async def _finish(self, running: RunningOperation, single: bool) -> Any:
        """Wait for the end of an operation."""
        try:
            await running.finished
        except asyncio.CancelledError:
            self._group.fail(CollectiveError(f"{self._describe(running)} was cancelled on {self.here}"))
            raise
        if self._group.error is not None and not running.is_complete:
            raise self._group.error.with_traceback(None)
        results = running.exchange.result()
        if single:
            return results[0] if results else None  # a barrier has no arrays
        return results

    def _post(self, running: RunningOperation, messages: Sequence[Message]) -> None:
        """Send messages, as many to each rank at a time as `WINDOW`."""
        for message in messages:
            running.queues.setdefault(message.to, deque()).append(message)
        core = self._group.core
        for rank in {message.to: None for message in messages}:
            while running.active.get(rank, 0) < min(WINDOW, len(running.queues[rank])):
                running.active[rank] = running.active.get(rank, 0) + 1
                task = core.loop.create_task(self._send(running, rank), name=f"aiograd:{core.name}:collective")
                running.senders.add(task)
                task.add_done_callback(functools.partial(self._sent, running))

    def _sent(self, running: RunningOperation, task: asyncio.Task[None]) -> None:
        running.senders.discard(task)
        self._advance(running)

    async def _send(self, running: RunningOperation, rank: int) -> None:
        """Send what waits for a rank, one piece after the other."""
        queue = running.queues[rank]
        now = self._group.core.now
        try:
            while queue:
                message = queue.popleft()
                piece = GroupPiece(self._group.key, self._group.name, running.number, _content(running, message))
                left = max(1e-3, running.due - now())
                answer: PieceContent | None = await self._group.ask(self._names[rank], piece, left)
                if answer is not None:
                    self._receive(running, rank, answer)
        except DistributedError as error:
            if self._group.error is None:
                self._group.fail(self._explained(error, running, rank))
        finally:
            running.active[rank] -= 1

    def _explained(self, error: DistributedError, running: RunningOperation, rank: int) -> DistributedError:
        """The error of a request, as one of the operation."""
        what = self._describe(running)
        if isinstance(error, DeadlineError):
            return DeadlineError(f"{what}: {self._describe_missing(running)}")
        if isinstance(error, WorkerLostError):
            return WorkerLostError(f"{what}: {error}", worker=error.worker, stage=str(running.exchange.operation.kind), is_gone=error.is_gone)
        if isinstance(error, CollectiveError):
            return CollectiveError(f"{what}: {error}", worker=error.worker)
        return CollectiveError(f"{what}: {self._names[rank]} (rank {rank}): {error}", worker=self._names[rank])

    def _receive(self, running: RunningOperation, rank: int, content: PieceContent) -> None:
        """A message of a rank for an operation that is under way."""
        mine = running.exchange.operation
        other = mine if content.operation == mine.to_wire() else Operation.parse(content.operation)
        if mine.mismatch(other):
            error = CollectiveError(
                f"group {self._group.name!r}: operation {running.number} is {other} on {self._names[rank]} (rank {rank}) and {mine} on "
                f"{self.here}; every member has to call the same operations in the same order, with the same shapes "
                f"and dtypes{_other_model(mine, other)}"
            )
            self._group.fail(error)
            raise error
        arrays = [array.array for array in content.arrays]
        self._post(running, running.exchange.receive(rank, other, content.round, content.part, content.piece, arrays))
        self._advance(running)

    def _advance(self, running: RunningOperation) -> None:
        """End an operation once everything has arrived, and every other rank has this rank's messages."""
        if running.is_complete and not running.finished.done():
            self.running.pop(running.number, None)
            running.finish()

    def end(self) -> None:
        """The group is over: nothing more is sent or awaited."""
        running, self.running = self.running, {}
        for each in running.values():
            each.finish()
            for task in each.senders:
                if task is not asyncio.current_task():
                    task.cancel()
        self.wake()

    def wake(self) -> None:
        """Let messages that wait for their operation see how things are now."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def waits(self) -> Iterator[WaitEntry]:
        """The operations that are under way, for a report of what waits."""
        group = self._group
        for running in self.running.values():
            operation = running.exchange.operation
            name = operation_name(group.key, group.name, running.number)
            owed = [(group.names[rank], f"a message of {group.names[rank]}") for rank in running.exchange.awaited]
            edges = [WaitEdge(peer, f"{name}: {message}", message=message) for peer, message in owed]
            yield OpenWork(name, group.principal, (), running.began, edges, str(operation))
            yield Awaited(running.finished, WaitEdge(group.core.name, name), group.principal, needs_row=False)

    # ---------------------------------------------------------------- requests of other members

    async def piece(self, rank: int, number: int, content: PieceContent) -> PieceContent | None:
        """A message of another rank; waits until the operation has begun here.

        Args:
            rank: of the sender.
            number: of the operation.
            content: the message.

        Returns:
            The message to that rank that is the answer, or None.

        Raises:
            ProtocolError: a message of an operation that is over.

        Cancelling changes nothing.
        """
        while number >= self.next or number in self._unstarted:
            fault = self._group.fault(number)
            if fault is not None:
                raise fault
            await self._changed.wait()
        if self._group.error is not None:
            raise self._group.error.with_traceback(None)
        running = self.running.get(number)
        if running is None:
            raise ProtocolError(f"{self._names[rank]} sent a message of operation {number}, which is over", code="collective")
        self._receive(running, rank, content)
        answer = running.answers.pop(rank, None)
        return None if answer is None else _content(running, answer)

    # ---------------------------------------------------------------- descriptions

    def _describe(self, running: RunningOperation) -> str:
        return f"group {self._group.name!r}: {running.exchange.operation} (operation {running.number})"

    def _describe_missing(self, running: RunningOperation) -> str:
        missing = [f"{self._names[rank]} (rank {rank})" for rank in running.exchange.awaited]
        return f"nothing more has come from {', '.join(missing)}" if missing else "not every member has taken what was sent to it"


def _other_model(mine: Operation, other: Operation) -> str:
    """The end of the text of a mismatch, where operations of two models have met."""
    if mine.label == other.label:
        return ""
    return (
        f". They belong to model {other.label} there and to model {mine.label} here (DistributedDataParallels of the group, counted from 0 in the "
        "order in which they were made): make models, and begin passes, in the same order on every member, or give each model a group of its own"
    )


def _content(running: RunningOperation, message: Message) -> PieceContent:
    """The wire form of a message of an operation: the shapes of a broadcast may have come since the last one."""
    arrays = [WireTensor(array) for array in message.arrays]
    return PieceContent(running.exchange.operation.to_wire(), message.round, message.part, message.piece, arrays)
