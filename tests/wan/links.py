"""Links between a coordinating process and workers that carry so many bytes per second: network namespaces with tbf, or a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import NamedTuple, Protocol
from urllib.parse import urlsplit

from tests.namespaces import Hosts

PORT = 7700


class Traffic(NamedTuple):
    """Bytes that a worker has sent and received."""

    up: int
    down: int


class ShapedLinks(Protocol):
    """The links of some workers."""

    #: description for the report
    kind: str

    async def open(self, number: int) -> None:
        """Make the link of worker `number`."""

    def command(self, number: int) -> list[str]:
        """Words to put before the command of a worker's process."""

    def listen(self, number: int) -> str:
        """The address that the worker listens on."""

    def url(self, number: int) -> str:
        """The URL of the worker for the coordinating process."""

    def traffic(self, number: int) -> Traffic:
        """The bytes so far."""

    async def aclose(self) -> None:
        """Remove all links."""


class Namespaces:
    """A network namespace for each worker, with a link that tbf shapes in both directions.

    Args:
        rate: bytes per second, either way.
    """

    kind = "network namespaces, tbf; bytes from the counters of the interfaces"

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._hosts = Hosts()

    async def open(self, number: int) -> None:
        """See `ShapedLinks`."""
        self._hosts.open(number)
        self._hosts.limit(number, self._rate)

    def command(self, number: int) -> list[str]:
        """See `ShapedLinks`."""
        return self._hosts.command(number)

    def listen(self, number: int) -> str:
        """See `ShapedLinks`."""
        return f"{self._hosts.address(number)}:{PORT}"

    def url(self, number: int) -> str:
        """See `ShapedLinks`."""
        return f"http://{self.listen(number)}"

    def traffic(self, number: int) -> Traffic:
        """See `ShapedLinks`."""
        up, down = (int((self._hosts.counters(number) / f"{direction}_bytes").read_text()) for direction in ("rx", "tx"))
        return Traffic(up, down)

    async def aclose(self) -> None:
        """See `ShapedLinks`."""
        self._hosts.close()


class Proxies:
    """A proxy before each worker, where namespaces are not permitted.

    Args:
        rate: bytes per second, either way, over all connections of a worker.
    """

    kind = "shaping proxies, in place of network namespaces; bytes from the proxies"

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._servers: dict[int, asyncio.Server] = {}
        self._listen: dict[int, str] = {}
        self._passed: dict[tuple[int, str], int] = {}
        self._free_at: dict[tuple[int, str], float] = {}
        self._connections: set[asyncio.Task[None]] = set()

    async def open(self, number: int) -> None:
        """See `ShapedLinks`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._listen[number] = f"127.0.0.1:{free.getsockname()[1]}"

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            if task is not None:
                self._connections.add(task)
                task.add_done_callback(self._connections.discard)
            parts = urlsplit(f"//{self._listen[number]}")
            with contextlib.suppress(OSError, asyncio.CancelledError):
                theirs, ours = await asyncio.open_connection(parts.hostname, parts.port)
                passing = [self._pass_on(number, "down", reader, ours), self._pass_on(number, "up", theirs, writer)]
                await asyncio.gather(*passing, return_exceptions=True)
                ours.close()
            writer.close()

        self._servers[number] = await asyncio.start_server(accept, "127.0.0.1", 0)

    async def _pass_on(self, number: int, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        key, loop = (number, direction), asyncio.get_running_loop()
        try:
            while data := await reader.read(4096):
                self._passed[key] = self._passed.get(key, 0) + len(data)
                self._free_at[key] = max(self._free_at.get(key, 0.0), loop.time()) + len(data) / self._rate
                await asyncio.sleep(self._free_at[key] - loop.time())
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    def command(self, number: int) -> list[str]:
        """See `ShapedLinks`."""
        return []

    def listen(self, number: int) -> str:
        """See `ShapedLinks`."""
        return self._listen[number]

    def url(self, number: int) -> str:
        """See `ShapedLinks`."""
        return f"http://127.0.0.1:{self._servers[number].sockets[0].getsockname()[1]}"

    def traffic(self, number: int) -> Traffic:
        """See `ShapedLinks`."""
        return Traffic(self._passed.get((number, "up"), 0), self._passed.get((number, "down"), 0))

    async def aclose(self) -> None:
        """See `ShapedLinks`."""
        for server in self._servers.values():
            server.close()
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
