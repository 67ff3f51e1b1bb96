"""Multicast: one message to many workers, by a tree of them. See Note [A tree of receivers] in `aiograd.transaction.tree`.

A worker that is reached handles the message, sends it on to the others of its branch at the same time, and answers for all. Messages of few kinds can
be sent this way, which are registered with `Multicast.register`: those that may arrive twice and mean the same whoever of the sender's principal
has brought them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import DistributedError, ProtocolError
from aiograd.transaction.tree import branches

#: part of the time that the tree may take; what is left is for those that it has not reached
PART = 0.5
#: part of its time in which a worker that passes a message on waits for those behind it, so that it can still answer
PASSED_ON = 0.9

#: serves a message: who has brought it, the message, and the seconds that are left
Server = Callable[[PeerIdentity, Any, float], Awaitable[Any]]


class MulticastWorker(Protocol):
    """The part of a worker that multicasts use."""

    name: str
    handlers: dict[int, Server]

    @property
    def entropy(self) -> Callable[[int], bytes]:
        """Makes random bytes."""

    def request(self, peer: str, kind: int, value: Any, timeout: float, principal: str | None = None) -> Coroutine[Any, Any, Any]:
        """Send a request to another worker."""


class Multicast:
    """The multicasts of a worker.

    Args:
        core: the worker.
    """

    def __init__(self, core: MulticastWorker) -> None:
        self._core = core
        self._servers: dict[int, Server] = {}
        core.handlers[Kind.RELAY] = self._on_relay

    def register(self, kind: int, server: Server) -> None:
        """Let messages of a kind come by way of others.

        Args:
            kind: the kind.
            server: handles one, whoever has brought it.
        """
        self._servers[kind] = server

    async def spread(self, kind: int, messages: Mapping[str, Any], timeout: float, principal: str) -> dict[str, Any]:
        """Send workers a message each.

        Cancelling stops the waiting; some may have been reached.

        Args:
            kind: one that was registered.
            messages: by the name of the worker.
            timeout: seconds.
            principal: on whose behalf.

        Returns:
            The answer of each worker that was reached, or the exception that it has answered with. Others are missing, and may have been reached.
        """
        parts = branches(list(messages.items()))
        asked = [self._core.request(part[0][0], Kind.RELAY, (int(kind), [list(each) for each in part]), PART * timeout, principal) for part in parts]
        found: dict[str, Any] = {}
        for part, answers in zip(parts, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(answers, BaseException):
                if not isinstance(answers, (DistributedError, MemoryError)):
                    raise answers
                continue
            expected = {name for name, _ in part}
            for answer in answers if isinstance(answers, list) else []:
                match answer:
                    case [str(name), bool(failed), value] if name in expected:
                        found[name] = from_wire(value, name) if failed else value
        return found

    async def _on_relay(self, caller: PeerIdentity, value: Any, timeout: float) -> list[list[Any]]:
        match value:
            case (int(kind), [[str(name), message], *others]) if name == self._core.name and kind in self._servers:
                pass
            case _:
                raise ProtocolError("a malformed message to many workers", code="relay")
        messages: dict[str, Any] = {}
        for other in others:
            match other:
                case [str(name), each]:
                    messages[name] = each
                case _:
                    raise ProtocolError("a malformed message to many workers", code="relay")
        own, answers = await asyncio.gather(
            self._serve(kind, caller, message, timeout), self._pass_on(kind, messages, PASSED_ON * timeout, caller.principal)
        )
        return [own, *answers]

    async def _serve(self, kind: int, caller: PeerIdentity, message: Any, timeout: float) -> list[Any]:
        core = self._core
        try:
            return [core.name, False, await self._servers[kind](caller, message, timeout)]
        except Exception as error:
            return [core.name, True, to_wire(error, core.name, Kind(kind).name.lower(), core.entropy(8).hex())]

    async def _pass_on(self, kind: int, messages: Mapping[str, Any], timeout: float, principal: str) -> list[list[Any]]:
        parts = branches(list(messages.items()))
        asked = [self._core.request(part[0][0], Kind.RELAY, (kind, [list(each) for each in part]), timeout, principal) for part in parts]
        found: list[list[Any]] = []
        for answers in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answers, list):
                found += answers
            elif not isinstance(answers, (DistributedError, MemoryError)):
                raise answers
        return found
