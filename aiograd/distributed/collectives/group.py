"""Group: workers that carry out collectives together.

Note [A group that fails]
    The operations of a group are numbered on each rank in the order in which they begin, and operations of one number belong together. So a rank
    that gives one up, for whatever reason, cannot take part in a later one: the group has failed, on this rank at once and on the others as soon as
    they hear of it, and every operation that is under way or begins later raises the same error. Nothing of it is seen by the caller, since
    results are new arrays. Survivors form a new group: `Group.without`, `Group.with_`.

Note [Begun when called]
    An operation gets its number, and its first messages are sent, when the method is called, not when its result is awaited: so operations that
    are handed to `asyncio.gather` begin in the order of the calls, and one whose task is cancelled before it runs does not make the others wait.

Note [News of a large group]
    Members of a large group (see `ring`) are connected to rank 0 and to their neighbours. So they tell rank 0 that the group has failed or that they
    leave it, and rank 0 tells all others; that it is lost itself everybody notices. Those who leave at about the same time, as all do at the end,
    are told of in one message.

Note [One request for two messages]
    Where two ranks exchange one message each (`CollectiveExchange.is_symmetric`) the lower one asks the higher one, and the answer is the other
    message.
"""

from __future__ import annotations

import asyncio
import functools
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

from aiograd.distributed.autograd.exchange import on_host
from aiograd.distributed.collectives.agreement import GroupAgreements
from aiograd.distributed.collectives.exchange import CollectiveExchange, Message
from aiograd.distributed.collectives.operation import (
    REDUCED_KINDS,
    SENDABLE_KINDS,
    Operation,
    OperationKind,
    check_arrays,
    check_reduction,
    specs_of,
)
from aiograd.distributed.collectives.ring import is_large, new_exchange
from aiograd.distributed.rpc.tensor_table import WireTensor
from aiograd.distributed.rpc.timers import call_at
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DeadlineError, DistributedError, ProtocolError, WorkerLostError
from aiograd.tensors.core import TensorCore
from aiograd.types import Array

#: requests with pieces that are under way to one rank at a time
WINDOW = 4
#: seconds in which rank 0 of a large group gathers who leaves it
GATHERING = 0.02


