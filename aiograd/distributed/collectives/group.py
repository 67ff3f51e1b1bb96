"""Group: workers that carry out collectives together.

Note [A group that fails]
    The operations of a group are numbered on each rank in the order in which they begin, and operations of one number belong together. So a rank that
    gives one up, for any reason, cannot take part in a later one: the group has failed, on this rank at once and on the others as soon as they hear
    of it, and every operation that is under way or begins later raises the same error. Nothing of it is seen by the caller, since results are new
    arrays. Survivors form a new group: `Group.without`, `Group.with_`.

Note [News of a large group]
    Members of a large group (see `ring`) are connected to rank 0 and to their neighbours. So they tell rank 0 that the group has failed or that they
    leave it, and rank 0 tells all others; every member notices the loss of rank 0 itself. Members that leave at about the same time, as all do at the
    end, are announced in one message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

from aiograd.coordination.message_form import WireMessage
from aiograd.distributed.collectives.agreement import GroupAgreements
from aiograd.distributed.collectives.operation import (
    REDUCED_KINDS,
    SENDABLE_KINDS,
    Operation,
    OperationKind,
    check_reduction,
    data_of,
    data_of_lists,
    is_single,
    specs_of,
)
from aiograd.distributed.collectives.ring import is_large
from aiograd.distributed.collectives.running import RunningOperations
from aiograd.distributed.error_wire import to_wire
from aiograd.distributed.messages.groups import GroupFail, GroupLeave, GroupLeft, Leaver
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, ArgumentTypeError, CollectiveError, DistributedError
from aiograd.running.caller import called
from aiograd.running.types import Array

#: seconds in which rank 0 of a large group gathers the names of leaving members
GATHERING = 0.02


class GroupOwner(Protocol):
    """The groups of a worker, as a group sees them."""

    @property
    def core(self) -> WorkerCore:
        """The worker."""

    def forget(self, group: Group) -> None:
        """The group is over."""

    def form(self, names: Sequence[str], name: str, timeout: float | None) -> Coroutine[Any, Any, Group]:
        """See `join_group`."""


class Group:
    """Workers that carry out collectives together; this worker is one of them. Made by `join_group`; use it with ``async with``.

    Every member calls the same operations in the same order. An operation takes numpy arrays or Tensors and returns new numpy arrays, which are the
    same on every rank, to the bit, for any order of arrival: an element of a sum is ``((rank 0 + rank 1) + rank 2) + ...``. Several operations may be
    under way at once; they are told apart by the order in which they began. Arrays must not change until the operation has returned.

    If a member is lost, gives up (an error, a deadline, a cancellation) or calls something else, the group has failed: all operations on all members
    raise, and `without` and `with_` make a new group. Where members call different things none has a result. One that a member gives up may have
    ended on others, with the right result; no operation that begins later ends anywhere. `commit` applies something on all or on none.

    Args:
        owner: the worker's groups.
        name, names: see below.
        key: names the group in messages; made from `nonces`.
        principal: the principal that the members act for.
        nonces: random bytes of each member.

    Attributes:
        name: of the group.
        rank: of this worker: its place in `names`.
        size: the number of members.
        names: of the members, by rank.

    >>> groups
    [<Group default: rank 0 of left, right>, <Group default: rank 1 of left, right>]
    >>> await asyncio.gather(*(group.all_reduce(np.full(2, group.rank + 1.0)) for group in groups))
    [array([3., 3.]), array([3., 3.])]
    """

    def __init__(self, owner: GroupOwner, name: str, names: tuple[str, ...], key: bytes, principal: str, nonces: Mapping[str, bytes]) -> None:
        self.name = name
        self.names = names
        self.rank: int = names.index(owner.core.name)
        self.size: int = len(names)
        self.key = key
        self.principal = principal
        #: of the members by name, from which the key was made
        self.nonces = nonces
        self._owner = owner
        #: the reason why the group is over, or None
        self.error: DistributedError | None = None
        self._is_closed = False
        #: ranks that have left, with the number of the first operation in which they take no part
        self._left: dict[int, int] = {}
        self._told: set[asyncio.Task[None]] = set()
        self.operations: RunningOperations = RunningOperations(self)
        #: the decisions of the group
        self.agreements: GroupAgreements = GroupAgreements(self)
        #: the leaving members that have to be announced to the others; see Note [News of a large group]
        self._leavers: dict[int, int] = {}

    def __repr__(self) -> str:
        state = " (failed)" if self.error is not None else " (closed)" if self._is_closed else ""
        return f"<Group {self.name}: rank {self.rank} of {', '.join(self.names)}{state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Leave the group. Operations that are under way here fail; other members fail in the next one.

        Idempotent; cancelling it leaves all the same.

        >>> await groups[0].aclose()
        >>> groups[0]
        <Group default: rank 0 of left, right (closed)>
        """
        if self._is_closed:
            return
        self._is_closed = True
        self._owner.forget(self)
        if self.operations.running:
            self.fail(CollectiveError(f"group {self.name!r}: {self.names[self.rank]} has left it during {self.operations}"))
        elif self.error is None:
            self._tell(GroupLeave(self.key, self.name, self.operations.next))
        self.operations.wake()
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
        values = data_of("all_reduce", arrays, REDUCED_KINDS[reduction])
        operation = Operation(OperationKind.ALL_REDUCE, reduction, 0, specs_of(values))
        return called(self.operations.begin(operation, values, timeout, is_single(arrays)), "Group.all_reduce")

    def sum_in_turn(self, arrays: Sequence[Sequence[Any]], *, timeout: float | None = None) -> Coroutine[Any, Any, list[Array]]:
        """The sum of lists of arrays, of which a rank may have several: the list of rank 0, then those of rank 1 one after another, and so on.

        So the bits depend on the lists and their order, and not on their number on each rank, and no more bytes travel than with one on each.

        Args:
            arrays: lists of arrays, of the same shapes and dtypes in every list and on every rank; of rank 0 one list.
            timeout: as of `all_reduce`.

        Returns:
            To be awaited: new arrays, the same on every rank to the bit. Cancelling makes the group fail on every member.

        Raises:
            As `all_reduce`.
            ArgumentError: no list, several on rank 0, or lists that differ.

        >>> two = [[np.full(1, 2.0)], [np.full(1, 3.0)]]
        >>> await asyncio.gather(groups[0].sum_in_turn([[np.full(1, 1.0)]]), groups[1].sum_in_turn(two))
        [[array([6.])], [array([6.])]]
        """
        data, specs = data_of_lists(arrays, self.rank)
        return called(self.operations.begin(Operation(OperationKind.SUM_IN_TURN, "sum", 0, specs), data, timeout), "Group.sum_in_turn")

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
        values = data_of("reduce_scatter", [array], REDUCED_KINDS[reduction])
        if len(values[0].shape) == 0:
            raise ArgumentError("reduce_scatter: the array has no rows to divide; expected at least one dimension")
        operation = Operation(OperationKind.REDUCE_SCATTER, reduction, 0, specs_of(values))
        return called(self.operations.begin(operation, values, timeout, True), "Group.reduce_scatter")

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
        values = data_of("all_gather", [array], SENDABLE_KINDS)
        return called(self.operations.begin(Operation(OperationKind.ALL_GATHER, specs=specs_of(values)), values, timeout), "Group.all_gather")

    def broadcast(self, arrays: Any = None, root: int = 0, *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """The arrays of one rank, on all ranks.

        Args:
            arrays: a list of arrays, or one array. On other ranks than the root None, or arrays of the same shapes and dtypes; their values are not
                used.
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
        values = [] if arrays is None else data_of("broadcast", arrays, SENDABLE_KINDS)
        single = arrays is not None and is_single(arrays)
        operation = Operation(OperationKind.BROADCAST, "", root, specs_of(values))
        return called(self.operations.begin(operation, values, timeout, single), "Group.broadcast")

    def barrier(self, *, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """Wait until every rank has called it. To be awaited; cancelling makes the group fail on every member. Raises as `all_reduce`.

        Args:
            timeout: as of `all_reduce`.

        Returns:
            To be awaited.
        """
        return called(self.operations.begin(Operation(OperationKind.BARRIER), [], timeout, True), "Group.barrier")

    async def commit(self, apply: Callable[[], None], *, timeout: float | None = None) -> None:
        """Apply something on every member, or on none.

        Every member calls it once it is ready, and `apply` is called when all are: on rank 0 first, where it may raise, which means that no member
        applies anything. On other ranks it must not raise.

        Args:
            apply: called without arguments, at most once.
            timeout: as of `all_reduce`.

        Raises:
            As `all_reduce`; nothing was applied anywhere then. CommitUnknown: contact was lost at the moment of the decision, and nothing was
            applied here; `CommitUnknown.workers` names the one that knows. The error of `apply`. ArgumentTypeError: no callable.

        Cancelling makes the group fail on every member, unless this one has said that it is ready: then the decision is awaited, and the
        cancellation raised after it.

        >>> _ = await asyncio.gather(*(group.commit(lambda: print("applied")) for group in groups))
        applied
        applied
        """
        if not callable(apply):
            raise ArgumentTypeError(f"Group.commit: expected a callable, found {type(apply).__name__}")
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

        >>> await groups[0].without("right")
        <Group default: rank 0 of left>
        """
        if name not in self.names:
            raise ArgumentError(f"group {self.name!r} has no member {name!r}; there are {', '.join(self.names)}")
        return await self._reform([each for each in self.names if each != name], timeout)

    async def with_(self, name: str, *, timeout: float | None = None) -> Group:
        """A new group of all members and one more, which gets the last rank; this one is over.

        All members call it, and the new one calls `join_group` with all names.

        Args:
            name: of the worker that joins.
            timeout: seconds until all have joined.

        Returns:
            The new group. Cancelled, this group is over all the same.

        Raises:
            ArgumentError: it is a member already. Otherwise as `join_group`.

        >>> *_, group = await asyncio.gather(*(group.with_("driver") for group in groups), dist.join_group(driver, ["left", "right", "driver"]))
        >>> group
        <Group default: rank 2 of left, right, driver>
        """
        if name in self.names:
            raise ArgumentError(f"group {self.name!r} has a member {name!r} already")
        return await self._reform([*self.names, name], timeout)

    async def _reform(self, names: list[str], timeout: float | None) -> Group:
        await self.aclose()
        return await self._owner.form(names, self.name, timeout)

    # ---------------------------------------------------------------- requests of other members

    def fault(self, number: int) -> DistributedError | None:
        """See if an operation can begin.

        Args:
            number: of the operation.

        Returns:
            The reason why it cannot, or None.
        """
        if self.error is not None:
            return self.error.with_traceback(None)
        if self._is_closed:
            return CollectiveError(f"group {self.name!r} is closed on this worker")
        for rank, first in self._left.items():
            if number >= first:
                return CollectiveError(f"group {self.name!r}: {self.names[rank]} (rank {rank}) has left it", worker=self.names[rank])
        return None

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
        if any(other >= number for other in self.operations.running):
            self.fail(CollectiveError(f"group {self.name!r}: {self.names[rank]} (rank {rank}) has left it", worker=self.names[rank]), tell=False)
        self.operations.wake()

    @property
    def core(self) -> WorkerCore:
        """The worker."""
        return self._owner.core

    def ask(self, peer: str, message: WireMessage, timeout: float) -> Coroutine[Any, Any, Any]:
        """Send a request about groups to another member.

        Args:
            peer: its name.
            message: the request.
            timeout: seconds.

        Returns:
            To be awaited: the answer. Cancelling it withdraws the request.
        """
        return self.core.ask(peer, message, timeout, self.principal)

    @property
    def passes_on(self) -> bool:
        """True if this rank tells the others what members tell it."""
        return self.rank == 0 and is_large(self.size)

    async def _announce_leavers(self) -> None:
        await asyncio.sleep(GATHERING)
        leavers, self._leavers = self._leavers, {}
        if self.error is None and not self._is_closed:
            self._tell(GroupLeft(self.key, self.name, [Leaver(*each) for each in leavers.items()]))

    def fail(self, error: DistributedError, tell: bool = True, lost: str = "") -> None:
        """The group is over; see Note [A group that fails].

        Args:
            tell: tell the other members.
            error: the reason.
            lost: the member that this worker has lost, and cannot tell.
        """
        if self.error is not None:
            return
        self.error = error
        self._owner.forget(self)
        self.agreements.failed(error)
        if tell:
            self._tell(GroupFail(self.key, self.name, to_wire(error, self.core.name, "collective", "")), lost)
        self.operations.end()

    def abandon(self, what: str, error: BaseException) -> None:
        """This member has given up something that all take part in: the group is over.

        Args:
            what: a noun for the operation.
            error: the reason.
        """
        if isinstance(error, DistributedError):
            self.fail(error)
            return
        why = "was cancelled" if isinstance(error, asyncio.CancelledError) else f"failed: {type(error).__name__}: {error}"
        self.fail(CollectiveError(f"group {self.name!r}: {what} on {self.operations.here} {why}", worker=self.names[self.rank]))

    def _tell(self, message: WireMessage, lost: str = "") -> None:
        """Tell the other members something, without waiting for that."""
        core = self._owner.core
        if core.is_closing or not core.endpoint.is_open:
            return
        for name in self.names[:1] if is_large(self.size) and self.rank else self.names:
            if name not in (core.name, lost):
                task = core.spawn(self._tell_one(name, message), f"group {self.name}")
                self._told.add(task)
                task.add_done_callback(self._told.discard)

    async def _tell_one(self, name: str, message: WireMessage) -> None:
        try:
            await self.ask(name, message, self._owner.core.limits.silence)
        except DistributedError:
            return  # lost as well, or it knows
