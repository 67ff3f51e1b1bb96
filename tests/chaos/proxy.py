"""A TCP proxy that does to a connection what bad networks do: delay, drip, lose, change, cut off, stall and swallow, as a seed draws it."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from random import Random
from typing import Literal, NamedTuple, get_args
from urllib.parse import urlsplit

#: what becomes of one direction of a connection after so many bytes
Fate = Literal["fine", "delay", "drip", "lose", "flip", "truncate", "reset", "half-close", "stall", "blackhole"]
FATES: tuple[Fate, ...] = get_args(Fate)
CHUNK = 1 << 14
#: seconds of a delay and of a stall, at most
DELAY, STALL = 0.1, 3.0
#: bytes per second of a connection that drips
DRIP = 20_000


class Plan(NamedTuple):
    """The fate of one direction of one connection."""

    fate: Fate = "fine"
    #: bytes that pass before it does
    after: int = 0
    #: of what has a length
    seconds: float = 0.0


class Proxy:
    """Listens on a port of its own and passes everything on to one address, in its way.

    Args:
        url: where to, ``http://host:port``.
        random: what happens to whom.
        rate: part of the connections, per direction, to which something happens.
        hits: counts fates.
    """

    def __init__(self, url: str, random: Random, rate: float, hits: Counter[str]) -> None:
        parts = urlsplit(url)
        self._target = parts.hostname or "", parts.port or 0
        self._random = random
        self._rate = rate
        self._hits = hits
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._healed = asyncio.Event()

    async def open(self) -> str:
        """Listen; returns the URL of the proxy."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=CHUNK)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def heal(self) -> None:
        """Do no more harm; what stood still goes on."""
        self._rate = 0.0
        self._healed.set()

    async def aclose(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    def draw(self) -> Plan:
        """The plan for the next direction of a connection."""
        if self._random.random() >= self._rate:
            return Plan()
        return Plan(self._random.choice(FATES[1:]), int(self._random.expovariate(1 / 4000)), self._random.uniform(0, STALL))

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._connections.add(task)
            task.add_done_callback(self._connections.discard)
        with contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                theirs, ours = await asyncio.open_connection(*self._target, limit=CHUNK)
            except OSError:
                _reset(writer)  # as if nobody listened
                return
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pass_on(reader, ours, writer, self.draw()))
                    group.create_task(self._pass_on(theirs, writer, ours, self.draw()))
            except* (OSError, _Over):
                pass
            finally:
                for each in (writer, ours):
                    each.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, back: asyncio.StreamWriter, plan: Plan) -> None:
        """One direction."""
        passed = 0
        while data := await reader.read(CHUNK):
            if plan.fate != "fine" and passed + len(data) > plan.after and not self._healed.is_set():
                at = max(0, plan.after - passed)
                if passed <= plan.after:
                    self._hits[plan.fate] += 1
                data = await self._strike(plan, data, at, writer, back)
            passed += len(data)
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()

    async def _strike(self, plan: Plan, data: bytes, at: int, writer: asyncio.StreamWriter, back: asyncio.StreamWriter) -> bytes:
        """Do it; returns what is left of `data`."""
        match plan.fate:
            case "delay":
                await self._wait(plan.seconds / STALL * DELAY)
            case "drip":
                await self._wait(len(data) / DRIP)
            case "lose":
                return data[:at] + data[at + 1 + int(plan.seconds * 100) :]
            case "flip":
                changed = bytearray(data)
                changed[min(at, len(data) - 1)] ^= 1 << int(plan.seconds * 100) % 8
                return bytes(changed)
            case "truncate" | "reset":
                writer.write(data[:at])
                if plan.fate == "reset":
                    _reset(writer)
                    _reset(back)
                raise _Over
            case "half-close":
                writer.write(data[:at])
                if writer.can_write_eof():
                    writer.write_eof()
                await self._wait(None)
                raise _Over
            case "stall":
                await self._wait(plan.seconds)
            case "blackhole":
                await self._wait(None)
        return data

    async def _wait(self, seconds: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._healed.wait(), seconds)


class _Over(Exception):
    """The connection ends."""


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close a connection so that the other side sees a reset."""
    connection = writer.get_extra_info("socket")
    if connection is not None:
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
