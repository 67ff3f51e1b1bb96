"""Transfers: the state of a module or an optimizer on its way between workers, in as many messages as it takes.

Note [One moment]
    A state that is read is copied in one go, before its first piece is sent; one that is loaded is gathered until it is complete, and loaded in one
    go. What is copied or gathered for a transfer that is never finished goes when its worker is lost, and makes room where there are `OPEN`
    newer ones of the same object.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from aiograd.distributed.contexts import Caller
from aiograd.distributed.handshake import Identity
from aiograd.distributed.limits import Limits
from aiograd.distributed.pieces import Piece, Room, cut, measure
from aiograd.distributed.references import RemoteRef
from aiograd.errors import ArgumentTypeError, DeadlineError, DistributedError, LimitError

#: transfers of one object that are under way at most
OPEN = 4


class _Transfer(NamedTuple):
    caller: Caller
    key: bytes
    #: what is still to be sent, or has come so far, and its bytes
    outgoing: Iterator[list[Piece]]
    incoming: list[Any]
    size: int


class Transfers:
    """The transfers that are under way with the objects of one worker.

    Args:
        limits: the worker's own. entropy: gives unguessable bytes.
    """

    def __init__(self, limits: Limits, entropy: Callable[[int], bytes]) -> None:
        self._limits = limits
        self._entropy = entropy
        #: by id, oldest first
        self._open: dict[bytes, _Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def send(self, caller: Caller, ref: RemoteRef, items: Iterable[tuple[Any, Any]], room: Any) -> tuple[list[Piece], bytes]:
        """Begin to send a state.

        Args:
            items: copies, which nobody else has.
            room: what the caller can take in a message; a `Room`.

        Returns:
            The first pieces, and an id to ask for further ones with, empty if there are none.
        """
        if not (room.__class__ is tuple and len(room) == 3 and all(each.__class__ is int and each >= 1 for each in room)):
            raise ArgumentTypeError("a request for a state with room that makes no sense")
        outgoing = cut(items, Room.of(self._limits).within(Room(*room)))
        return self._next(_Transfer(caller, ref.key, outgoing, [], 0), b"")

    async def more(self, caller: Caller, ref: RemoteRef, number: bytes) -> tuple[list[Piece], bytes]:
        """Further pieces of a state."""
        return self._next(self._take(caller, ref, number), number)

    def _next(self, transfer: _Transfer, number: bytes) -> tuple[list[Piece], bytes]:
        part = next(transfer.outgoing)
        following = next(transfer.outgoing, None)
        if following is None:
            return part, b""
        return part, self._keep(transfer._replace(outgoing=_again(following, transfer.outgoing)), number)

    async def put(self, caller: Caller, ref: RemoteRef, number: bytes, pieces: list[Any]) -> bytes:
        """Pieces of a state that are to be loaded with others; `number` is empty for the first. Returns an id for those that follow."""
        if pieces.__class__ is not list:
            raise ArgumentTypeError(f"pieces is {type(pieces).__name__}; expected list")
        transfer = self._take(caller, ref, number) if number else _Transfer(caller, ref.key, iter(()), [], 0)
        transfer = transfer._replace(size=transfer.size + measure(pieces).size)
        if sum(other.size for other in self._open.values()) + transfer.size > self._limits.bytes_total:
            raise LimitError(f"a state in several messages: more than {self._limits.bytes_total} bytes, which is the limit (Limits.bytes_total)")
        transfer.incoming.extend(pieces)
        return self._keep(transfer, number)

    def finish(self, caller: Caller, ref: RemoteRef, number: bytes, pieces: list[Any]) -> list[Any]:
        """All pieces of a state, of which these are the last."""
        if pieces.__class__ is not list:
            raise ArgumentTypeError(f"pieces is {type(pieces).__name__}; expected list")
        return [*(self._take(caller, ref, number).incoming if number else ()), *pieces]

    def _take(self, caller: Caller, ref: RemoteRef, number: Any) -> _Transfer:
        transfer = self._open.get(number) if number.__class__ is bytes else None
        if transfer is None or transfer.caller != caller or not isinstance(ref, RemoteRef) or transfer.key != ref.key:
            raise DistributedError("a state in several messages: there is no such transfer (any more); begin again")
        del self._open[number]
        return transfer

    def _keep(self, transfer: _Transfer, number: bytes) -> bytes:
        number = number or self._entropy(16)
        same = [each for each, other in self._open.items() if other.key == transfer.key]
        for each in same[: len(same) + 1 - OPEN]:
            del self._open[each]
        self._open[number] = transfer
        return number

    def forget(self, identity: Identity) -> None:
        """End those of a worker that is lost."""
        for number in [number for number, transfer in self._open.items() if transfer.caller == tuple(identity)]:
            del self._open[number]

    def drop(self, key: bytes) -> None:
        """End those of an object that is deleted."""
        for number in [number for number, transfer in self._open.items() if transfer.key == key]:
            del self._open[number]

    def clear(self) -> None:
        """End all."""
        self._open.clear()


def _again(first: list[Piece], rest: Iterator[list[Piece]]) -> Iterator[list[Piece]]:
    yield first
    yield from rest


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
    clock = _Clock(worker, ref, timeout)
    head, pieces, number = await worker.call(ref.owner, function, ref, tuple(Room.of(worker.limits)), timeout=clock.left())
    while number:
        further, number = await worker.call(ref.owner, "aiograd.transfer.more", ref, number, timeout=clock.left())
        pieces.extend(further)
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
    clock = _Clock(worker, ref, timeout)
    parts = list(cut(items, Room.of(worker.limits)))
    number = b""
    for part in parts[:-1]:
        number = await worker.call(ref.owner, "aiograd.transfer.put", ref, number, part, timeout=clock.left())
    await worker.call(ref.owner, function, ref, number, parts[-1], *head, timeout=clock.left())


class _Clock:
    """Seconds that are left of a timeout, call by call."""

    def __init__(self, worker: Any, ref: RemoteRef, timeout: float | None) -> None:
        self._time = asyncio.get_running_loop().time
        self._until = None if timeout is None else self._time() + timeout
        self._timeout = timeout
        self._what = f"the state of {ref.type_name} on {ref.owner}"

    def left(self) -> float | None:
        if self._until is None:
            return None
        left = self._until - self._time()
        if left <= 0 < (self._timeout or 0):
            raise DeadlineError(f"{self._what} was not transferred within {self._timeout:g} s")
        return left
