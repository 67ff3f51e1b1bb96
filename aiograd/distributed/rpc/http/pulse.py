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
from collections.abc import Callable, Generator
from typing import NamedTuple

from aiohttp import web

from aiograd.distributed.rpc.http.addresses import PeerAddress, allowed_addresses, parse_url
from aiograd.distributed.rpc.http.responses import refusal, taken
from aiograd.distributed.rpc.pulse import Pulse, Pulses
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
    """Carries pulses to peers, all at a time, each over a connection of its own. Only one thread uses it."""

    def __init__(self) -> None:
        self._selector = selectors.PollSelector()
        self._posts: dict[Pulses, _Post] = {}
        self._addresses: dict[str, str] = {}

    @property
    def is_busy(self) -> bool:
        """True while pulses are on their way."""
        return bool(self._posts)

    def post(self, pulses: Pulses, url: str, pulse: Pulse, context: Callable[[], ssl.SSLContext]) -> None:
        """Send a pulse to `url`, unless the last one is still on its way. A host name is looked up once; `context`: for TLS."""
        if pulses in self._posts:
            return
        try:
            peer = parse_url(url)
            address = self._addresses[url] = self._addresses.get(url) or _look_up(peer)
            connection = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
            post = _Post(connection.fileno(), _carry(connection, peer, address, pulses.make(pulse), context), time.monotonic() + PATIENCE)
            self._selector.register(post.descriptor, next(post.steps), pulses)
        except (OSError, ValueError) as error:
            logger.debug("a pulse to %s cannot be sent: %s", url, error)
            return
        self._posts[pulses] = post

    def work(self, seconds: float) -> None:
        """Let pulses go on, for so many seconds at most."""
        over = []
        for key, _ in self._selector.select(seconds):
            try:
                self._selector.modify(key.fd, next(self._posts[key.data].steps), key.data)
            except StopIteration:
                over.append(key.data)
            except (OSError, ValueError) as error:  # of TLS as well
                logger.debug("a pulse was not taken: %s", error)
                over.append(key.data)
        now = time.monotonic()
        self._end(over + [pulses for pulses, post in self._posts.items() if post.until <= now])

    def close(self) -> None:
        """Give up the pulses that are on their way."""
        self._end(list(self._posts))
        self._selector.close()

    def _end(self, ended: list[Pulses]) -> None:
        for pulses in ended:
            post = self._posts.pop(pulses, None)
            if post is not None:
                self._selector.unregister(post.descriptor)
                post.steps.close()


class _Post(NamedTuple):
    descriptor: int
    steps: Generator[int, None, None]
    until: float


def _look_up(peer: PeerAddress) -> str:
    if peer.literal is not None:
        return peer.host
    return allowed_addresses(peer, (str(entry[4][0]) for entry in socket.getaddrinfo(peer.host, peer.port, type=socket.SOCK_STREAM)))[0]


def _carry(
    connection: socket.socket, peer: PeerAddress, address: str, pulse: bytes, context: Callable[[], ssl.SSLContext]
) -> Generator[int, None, None]:
    """Runs each time the connection is ready, and says for what it is to be next; closes it in the end."""
    try:
        connection.setblocking(False)
        connection.connect_ex((address, peer.port))  # an error is told when it has ended
        yield selectors.EVENT_WRITE
        error = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        if peer.secure:
            connection = secured = context().wrap_socket(connection, server_hostname=peer.host, do_handshake_on_connect=False)
            while True:
                try:
                    secured.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    yield selectors.EVENT_READ
        head = f"POST {PULSE} HTTP/1.1\r\nHost: {peer.authority}\r\n{HEADER}: {base64.b64encode(pulse).decode()}\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())  # less than a new connection takes
        while True:  # closing with an answer on its way could take the request back
            yield selectors.EVENT_READ
            try:
                connection.recv(1024)
                return
            except (BlockingIOError, ssl.SSLWantReadError):
                continue
    finally:
        connection.close()
