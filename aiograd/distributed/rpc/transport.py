"""Transport and Channel: the carriers of frames between workers. HTTP is one transport, the simulated network another.

A channel moves whole frames and knows nothing of their content: the peer's identity, encryption, retries and heartbeats are decided above
it, so that every transport gets them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from aiograd.distributed.rpc.shared.allowance import SharedMemory

Buffer: TypeAlias = bytes | bytearray | memoryview


class Channel(Protocol):
    """A connection that carries frames both ways, each once and in order, until it is closed; frames on their way then may be lost.

    All calls and callbacks are made on the event loop.

    >>> transport = dist.HttpTransport()
    >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
    >>> channel: dist.Channel = await transport.connect(url, timeout=5.0)
    >>> channel.send(b"a frame")
    True
    >>> await transport.aclose()
    """

    #: where the peer is, for logs
    remote: str
    #: the names in the peer's verified certificate; None without mutual TLS
    certified_names: frozenset[str] | None
    #: the shared memory of this side's worker, where the peer seems to be a process of the same machine
    shared_memory: SharedMemory | None

    def attach(
        self, on_frame: Callable[[bytes | memoryview], None], on_closed: Callable[[BaseException | None], None], on_writable: Callable[[], None]
    ) -> None:
        """Say what to call; frames that arrived before are delivered now. `on_closed` is called exactly once, also after `close`.

        May be called again, to hand the channel on.

        Args:
            on_frame: called with each frame.
            on_closed: called with the error, or None.
            on_writable: called when there is room again after `send` has returned False.
        """

    def send(self, frame: Buffer, more: bool = False) -> bool:
        """Queue one frame; never blocks or raises (after the channel has closed, frames vanish).

        Args:
            frame: the bytes.
            more: further frames follow at once, or `flush`: a small frame may wait for them and leave in one packet with them.

        Returns:
            False where the sender should stop until `on_writable` is called.
        """

    def flush(self) -> None:
        """Let frames leave that wait for more."""

    @property
    def heard_at(self) -> float:
        """Time of the loop at which something last came from the peer, a part of a frame as well; bytes that wait to be read count."""

    def pace(self, frame_bytes: int) -> None:
        """Frames have another length from now on: two of them are enough to take ahead, before `send` says that the sender should stop.

        Args:
            frame_bytes: bytes of a frame.
        """

    def close(self) -> None:
        """Close at once; queued frames may be lost. Idempotent."""


class Transport(Protocol):
    """Listens and connects for one worker.

    >>> transport: dist.Transport = dist.HttpTransport()
    >>> len(transport.entropy(16))
    16
    """

    def entropy(self, count: int) -> bytes:
        """Unguessable bytes (in a simulation: drawn from its seed).

        Args:
            count: how many bytes.

        Returns:
            The bytes.
        """

    async def listen(self, host: str, port: int, accept: Callable[[Channel], None]) -> str:
        """Accept connections; returns the URL under which peers reach this worker.

        Args:
            host: the address.
            port: 0 for any that is free.
            accept: called with the channel of each connection.

        Returns:
            The URL.

        Cancelling stops listening.

        >>> transport: dist.Transport = dist.HttpTransport()
        >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
        >>> url.startswith("http://127.0.0.1:")
        True
        >>> await transport.aclose()
        """

    async def connect(self, url: str, timeout: float) -> Channel:
        """Open a channel to the worker at `url`.

        Args:
            url: of the worker.
            timeout: seconds for all of it.

        Returns:
            The channel.

        Raises:
            ConnectionRefusedError: no process listens there: it is gone.
            OSError, TimeoutError: it cannot be reached now.

        Cancelling closes the channel.

        >>> transport: dist.Transport = dist.HttpTransport()
        >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
        >>> channel = await transport.connect(url, timeout=5.0)
        >>> await transport.aclose()
        """

    async def aclose(self) -> None:
        """Close every channel and stop listening. Idempotent.

        Cancelling it may leave channels that are closing.

        >>> transport = dist.HttpTransport()
        >>> await transport.aclose()
        """


def unanswered_text(url: str, seconds: float) -> str:
    """The text of the error for a peer that does not answer, nor refuses."""
    return (
        f"connecting to {url}: no answer within {seconds:g} s; a firewall may drop what is sent there, or another kind of server may wait for "
        "something else: compare host and port with those that the worker listens on"
    )