class GroupOwner(Protocol):
    """The groups of a worker, as a group sees them."""

    @property
    def core(self) -> WorkerCore:
        """The worker."""

    def request(self, peer: str, value: Any, timeout: float, principal: str) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another worker."""

    def forget(self, group: Group) -> None:
        """The group is over."""

    def form(self, names: Sequence[str], name: str, timeout: float | None) -> Coroutine[Any, Any, Group]:
        """See `join_group`."""


class _Running:
    """An operation that is under way on this rank."""

    __slots__ = ("number", "exchange", "finished", "queues", "active", "senders", "answers", "due", "timer")

    def __init__(self, number: int, exchange: CollectiveExchange, due: float, loop: asyncio.AbstractEventLoop) -> None:
        self.number = number
        self.exchange = exchange
        self.due = due
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


class Group:
    """Workers that carry out collectives together; this worker is one of them. Made by `join_group`; use it with ``async with``.

    Every member calls the same operations in the same order. An operation takes numpy arrays or Tensors and returns new numpy arrays, which are the
    same on every rank, to the bit, whatever arrives first: an element of a sum is ``((rank 0 + rank 1) + rank 2) + ...``. Several operations may be
    under way at once; they are told apart by the order in which they began. Arrays must not change until the operation has returned.

    If a member is lost, gives up (an error, a deadline, a cancellation) or calls something else, the group has failed: all operations on all members
    raise, and `without` and `with_` make a new group.

    Args:
        owner: the worker's groups.
        name, names: see below.
        key: names the group in messages; made from `nonces`.
        principal: on whose behalf the members speak.
        nonces: random bytes of each member.

    Attributes:
        name: of the group.
        rank: of this worker: its place in `names`.
        size: the number of members.
        names: of the members, by rank.
    """

    def __init__(self, owner: GroupOwner, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> None:
        self.name = name
        self.names = names
        self.rank = names.index(owner.core.name)
        self.size = len(names)
        self.key = key
        self.principal = principal
        #: of the members by name, from which the key was made
        self.nonces = nonces
        self._owner = owner
        #: number of the next operation, and those that have a number and have not begun
        self._next = 0
        self._unstarted: set[int] = set()
        self._running: dict[int, _Running] = {}
        self._error: DistributedError | None = None
        self._is_closed = False
        #: set and replaced whenever an operation begins, or the group is over
        self._changed = asyncio.Event()
        #: ranks that have left, with the number of the first operation in which they take no part
        self._left: dict[int, int] = {}
        self._told: set[asyncio.Task[None]] = set()
        #: the decisions of the group
        self.agreements = GroupAgreements(self)
        #: those of them of whom the others have yet to be told; see Note [News of a large group]
        self._leavers: dict[int, int] = {}

    def __repr__(self) -> str:
        state = " (failed)" if self._error is not None else " (closed)" if self._is_closed else ""
        return f"<Group {self.name}: rank {self.rank} of {', '.join(self.names)}{state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the group. Operations that are under way here fail; other members fail in the next one.

        Idempotent; cancelling it leaves all the same.
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._owner.forget(self)
        if self._running:
            self.fail(CollectiveError(f"group {self.name!r}: {self.names[self.rank]} has left it during {self._describe_running()}"))
        elif self._error is None:
            self._tell(("leave", self.key, self._next))
        self._wake()
        if self._told:
            await asyncio.wait(self._told)

    # ---------------------------------------------------------------- operations

    def all_reduce(self, arrays: Any, op: str = "sum", *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """Combine arrays over all ranks, element by element.

        Args:
            arrays: a list of arrays, of the same shapes and dtypes on every rank; one array is also taken, and one is returned then.
            op: "sum", "mean" (the sum divided by the number of ranks), "max" or "min". NaN wins over numbers in "max" and "min".
            timeout: seconds; None: `Limits.default_deadline`.

        Returns:
            To be awaited: new arrays, the same on every rank to the bit. Cancelling makes the group fail on every member.

        Raises:
            ArgumentTypeError, ArgumentError: the arrays or `op` cannot be used; the group is as it was. When awaited, CollectiveError: another
            rank does something else or has given up. WorkerLostError: a member is lost. DeadlineError: a member did not come in time.
        """
        reduction = check_reduction("all_reduce", op)
        values = _data_of("all_reduce", arrays, REDUCED_KINDS[reduction])
        return self._begin(Operation(OperationKind.ALL_REDUCE, reduction, 0, specs_of(values)), values, timeout, _is_single(arrays))

    def reduce_scatter(self, array: Any, op: str = "sum", *, timeout: float | None = None) -> Coroutine[Any, Any, Array]:
        """Combine arrays over all ranks, and return this rank's rows of the result.

        The rows (along axis 0) are divided as ``np.array_split`` does: as evenly as possible, the first ranks have one more.

        Args:
            array: of the same shape and dtype on every rank, with at least one dimension.
            op, timeout: as of `all_reduce`.

        Returns:
            To be awaited: a new array. Cancelling makes the group fail on every member.

        Raises:
            As `all_reduce`.
            ArgumentError: an array without rows.
        """
        reduction = check_reduction("reduce_scatter", op)
        values = _data_of("reduce_scatter", [array], REDUCED_KINDS[reduction])
        if len(values[0].shape) == 0:
            raise ArgumentError("reduce_scatter: the array has no rows to divide; expected at least one dimension")
        return self._begin(Operation(OperationKind.REDUCE_SCATTER, reduction, 0, specs_of(values)), values, timeout, True)

    def all_gather(self, array: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, list[Array]]:
        """The arrays of all ranks.

        Args:
            array: of any shape and dtype, which may differ between ranks.
            timeout: as of `all_reduce`.

        Returns:
            To be awaited: new arrays by rank. Cancelling makes the group fail on every member.

        Raises:
            As `all_reduce`.
        """
        values = _data_of("all_gather", [array], SENDABLE_KINDS)
        return self._begin(Operation(OperationKind.ALL_GATHER, specs=specs_of(values)), values, timeout)

    def broadcast(self, arrays: Any = None, root: int = 0, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """The arrays of one rank, on all ranks.

        Args:
            arrays: a list of arrays, or one array. On other ranks than the root None, or arrays of the same shapes and dtypes, whose values are
                not used.
            root: the rank that has the values.
            timeout: as of `all_reduce`.

        Returns:
            To be awaited: new arrays, in a list unless `arrays` is a single array. Cancelling makes the group fail on every member.

        Raises:
            As `all_reduce`.
            ArgumentError: no such root.
            ArgumentTypeError: the root gives no arrays.
        """
        if isinstance(root, bool) or not isinstance(root, int) or not 0 <= root < self.size:
            raise ArgumentError(f"broadcast(root={root!r}): expected a rank from 0 to {self.size - 1}")
        if arrays is None and root == self.rank:
            raise ArgumentTypeError("broadcast: the root has to give the arrays, found None")
        values = [] if arrays is None else _data_of("broadcast", arrays, SENDABLE_KINDS)
        single = arrays is not None and _is_single(arrays)
        return self._begin(Operation(OperationKind.BROADCAST, "", root, specs_of(values)), values, timeout, single)

    def barrier(self, *, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """Wait until every rank has called it. To be awaited; cancelling makes the group fail on every member. Raises as `all_reduce`.

        Args:
            timeout: as of `all_reduce`.

        Returns:
            To be awaited.
        """
        return self._barrier(self._begin(Operation(OperationKind.BARRIER), [], timeout))

    @staticmethod
    async def _barrier(waiting: Coroutine[Any, Any, list[Array]]) -> None:
        await waiting

    async def commit(self, apply: Callable[[], None], *, timeout: float | None = None) -> None:
        """Apply something on every member, or on none.

        Every member calls it once it is ready, and `apply` is called when all are: on rank 0 first, where it may raise, which means that nobody
        applies anything. On other ranks it must not raise.

        Args:
            apply: called without arguments, at most once.
            timeout: as of `all_reduce`.

        Raises:
            As `all_reduce`; nothing was applied anywhere then. CommitUnknown: contact was lost at the moment of the decision, and nothing was
            applied here; `CommitUnknown.workers` names the one that knows. The error of `apply`.

        Cancelling makes the group fail on every member, unless this one has said that it is ready: then the decision is awaited, and the
        cancellation raised after it.
        """
        await self.agreements.agree(apply, self.core.time_for(timeout))

    async def without(self, name: str, *, timeout: float | None = None) -> Group:
        """A new group of all members but one, which all of them have to call; this one is over.

        Args:
            name: of the member that is lost, or is to leave.
            timeout: seconds until all have joined.

        Returns:
            The new group. Cancelled, this group is over all the same.

        Raises:
            ArgumentError: there is no such member. Otherwise as `join_group`.
        """
        if name not in self.names:
            raise ArgumentError(f"group {self.name!r} has no member {name!r}; there are {', '.join(self.names)}")
        return await self._reform([each for each in self.names if each != name], timeout)

    async def with_(self, name: str, *, timeout: float | None = None) -> Group:
        """A new group of all members and one more, whose rank is the last; this one is over.

        All members call it, and the new one calls `join_group` with all names.

        Args:
            name: of the worker that joins.
            timeout: seconds until all have joined.

        Returns:
            The new group. Cancelled, this group is over all the same.

        Raises:
            ArgumentError: it is a member already. Otherwise as `join_group`.
        """
        if name in self.names:
            raise ArgumentError(f"group {self.name!r} has a member {name!r} already")
        return await self._reform([*self.names, name], timeout)

    async def _reform(self, names: list[str], timeout: float | None) -> Group:
        await self.aclose()
        return await self._owner.form(names, self.name, timeout)

    # ---------------------------------------------------------------- carrying out

    def _begin(self, operation: Operation, data: list[Any], timeout: float | None, single: bool = False) -> Coroutine[Any, Any, Any]:
        """Begin an operation; returns what waits for its result. See Note [Begun when called]."""
        seconds = self._owner.core.time_for(timeout)
        number = self._next
        if self._fault(number) is None:
            self._next += 1
            self._unstarted.add(number)
            due = self._owner.core.now() + seconds
            if all(array.__class__ is np.ndarray for array in data):
                return self._finish(self._start(number, operation, data, due, seconds), single)
            return self._start_later(number, operation, data, due, seconds, single)
        return self._refuse(number)

    async def _refuse(self, number: int) -> Any:
        fault = self._fault(number)
        if fault is not None:
            raise fault

    async def _start_later(self, number: int, operation: Operation, data: list[Any], due: float, seconds: float, single: bool) -> Any:
        """As `_begin`, where arrays are on a device."""
        try:
            hosted = [array if array.__class__ is np.ndarray else await on_host(array) for array in data]
        except BaseException as error:
            self.fail(CollectiveError(f"group {self.name!r}: {operation} (operation {number}) could not begin on {self._describe_self()}: {error}"))
            raise
        if self._error is not None:
            raise self._error.with_traceback(None)
        return await self._finish(self._start(number, operation, [np.ascontiguousarray(array) for array in hosted], due, seconds), single)

    def _start(self, number: int, operation: Operation, arrays: list[Array], due: float, seconds: float) -> _Running:
        core = self._owner.core
        exchange = new_exchange(operation, self.rank, self.size, arrays, min(core.limits.message_bytes, core.limits.bytes_per_peer))
        running = self._running[number] = _Running(number, exchange, due, core.loop)
        running.timer = call_at(core.endpoint.context, core.loop, due, self._late, running, seconds)
        messages = exchange.begin()
        if exchange.is_symmetric:
            running.answers = {message.to: message for message in messages if message.to < self.rank}
            messages = [message for message in messages if message.to > self.rank]
        self._post(running, messages)
        self._unstarted.discard(number)
        self._wake()
        self._advance(running)
        return running

    def _late(self, running: _Running, seconds: float) -> None:
        self.fail(DeadlineError(f"{self._describe(running)}: not complete after {seconds:g} s; {self._describe_missing(running)}"))

    async def _finish(self, running: _Running, single: bool) -> Any:
        """Wait for the end of an operation."""
        try:
            await running.finished
        except asyncio.CancelledError:
            self.fail(CollectiveError(f"{self._describe(running)} was cancelled on {self._describe_self()}"))
            raise
        if self._error is not None and not running.is_complete:
            raise self._error.with_traceback(None)
        results = running.exchange.result()
        return results[0] if single else results

    def _fault(self, number: int) -> DistributedError | None:
        """The reason why an operation cannot begin, or None."""
        if self._error is not None:
            return self._error.with_traceback(None)
        if self._is_closed:
            return CollectiveError(f"group {self.name!r} is closed on this worker")
        for rank, first in self._left.items():
            if number >= first:
                return CollectiveError(f"group {self.name!r}: {self.names[rank]} (rank {rank}) has left it", worker=self.names[rank])
        return None

    def _post(self, running: _Running, messages: Sequence[Message]) -> None:
        """Send messages, as many to each rank at a time as `WINDOW`."""
        for message in messages:
            running.queues.setdefault(message.to, deque()).append(message)
        core = self._owner.core
        for rank in {message.to: None for message in messages}:
            while running.active.get(rank, 0) < min(WINDOW, len(running.queues[rank])):
                running.active[rank] = running.active.get(rank, 0) + 1
                task = core.loop.create_task(self._send(running, rank), name=f"aiograd:{core.name}:collective")
                running.senders.add(task)
                task.add_done_callback(functools.partial(self._sent, running))

    def _sent(self, running: _Running, task: asyncio.Task[None]) -> None:
        running.senders.discard(task)
        self._advance(running)

    async def _send(self, running: _Running, rank: int) -> None:
        """Send what waits for a rank, one piece after the other."""
        queue = running.queues[rank]
        operation = running.exchange.operation.to_wire()
        now = self._owner.core.now
        try:
            while queue:
                message = queue.popleft()
                arrays = [WireTensor(array) for array in message.arrays]
                value = ("piece", self.key, self.name, running.number, operation, message.round, message.part, message.piece, arrays)
                left = max(1e-3, running.due - now())
                answer = await self._owner.request(self.names[rank], value, left, self.principal)
                if answer is not None:
                    self._receive(running, rank, answer)
        except DistributedError as error:
            if self._error is None:
                self.fail(self._explained(error, running, rank))
        finally:
            running.active[rank] -= 1

    def _explained(self, error: DistributedError, running: _Running, rank: int) -> DistributedError:
        """The error of a request, as one of the operation."""
        what = self._describe(running)
        if isinstance(error, DeadlineError):
            return DeadlineError(f"{what}: {self._describe_missing(running)}")
        if isinstance(error, WorkerLostError):
            return WorkerLostError(f"{what}: {error}", worker=error.worker, stage=str(running.exchange.operation.kind), is_gone=error.is_gone)
        if isinstance(error, CollectiveError):
            return CollectiveError(f"{what}: {error}", worker=error.worker)
        return CollectiveError(f"{what}: {self.names[rank]} (rank {rank}): {error}", worker=self.names[rank])

    def _receive(self, running: _Running, rank: int, value: Any) -> None:
        """A message of a rank for an operation that is under way."""
        try:
            operation, round, part, piece, arrays = value
            mine = running.exchange.operation
            other = mine if operation == mine.to_wire() else Operation.parse(operation)
            indices = (round, part, piece)
            if other is None or any(index.__class__ is not int for index in indices) or arrays.__class__ is not list:
                raise ValueError
            data = [array.array for array in arrays if isinstance(array, WireTensor)]
            if len(data) != len(arrays):
                raise ValueError
        except (TypeError, ValueError):
            raise ProtocolError(f"{self.names[rank]} sent a malformed message of a collective", code="collective") from None
        if mine.mismatch(other):
            error = CollectiveError(
                f"group {self.name!r}: operation {running.number} is {other} on {self.names[rank]} (rank {rank}) and {mine} on "
                f"{self._describe_self()}; every member has to call the same operations in the same order, with the same shapes "
                "and dtypes"
            )
            self.fail(error)
            raise error
        self._post(running, running.exchange.receive(rank, other, round, part, piece, data))
        self._advance(running)

    def _advance(self, running: _Running) -> None:
        """See whether everything has arrived, and everybody has what this rank sent."""
        if running.is_complete and not running.finished.done():
            self._running.pop(running.number, None)
            running.finish()

    # ---------------------------------------------------------------- requests of other members

    async def piece(self, rank: int, number: int, value: tuple[Any, ...]) -> Any:
        """A message of another rank; waits until the operation has begun here.

        Args:
            rank: of the sender.
            number: of the operation.
            value: the message.

        Returns:
            The message to that rank that is the answer, or None.

        Raises:
            ProtocolError: a message of an operation that is over.

        Cancelling changes nothing.
        """
        while number >= self._next or number in self._unstarted:
            fault = self._fault(number)
            if fault is not None:
                raise fault
            await self._changed.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)
        running = self._running.get(number)
        if running is None:
            raise ProtocolError(f"{self.names[rank]} sent a message of operation {number}, which is over", code="collective")
        self._receive(running, rank, value)
        answer = running.answers.pop(rank, None)
        if answer is None:
            return None
        return running.exchange.operation.to_wire(), answer.round, answer.part, answer.piece, [WireTensor(array) for array in answer.arrays]

    def left(self, rank: int, number: int) -> None:
        """A member has left after operation ``number - 1``.

        Args:
            rank: of the member.
            number: of the first operation in which it takes no part.
        """
        self._left[rank] = number
        if self.passes_on:
            self._leavers[rank] = number
            if len(self._leavers) == 1:
                self._owner.core.spawn(self._announce_leavers(), f"group {self.name}")
        if number < self._next and any(other >= number for other in self._running):
            self.fail(CollectiveError(f"group {self.name!r}: {self.names[rank]} (rank {rank}) has left it", worker=self.names[rank]), tell=False)
        self._wake()

    @property
    def core(self) -> WorkerCore:
        """The worker."""
        return self._owner.core

    def request(self, peer: str, value: Any, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another member.

        Args:
            peer: its name.
            value: the request.
            timeout: seconds.

        Returns:
            To be awaited: the answer. Cancelling it withdraws the request.
        """
        return self._owner.request(peer, value, timeout, self.principal)

    @property
    def passes_on(self) -> bool:
        """True if this rank tells the others what members tell it."""
        return self.rank == 0 and is_large(self.size)

    async def _announce_leavers(self) -> None:
        await asyncio.sleep(GATHERING)
        leavers, self._leavers = self._leavers, {}
        if self._error is None and not self._is_closed:
            self._tell(("left", self.key, [list(each) for each in leavers.items()]))

    def fail(self, error: DistributedError, tell: bool = True) -> None:
        """The group is over; see Note [A group that fails].

        Args:
            tell: tell the other members.
            error: the reason.
        """
        if self._error is not None:
            return
        self._error = error
        self._owner.forget(self)
        self.agreements.failed(error)
        if tell:
            self._tell(("fail", self.key, error))
        running, self._running = self._running, {}
        for each in running.values():
            each.finish()
            for task in each.senders:
                if task is not asyncio.current_task():
                    task.cancel()
        self._wake()

    def gave_up(self, what: str, error: BaseException) -> None:
        """This member has given up something that all take part in: the group is over.

        Args:
            what: a noun for what it was.
            error: the reason.
        """
        if isinstance(error, DistributedError):
            self.fail(error)
            return
        why = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"failed: {type(error).__name__}: {error}"
        self.fail(CollectiveError(f"group {self.name!r}: {what} on {self._describe_self()} {why}", worker=self.names[self.rank]))

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _tell(self, value: tuple[Any, ...]) -> None:
        """Tell the other members something, without waiting for that."""
        core = self._owner.core
        if core.is_closing or not core.endpoint.is_open:
            return
        for name in self.names[:1] if is_large(self.size) and self.rank else self.names:
            if name != core.name:
                task = core.spawn(self._tell_one(name, value), f"group {self.name}")
                self._told.add(task)
                task.add_done_callback(self._told.discard)

    async def _tell_one(self, name: str, value: tuple[Any, ...]) -> None:
        try:
            await self._owner.request(name, value, self._owner.core.limits.silence, self.principal)
        except DistributedError:
            return  # lost as well, or it knows

    # ---------------------------------------------------------------- descriptions

    def _describe(self, running: _Running) -> str:
        return f"group {self.name!r}: {running.exchange.operation} (operation {running.number})"

    def _describe_self(self) -> str:
        return f"{self.names[self.rank]} (rank {self.rank})"

    def _describe_running(self) -> str:
        return ", ".join(str(running.exchange.operation) for running in self._running.values())

    def _describe_missing(self, running: _Running) -> str:
        missing = [f"{self.names[rank]} (rank {rank})" for rank in running.exchange.awaited]
        return f"nothing more has come from {', '.join(missing)}" if missing else "not every member has taken what was sent to it"


def _is_single(arrays: Any) -> bool:
    return not isinstance(arrays, (list, tuple))


def _data_of(what: str, arrays: Any, kinds: str) -> list[Any]:
    """The data of arrays and Tensors, checked; arrays of the host are C-contiguous."""
    data: list[Any] = [array._data if isinstance(array, TensorCore) else array for array in ([arrays] if _is_single(arrays) else arrays)]
    data = [np.asarray(array) if isinstance(array, (np.generic, int, float, complex)) else array for array in data]
    return check_arrays(what, data, kinds)
