"""Somebody who speaks the protocol by hand: with a key or without, and with no intention to keep to the rules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Any

from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc.codec import WireReference, encode
from aiograd.distributed.rpc.frames import FrameKind, pack_header
from aiograd.distributed.rpc.handshake import Dialler, Secured
from aiograd.distributed.rpc.keyring import Key
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Channel
from aiograd.errors import DistributedError

LIMITS = Limits()


class Intruder:
    """One connection. What comes back is kept."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.received: list[bytes] = []
        self.sent: list[bytes] = []
        self.secured: Secured | None = None
        self._arrived = asyncio.Event()
        self._closed = asyncio.Event()
        channel.attach(self._receive, lambda why: self._closed.set(), lambda: None)

    def _receive(self, frame: bytes | memoryview) -> None:
        self.received.append(bytes(frame))
        self._arrived.set()

    # ---- bytes

    def send(self, record: bytes) -> None:
        """One frame of the channel, as it is."""
        self.sent.append(bytes(record))
        self.channel.send(record)

    async def answer(self, patience: float = 5.0) -> bytes:
        """The next thing that comes."""
        async with asyncio.timeout(patience):
            while not self.received:
                self._arrived.clear()
                await self._arrived.wait()
        return self.received.pop(0)

    async def closed(self, patience: float = 5.0) -> list[bytes]:
        """Wait until the other side hangs up; returns what it has said."""
        async with asyncio.timeout(patience):
            await self._closed.wait()
        return self.received

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def close(self) -> None:
        self.channel.close()

    # ---- the protocol

    async def greet(self, key: Key, sender: str, receiver: str) -> Secured:
        """The whole handshake, as it should be."""
        dialler = Dialler(sender, os.urandom(16), key, receiver, None, os.urandom, LIMITS)
        self.send(dialler.hello())
        self.send(dialler.receive(await self.answer()))
        self.secured = dialler.result
        return dialler.result

    def seal(self, *parts: bytes) -> bytes:
        """A record of one frame, made right."""
        assert self.secured is not None
        return bytes(self.secured.seal.seal(parts))

    def request(self, kind: int, value: Any, number: int = 1) -> bytes:
        """A record that asks for something."""
        return self.seal(*request_frame(kind, value, number))

    def heard(self) -> list[bytes]:
        """The frames in what has come since."""
        assert self.secured is not None
        frames = []
        while self.received:
            try:
                frames.append(bytes(self.secured.open.open(self.received.pop(0))))
            except DistributedError:
                continue
        return frames


def request_frame(kind: int, value: Any, number: int = 1) -> Sequence[bytes]:
    """A request of one frame: header and body."""
    return frame(FrameKind.REQUEST, number, b"".join(map(bytes, encode(value, LIMITS))), request_kind=kind)


def frame(kind: FrameKind, number: int, body: bytes = b"", **fields: int) -> Sequence[bytes]:
    """A frame: header and body."""
    fields.setdefault("total", len(body))
    if kind == FrameKind.REQUEST:
        fields.setdefault("deadline_ms", 5000)
    return pack_header(kind, number, (body,), **fields), body


def requests_about(context: bytes, origin: str = "a") -> list[tuple[Kind, Any]]:
    """A request of each kind, about a context and a pass."""
    return [
        (Kind.CALL, ("note", [1], {}, True, (context, origin, (-1,), 0, False))),
        (Kind.CALL, ("note", [1], {}, True, (context, origin, (-1,), 0, True))),
        (Kind.CALL, ("note", [1], {}, True, None)),
        (Kind.CALL, ("aiograd.reference.create", ["Thing", [], {}], {}, True, None)),
        (Kind.MARK, (context, origin, 1, [1])),
        (Kind.GRADIENT, (context, origin, 1, (1, [None], 0), 0, [])),
        (Kind.COMMIT, (context, origin, 1)),
        (Kind.ABORT, (context, origin, 1, "because")),
        (Kind.OUTCOME, (context, origin, 1)),
        (Kind.RELEASE, (context,)),
        (Kind.RENEW, ([(context, 1)],)),
        (Kind.COLLECTIVE, ("join", "group", [origin, "b"], bytes(16))),
        (Kind.POST, (WireReference("b", context, context, "Thing"), [1], True)),
        (Kind.RELAY, (int(Kind.COMMIT), [("b", (context, origin, 1))])),
        (Kind.WAITS, (True,)),
    ]
