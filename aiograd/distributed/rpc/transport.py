"""Transport and Channel: what carries frames between workers. HTTP is one transport, the simulated network another.

A channel moves whole frames and knows nothing of what is in them: who the peer is, encryption, retries and heartbeats are decided above
it, so that every transport gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

Buffer: TypeAlias = bytes | bytearray | memoryview


class Channel(Protocol):
    """A connection that carries frames both ways, each once and in order, until it is closed; what is on its way then may be lost.

    All calls and callbacks are made on the event loop.
    """

    #: where the peer is, for logs
    remote: str
    #: the names in the peer's verified certificate; None without mutual TLS
    certified_names: frozenset[str] | None

    def attach(
        self, on_frame: Callable[[bytes | memoryview], None], on_closed: Callable[[BaseException | None], None], on_writable: Callable[[], None]
    ) -> None:
        """Say what to call; frames that arrived before are delivered now. `on_closed` is called exactly once, also after `close`.

        May be called again, to hand the channel on.
        """

    def send(self, frame: Buffer) -> bool:
        """Queue one frame; never blocks or raises (after the channel has closed, frames vanish).

        Returns:
            False where the sender should stop until `on_writable` is called.
        """

    def close(self) -> None:
        """Close at once; what is queued may be lost. Idempotent."""


class Transport(Protocol):
    """Listens and connects for one worker."""

    def entropy(self, count: int) -> bytes:
        """Unguessable bytes (in a simulation: drawn from its seed)."""

    async def listen(self, host: str, port: int, accept: Callable[[Channel], None]) -> str:
        """Accept connections; returns the URL under which peers reach this worker."""

    async def connect(self, url: str, timeout: float) -> Channel:
        """Open a channel to the worker at `url`.

        Raises:
            ConnectionRefusedError: nobody listens there: the process is gone.
            OSError, TimeoutError: it cannot be reached now.
        """

    async def aclose(self) -> None:
        """Close every channel and stop listening. Idempotent."""
