"""Transfers: the state of a module or an optimizer on its way between workers, in as many messages as it takes.

Note [One moment]
    A state that is read is copied in one go, before its first chunk is sent; one that is loaded is gathered until it is complete, and loaded in one
    go. The copied or gathered chunks of an abandoned transfer are dropped when the other side says so or is lost, or when there are
    `OPEN` newer transfers of the same object.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from aiograd.distributed.messages.library import (
    EndTransfer,
    PutChunks,
    ReadMore,
    StateBegun,
    StateChunk,
    StateChunks,
    StateContinued,
    StateRequest,
    ask_library,
)
from aiograd.distributed.objects.chunks import EACH, Capacity, measure, split
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.rpc.limits import Limits, check_number
from aiograd.errors import DeadlineError, DistributedError, LimitError

#: transfers of one object that are under way at most
OPEN = 2


class _Transfer(NamedTuple):
    key: bytes
    #: the chunks still to be sent, or the received ones, and their bytes
    outgoing: Iterator[list[StateChunk]]
    incoming: list[StateChunk]
    size: int


class Transfers:
    """The transfers that are under way with the objects of one worker. The side that begins one draws a number for it, 16 bytes.

    Args:
        limits: the worker's own.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        #: oldest first
        self._open: dict[tuple[PeerIdentity, bytes], _Transfer] = {}

    def __len__(self) -> int:
        return len(self._open)

    def send(self, caller: PeerIdentity, request: StateRequest, head: Any, items: Iterable[tuple[Any, Any]]) -> StateBegun:
        """Begin to send a state.

        Args:
            caller: the reader.
            request: its request.
            head: the values beside the chunks.
            items: names and copies of the values.

        Returns:
            The answer, with the first chunks.
        """
        outgoing = split(items, Capacity.of(self._limits).within(Capacity(*request.capacity)))
        return StateBegun(head, *self._next(caller, request.number, _Transfer(request.ref.key, outgoing, [], 0)))

    async def more(self, caller: PeerIdentity, message: ReadMore) -> StateContinued:
        """Serve a `ReadMore`."""
        return StateContinued(*self._next(caller, message.number, self._take(caller, message.ref, message.number)))

    def _next(self, caller: PeerIdentity, number: bytes, transfer: _Transfer) -> tuple[list[StateChunk], bool]:
        part = next(transfer.outgoing)
        following = next(transfer.outgoing, None)
        if following is not None:
            self._keep(caller, number, transfer._replace(outgoing=itertools.chain([following], transfer.outgoing)))
        return part, following is not None

    def put(self, caller: PeerIdentity, message: PutChunks) -> bool:
        """Serve a `PutChunks`."""
        transfer = _Transfer(message.ref.key, iter(()), [], 0) if message.is_first else self._take(caller, message.ref, message.number)
        transfer = transfer._replace(size=transfer.size + sum(EACH + measure(chunk.value).size for chunk in message.chunks))
        if sum(other.size for other in self._open.values()) + transfer.size > self._limits.bytes_total:
            raise LimitError(f"a state in several messages: more than {self._limits.bytes_total} bytes, which is the limit (Limits.bytes_total)")
        transfer.incoming.extend(message.chunks)
        self._keep(caller, message.number, transfer)
        return True

    def finish(self, caller: PeerIdentity, message: StateChunks) -> list[StateChunk]:
        """All chunks of a state, of which these are the last."""
        return message.chunks if message.is_first else [*self._take(caller, message.ref, message.number).incoming, *message.chunks]

    async def end(self, caller: PeerIdentity, message: EndTransfer) -> bool:
        """Serve an `EndTransfer`."""
        self._take(caller, message.ref, message.number)
        return True

    def _take(self, caller: PeerIdentity, ref: RemoteRef, number: bytes) -> _Transfer:
        transfer = self._open.get((caller, number))
        if transfer is None or transfer.key != ref.key:
            raise DistributedError("a state in several messages: there is no such transfer, or it has been dropped; begin again")
        del self._open[caller, number]
        return transfer

    def _keep(self, caller: PeerIdentity, number: bytes, transfer: _Transfer) -> None:
        same = [each for each, other in self._open.items() if other.key == transfer.key]
        for each in same[: max(0, len(same) + 1 - OPEN)]:
            del self._open[each]
        self._open[caller, number] = transfer

    def forget(self, identity: PeerIdentity) -> None:
        """End the transfers of a worker that is lost."""
        for caller, number in [(caller, number) for caller, number in self._open if caller == tuple(identity)]:
            del self._open[caller, number]

    def drop(self, key: bytes) -> None:
        """End the transfers of an object that is deleted."""
        for each in [each for each, transfer in self._open.items() if transfer.key == key]:
            del self._open[each]

    def clear(self) -> None:
        """End all."""
        self._open.clear()


# ---------------------------------------------------------------- the other side


async def fetch(worker: Any, ref: RemoteRef, request: type[StateRequest], timeout: float | None) -> tuple[Any, list[StateChunk]]:
    """Read a state; cancelling changes nothing.

    Args:
        worker: this worker.
        ref: the object.
        request: the class of the request.
        timeout: seconds for all of it.

    Returns:
        The values beside the chunks, and the chunks.
    """
    clock, number = _Clock(worker, ref, timeout), worker._core.entropy(16)
    try:
        begun: StateBegun = await ask_library(worker, ref.owner, request(ref, number, (*Capacity.of(worker.limits),)), clock.left())
        chunks, is_more = begun.chunks, begun.is_more
        while is_more:
            further: StateContinued = await ask_library(worker, ref.owner, ReadMore(ref, number), clock.left())
            chunks.extend(further.chunks)
            is_more = further.is_more
    except BaseException:
        worker._core.spawn(_end(worker, ref, number), "transfer")
        raise
    return begun.head, chunks


async def store(worker: Any, ref: RemoteRef, request: type[StateChunks], items: Iterable[tuple[Any, Any]], timeout: float | None, *head: Any) -> None:
    """Load a state. Cancelled, or where the answer is lost, it may have been loaded.

    Args:
        worker: this worker.
        ref: the object.
        request: the class of the last request.
        items: names and values.
        timeout: seconds for all of it.
        head: the values that are sent beside the chunks.
    """
    clock, number = _Clock(worker, ref, timeout), worker._core.entropy(16)
    parts = list(split(items, Capacity.of(worker.limits)))
    try:
        for n, part in enumerate(parts[:-1]):
            await ask_library(worker, ref.owner, PutChunks(ref, number, n == 0, part), clock.left())
        await ask_library(worker, ref.owner, request(ref, number, len(parts) == 1, parts[-1], *head), clock.left())
    except BaseException:
        if len(parts) > 1:
            worker._core.spawn(_end(worker, ref, number), "transfer")
        raise


async def _end(worker: Any, ref: RemoteRef, number: bytes) -> None:
    with contextlib.suppress(DistributedError):  # it has ended, or the other side is out of reach and will notice
        await ask_library(worker, ref.owner, EndTransfer(ref, number), None)


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
