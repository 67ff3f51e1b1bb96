"""Pulses over HTTP: the route ``POST /pulse`` of a worker, and the way of a thread without an event loop to it.

A pulse (Note [Pulses] in `aiograd.distributed.rpc.pulse`) is a header of the request, in base64: requests have no body here, see Note [One head at
a time] in `connection`.
"""

from __future__ import annotations

import base64
import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable, Iterator

from aiohttp import web

from aiograd.distributed.rpc.http.addresses import allowed_addresses, parse_url
from aiograd.distributed.rpc.http.responses import refusal, taken
from aiograd.distributed.rpc.pulse import Pulse, PulseSender
from aiograd.running.log_fields import structured_logger

PULSE, HEADER = "/pulse", "Aiograd-Pulse"
#: seconds in which a pulse has to be answered
PATIENCE = 5.0

logger = structured_logger("aiograd.distributed.rpc.http")


def answer_pulse(take: Callable[[bytes], bool] | None, request: web.BaseRequest) -> web.Response:
    """The answer to a pulse of a peer: 204, or 403 where it is refused, 404 where none are taken."""
    if take is None:
        return refusal(404)
    try:
        message = base64.b64decode(request.headers.get(HEADER, ""), validate=True)
    except ValueError:
        message = b""
    if take(message):
        return taken()
    logger.debug("refused a pulse from %s: it is forged, of a session that has ended, or came before", request.remote)
    return refusal(403)


class PulseCarrier:
    """Carries pulses to peers, all at a time, each over a connection of its own. Only one thread uses it; nothing but `work` waits."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._posts: dict[PulseSender, _Post] = {}
        self._addresses: dict[str, str] = {}

    @property
    def is_busy(self) -> bool:
        """True while pulses are on their way."""
        return bool(self._posts)

    def post(self, sender: PulseSender, url: str, pulse: Pulse, context: Callable[[], ssl.SSLContext]) -> None:
        """Send a pulse, unless the one before is still on its way. A host name is looked up at the first one.

        Args:
            sender: makes it.
            url: of the peer.
            pulse: what it says.
            context: for a peer that speaks TLS.
        """
        if sender in self._posts:
            return
        try:
            peer = parse_url(url)
            if url not in self._addresses:
                found = socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)
                self._addresses[url] = allowed_addresses(peer, (str(entry[4][0]) for entry in found))[0] if peer.literal is None else peer.host
            text = f"POST {PULSE} HTTP/1.1\r\nHost: {peer.authority}\r\n{HEADER}: {base64.b64encode(sender.pulse(pulse)).decode()}\r\n"
            request = f"{text}Content-Length: 0\r\nConnection: close\r\n\r\n".encode()
            post = _Post((self._addresses[url], peer.port), request, context() if peer.secure else None, peer.host)
        except (OSError, ValueError) as error:
            logger.debug("a pulse to %s cannot be sent: %s", url, error)
            return
        self._posts[sender] = post
        self._selector.register(post.socket.fileno(), selectors.EVENT_WRITE, sender)

    def work(self, seconds: float) -> None:
        """Let pulses go on, for so many seconds at most."""
        for key, _ in self._selector.select(seconds):
            sender: PulseSender = key.data
            try:
                self._selector.modify(key.fd, next(self._posts[sender].steps), sender)
            except StopIteration:
                self._end(sender)
            except (OSError, ValueError) as error:  # of TLS as well
                logger.debug("a pulse was not taken: %s", error)
                self._end(sender)
        now = time.monotonic()
        for sender in [sender for sender, post in self._posts.items() if post.until <= now]:
            self._end(sender)

    def close(self) -> None:
        """Give up what is on its way."""
        for sender in list(self._posts):
            self._end(sender)
        self._selector.close()

    def _end(self, sender: PulseSender) -> None:
        post = self._posts.pop(sender)
        self._selector.unregister(post.socket.fileno())
        post.socket.close()


class _Post:
    """One pulse on its way, over a connection that is being made."""

    def __init__(self, address: tuple[str, int], request: bytes, context: ssl.SSLContext | None, host: str) -> None:
        self.until = time.monotonic() + PATIENCE
        self.socket = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.connect_ex(address)  # an error is told when it has ended
        self.steps = self._go(request, context, host)

    def _go(self, request: bytes, context: ssl.SSLContext | None, host: str) -> Iterator[int]:
        """Runs each time the socket is ready, and says for what it is to be next."""
        error = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if context is not None:
            self.socket = connection = context.wrap_socket(self.socket, server_hostname=host, do_handshake_on_connect=False)
            while True:
                try:
                    connection.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield selectors.EVENT_READ
                except ssl.SSLWantWriteError:
                    yield selectors.EVENT_WRITE
        self.socket.sendall(request)  # less than a new connection takes
        while True:  # closing with an answer on its way could take the request back
            yield selectors.EVENT_READ
            try:
                self.socket.recv(1024)
                return
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
