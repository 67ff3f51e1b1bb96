"""Multicast: one message to many workers, by a tree of them. See Note [A tree of receivers] in `aiograd.transaction.tree`.

A worker that is reached handles the message, sends it on to the others of its branch at the same time, and answers for all. Requests of few classes
can be sent this way, which are registered with `Multicast.register`: they may arrive twice, and mean the same from any worker of the principal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from aiograd.coordination.malformed import malformed
from aiograd.coordination.message_code import shown
from aiograd.coordination.message_form import WireMessage, encode, encode_answer, parse_answer
from aiograd.distributed.error_wire import from_wire, to_wire
from aiograd.distributed.messages.calls import Relay, RelayedAnswer, RelayedMessage
from aiograd.distributed.messages.requests import REQUESTS
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import DistributedError
from aiograd.transaction.tree import branches

#: share of the time that the tree may take; the rest is for workers that it has not reached
SHARE = 0.5
#: share of its time in which a worker that passes a message on waits for the workers behind it, so that it can still answer
PASSED_ON = 0.9

#: serves a message: called with the identity of the worker that sends it, the message, and the seconds that are left
Server = Callable[[PeerIdentity, Any, float], Awaitable[Any]]


class MulticastWorker(Protocol):
    """The part of a worker that multicasts use."""

    name: str

    @property
    def entropy(self) -> Callable[[int], bytes]:
        """Makes random bytes."""

    def ask(self, peer: str, message: WireMessage, timeout: float, principal: str | None = None) -> Coroutine[Any, Any, Any]:
        """Send a request to another worker; returns its answer."""

    def serve(self, servers: Mapping[type[WireMessage], Server]) -> None:
        """Serve requests, by their classes."""


class Multicast:
    """The multicasts of a worker.

    Args:
        core: the worker.
    """

    def __init__(self, core: MulticastWorker) -> None:
        self._core = core
        self._servers: dict[type[WireMessage], Server] = {}
        core.serve({Relay: self._on_relay})

    def register(self, request: type[WireMessage], server: Server) -> None:
        """Let requests of a class come by way of others.

        Args:
            request: the class.
            server: serves one, from any worker of the principal.
        """
        self._servers[request] = server

    async def spread(self, messages: Mapping[str, WireMessage], timeout: float, principal: str) -> dict[str, Any]:
        """Send workers a message each.

        Cancelling stops the waiting; some may have been reached.

        Args:
            messages: by the name of the worker; all of one class, which is registered.
            timeout: seconds.
            principal: the principal that sends.

        Returns:
            The answer of each worker that was reached, or the exception that it has answered with. Others are missing, and may have been reached.
        """
        found: dict[str, Any] = {}
        if not messages:
            return found
        request = type(next(iter(messages.values())))
        relayed = [RelayedMessage(name, encode(message)) for name, message in messages.items()]
        for answer in await self._pass_on(request.form.kind, relayed, SHARE * timeout, principal):
            name = answer.name
            if name in messages:
                found[name] = from_wire(answer.value, name) if answer.failed else parse_answer(request, answer.value, name)
        return found

    async def _on_relay(self, caller: PeerIdentity, relay: Relay, timeout: float) -> list[RelayedAnswer]:
        own, *others = relay.messages
        if own.name != self._core.name:
            raise malformed(Relay.form, shown(own.name), repr(self._core.name), "messages[0].name")
        answers = await asyncio.gather(
            self._serve(relay.request_kind, caller, own.value, timeout),
            self._pass_on(relay.request_kind, others, PASSED_ON * timeout, caller.principal),
        )
        return [answers[0], *answers[1]]

    async def _serve(self, kind: int, caller: PeerIdentity, value: Any, timeout: float) -> RelayedAnswer:
        core = self._core
        try:
            message = REQUESTS.parse(kind, value)
            request = type(message)
            if request not in self._servers:
                expected = " or ".join(sorted({each.form.kind.name for each in self._servers}))
                raise malformed(Relay.form, request.form.name, f"{expected}, which go by way of other workers", "request_kind")
            return RelayedAnswer(core.name, False, encode_answer(request, await self._servers[request](caller, message, timeout)))
        except Exception as error:
            return RelayedAnswer(core.name, True, to_wire(error, core.name, REQUESTS.name_of(kind), core.entropy(8).hex()))

    async def _pass_on(self, kind: int, messages: list[RelayedMessage], timeout: float, principal: str) -> list[RelayedAnswer]:
        """Send messages on by the first workers of their branches; returns the answers of the workers that were reached."""
        asked = [self._core.ask(branch[0].name, Relay(int(kind), list(branch)), timeout, principal) for branch in branches(messages)]
        found: list[RelayedAnswer] = []
        for answers in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answers, list):
                found += answers
            elif not isinstance(answers, (DistributedError, MemoryError)):
                raise answers
        return found
