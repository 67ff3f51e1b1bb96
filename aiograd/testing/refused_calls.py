"""Calls of an event loop that open sockets, pipes or processes, which a simulated loop refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from aiograd.errors import LoopError

_SOCKET_CALLS = (name for name in dir(asyncio.AbstractEventLoop) if name.startswith("sock_"))
#: the names of the calls
REFUSED = (
    "add_reader", "add_writer", "connect_accepted_socket", "connect_read_pipe", "connect_write_pipe", "create_connection", "create_datagram_endpoint",
    "create_server", "create_unix_connection", "create_unix_server", "getaddrinfo", "getnameinfo", "sendfile", "start_tls", "subprocess_exec",
    "subprocess_shell", *_SOCKET_CALLS,
)


def refused(name: str) -> Callable[..., Any]:
    """A method in the place of `name` that raises LoopError."""

    def refuse(self: object, *args: Any, **kwargs: Any) -> Any:
        raise LoopError(
            f"{name}: a simulated loop opens no sockets, pipes or processes, since it could not repeat what they do. "
            "Give the code under test a transport that needs none, or run it on a real loop."
        )

    refuse.__name__ = name
    refuse.__doc__ = """Refused on this loop.

    Args:
        *args: no matter.
        **kwargs: no matter.

    Returns:
        Nothing.

    Raises:
        LoopError: always.
    """
    return refuse
