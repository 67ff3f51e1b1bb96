"""Transfers: the state of a module or an optimizer on its way between workers, in as many messages as it takes.

Note [One moment]
    A state that is read is copied in one go, before its first piece is sent; one that is loaded is gathered until it is complete, and loaded in one
    go. What is copied or gathered for a transfer that is given up goes when the other side says so or is lost, and makes room where there are
    `OPEN` newer ones of the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from aiograd.distributed.contexts import Caller
from aiograd.distributed.identity import Identity
from aiograd.distributed.limits import Limits, check_number
from aiograd.distributed.pieces import Piece, Room, cut, measure
from aiograd.distributed.references import RemoteRef
from aiograd.errors import ArgumentTypeError, DeadlineError, DistributedError, LimitError

#: transfers of one object that are under way at most
OPEN = 2


class _Transfer(NamedTuple):
    key: bytes
    #: what is still to be sent, or has come so far, and its bytes
    outgoing: Iterator[list[Piece]]
    incoming: list[Any]
    size: int


class Transfers:
    """The transfers that are under way with the objects of one worker. Whoever begins one draws a number for it, 16 bytes.

    Args:
        limits: the worker's own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: oldest first
        self._open: dict[tuple[Caller, bytes], _Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def send(self, caller: Caller, ref: RemoteRef, items: Iterable[tuple[Any, Any]], number: Any, room: Any) -> tuple[list[Piece], bool]:
        """Begin to send a state.

        Args:
            items: copies, which nobody else has.
            room: what the caller can take in a message; a `Room`.

        Returns:
            The first pieces, and whether there are more.
        """
        _check(number)
        if not (room.__class__ is tuple and len(room) == 3 and all(each.__class__ is int and each >= 1 for each in room)):
            raise ArgumentTypeError("a request for a state with room that makes no sense")
        outgoing = cut(items, Room.of(self._limits).within(Room(*room)))
        return self._next(caller, number, _Transfer(ref.key, outgoing, [], 0))

    async def more(self, caller: Caller, ref: RemoteRef, number: bytes) -> tuple[list[Piece], bool]:
        """Further pieces of a state, and whether there are more."""
        return self._next(caller, number, self._take(caller, ref, number))

    def _next(self, caller: Caller, number: bytes, transfer: _Transfer) -> tuple[list[Piece], bool]:
        part = next(transfer.outgoing)
        following = next(transfer.outgoing, None)
        if following is not None:
            self._keep(caller, number, transfer._replace(outgoing=itertools.chain([following], transfer.outgoing)))
        return part, following is not None

    def put(self, caller: Caller, ref: RemoteRef, number: bytes, is_first: bool, pieces: list[Any]) -> bool:
        """Pieces of a state that are to be loaded with others."""
        _check(number, pieces)
        transfer = _Transfer(ref.key, iter(()), [], 0) if is_first else self._take(caller, ref, number)
        transfer = transfer._replace(size=transfer.size + measure(pieces).size)
        if sum(other.size for other in self._open.values()) + transfer.size > self._limits.bytes_total:
            raise LimitError(f"a state in several messages: more than {self._limits.bytes_total} bytes, which is the limit (Limits.bytes_total)")
        transfer.incoming.extend(pieces)
        self._keep(caller, number, transfer)
        return True

    def finish(self, caller: Caller, ref: RemoteRef, number: bytes, is_first: bool, pieces: list[Any]) -> list[Any]:
        """All pieces of a state, of which these are the last."""
        _check(number, pieces)
        return pieces if is_first else [*self._take(caller, ref, number).incoming, *pieces]

    async def end(self, caller: Caller, ref: RemoteRef, number: bytes) -> bool:
        """The caller has given a transfer up."""
        self._take(caller, ref, number)
        return True

    def _take(self, caller: Caller, ref: RemoteRef, number: bytes) -> _Transfer:
        _check(number)
        transfer = self._open.get((caller, number))
        if transfer is None or not isinstance(ref, RemoteRef) or transfer.key != ref.key:
            raise DistributedError("a state in several messages: there is no such transfer (any more); begin again")
        del self._open[caller, number]
        return transfer

    def _keep(self, caller: Caller, number: bytes, transfer: _Transfer) -> None:
        same = [each for each, other in self._open.items() if other.key == transfer.key]
        for each in same[: max(0, len(same) + 1 - OPEN)]:
            del self._open[each]
        self._open[caller, number] = transfer

    def forget(self, identity: Identity) -> None:
        """End those of a worker that is lost."""
        for caller, number in [(caller, number) for caller, number in self._open if caller == tuple(identity)]:
            del self._open[caller, number]

    def drop(self, key: bytes) -> None:
        """End those of an object that is deleted."""
        for each in [each for each, transfer in self._open.items() if transfer.key == key]:
            del self._open[each]

    def clear(self) -> None:
        """End all."""
        self._open.clear()


def _check(number: Any, pieces: Any = ()) -> None:
    if number.__class__ is not bytes or len(number) != 16 or pieces.__class__ not in (list, tuple):
        raise ArgumentTypeError("a state in several messages that make no sense")


# ---------------------------------------------------------------- the other side


async def fetch(worker: Any, ref: RemoteRef, function: str, timeout: float | None) -> tuple[Any, list[Any]]:
    """Read a state; cancelling changes nothing.

    Args:
        worker: this worker.
        function: the library's own that begins it, "aiograd.module.state_dict" for one.
        timeout: seconds for all of it.

    Returns:
        What comes beside the pieces, and the pieces.
    """
    clock, number = _Clock(worker, ref, timeout), worker._office.entropy(16)
    try:
        head, pieces, is_more = await worker.call(ref.owner, function, ref, number, tuple(Room.of(worker.limits)), timeout=clock.left())
        while is_more:
            further, is_more = await worker.call(ref.owner, "aiograd.transfer.more", ref, number, timeout=clock.left())
            pieces.extend(further)
    except BaseException:
        worker._office.keep(_end(worker, ref, number), "transfer")
        raise
    return head, pieces


async def store(worker: Any, ref: RemoteRef, function: str, items: Iterable[tuple[Any, Any]], timeout: float | None, *head: Any) -> None:
    """Load a state. Cancelled, or where the answer is lost, it may have been loaded.

    Args:
        worker: this worker.
        function: the library's own that ends it, "aiograd.module.load_state_dict" for one.
        items: names and values.
        timeout: seconds for all of it.
        head: what goes beside the pieces.
    """
    clock, number = _Clock(worker, ref, timeout), worker._office.entropy(16)
    parts = list(cut(items, Room.of(worker.limits)))
    try:
        for n, part in enumerate(parts[:-1]):
            await worker.call(ref.owner, "aiograd.transfer.put", ref, number, n == 0, part, timeout=clock.left())
        await worker.call(ref.owner, function, ref, number, len(parts) == 1, parts[-1], *head, timeout=clock.left())
    except BaseException:
        if len(parts) > 1:
            worker._office.keep(_end(worker, ref, number), "transfer")
        raise


async def _end(worker: Any, ref: RemoteRef, number: bytes) -> None:
    with contextlib.suppress(DistributedError):  # it has ended, or the other side is out of reach and will notice
        await worker.call(ref.owner, "aiograd.transfer.end", ref, number)


class _Clock:
    """Seconds that are left of a timeout, call by call."""

    def __init__(self, worker: Any, ref: RemoteRef, timeout: float | None) -> None:
        if timeout is not None:
            check_number("timeout", timeout, worker.limits.max_deadline, "Limits.max_deadline")
        self._time = asyncio.get_running_loop().time
        self._until = None if timeout is None else self._time() + timeout
        self._timeout = timeout
        self._what = f"the state of {ref.type_name} on {ref.owner}"

    def left(self) -> float | None:
        if self._until is None:
            return None
        left = self._until - self._time()
        if left <= 0:
            raise DeadlineError(f"{self._what} was not transferred within {self._timeout:g} s")
        return left
