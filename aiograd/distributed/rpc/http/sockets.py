"""Waiting for connections and bytes of a socket, and the number of bytes that wait in it."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import sys
import termios
from typing import Any

_UNREAD = getattr(termios, "FIONREAD", None)


async def readable(connection: socket.socket) -> None:
    """Wait until something waits in a socket: bytes, its end, or a connection. Cancelling stops the wait."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(connection)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def accepted(listener: socket.socket) -> tuple[socket.socket, Any]:
    """The next connection of a listening socket, and the address that it comes from.

    Cancelling stops the wait and drops no connection, as `sock_accept` of a loop does where one comes in the same turn.

    Raises:
        OSError: it cannot be accepted, as where no descriptor is left.
    """
    while True:
        try:
            return listener.accept()
        except (BlockingIOError, InterruptedError):
            await readable(listener)


def unread_bytes(connection: Any) -> int:
    """Bytes of a socket that have come and were not read; 0 where the system does not say.

    Args:
        connection: the socket; None: not known.
    """
    if connection is None or _UNREAD is None:
        return 0
    try:
        return int.from_bytes(fcntl.ioctl(connection.fileno(), _UNREAD, bytes(4)), sys.byteorder)
    except (OSError, ValueError):  # it is closed
        return 0
