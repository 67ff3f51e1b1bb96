"""HttpTransport: listens for workers and dials them over HTTP, with WebSockets as channels."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import ssl as tls
from collections.abc import Callable, Collection, Coroutine

from aiograd.distributed.rpc.http.addresses import HostAllowList, bracket, is_loopback, parse_ip, parse_url, resolve, split_host
from aiograd.distributed.rpc.http.admission import Admission, ConnectionPermit
from aiograd.distributed.rpc.http.channel import WebSocketChannel
from aiograd.distributed.rpc.http.client import HttpClient
from aiograd.distributed.rpc.http.connection import MAX_LINE
from aiograd.distributed.rpc.http.pages import Site
from aiograd.distributed.rpc.http.server import HttpServer, certified_names
from aiograd.distributed.rpc.http.sockets import accepted
from aiograd.distributed.rpc.http.tls import TLS_WANTED, default_context, make_context, speaks_tls
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.shared.allowance import SharedMemory
from aiograd.distributed.rpc.shared.memory import IS_SUPPORTED
from aiograd.distributed.rpc.transport import Channel, unanswered_text
from aiograd.errors import ArgumentError, DistributedError
from aiograd.running.log_fields import structured_logger

logger = structured_logger("aiograd.distributed.rpc.http")

#: seconds after which accepting is tried again when the process has no descriptor left
ACCEPT_PAUSE = 0.5
#: seconds that open channels and requests get to end when the transport is closed
CLOSE_SECONDS = 1.5


class HttpTransport:
    """`Transport` over HTTP.

    Args:
        limits: sizes, times and numbers of connections.
        ssl: to listen with TLS. With ``verify_mode = CERT_REQUIRED`` it is mutual: the names in certificates then identify a peer, on accepted
            connections and on dialled ones.
        client_ssl: to dial peers whose URL says ``https``; the system's authorities by default. For mutual TLS it holds a certificate.
        allow_plaintext: allow listening on an address that others can reach without TLS (frames are encrypted all the same; health is not).
        trusted_hosts: names, beside its own, under which this worker may be addressed: ``name`` or ``name:port``. Where it listens on all
            addresses, the first one is the name in its URL.

    Raises:
        ArgumentError: a context allows TLS below 1.3, or an entry of `trusted_hosts` is no host name.

    >>> transport = dist.HttpTransport()
    >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
    >>> url.startswith("http://127.0.0.1:")
    True
    >>> await transport.aclose()
    """

    def __init__(
        self,
        limits: Limits | None = None,
        ssl: tls.SSLContext | None = None,
        client_ssl: tls.SSLContext | None = None,
        allow_plaintext: bool = False,
        trusted_hosts: Collection[str] = (),
    ) -> None:
        self._limits = Limits() if limits is None else limits
        self._ssl = _at_least_tls_1_3(ssl, "ssl")
        self._client_ssl = _at_least_tls_1_3(client_ssl, "client_ssl")
        self._is_mutual = ssl is not None and ssl.verify_mode is tls.CERT_REQUIRED
        self._allow_plaintext = allow_plaintext
        self._trusted_hosts = tuple(trusted_hosts)
        HostAllowList("localhost", 0, self._trusted_hosts)  # complain early
        self._admission = Admission(self._limits.connections, self._limits.connections_per_address)
        #: for peers of the same machine
        self.shared_memory: SharedMemory | None = SharedMemory(self._limits) if IS_SUPPORTED and self._limits.shared_bytes else None
        self._channels: set[WebSocketChannel] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._servers: list[HttpServer] = []
        self._sockets: list[socket.socket] = []
        self._client: HttpClient | None = None
        self._all_lost: asyncio.Event | None = None
        self._closed = False
        #: the pages for browsers and Prometheus, at every address that is listened to
        self.site: Site = Site()

    def entropy(self, count: int) -> bytes:
        """Random bytes of the operating system.

        Args:
            count: how many bytes.

        Returns:
            The bytes.
        """
        return os.urandom(count)

    def client_context(self) -> tls.SSLContext:
        """The context for peers whose URL says ``https``, in a thread that may wait for it.

        Returns:
            The context.
        """
        return self._client_ssl or make_context()

    @property
    def connections(self) -> int:
        """Accepted connections that are open."""
        return self._admission.open

    # ---- listening

    async def listen(self, host: str, port: int, accept: Callable[[Channel], None]) -> str:
        """Accept connections at one address; see `Transport.listen`. Cancelling stops listening.

        Args:
            host: an address, or a name of this machine, of which the first address is taken. Never wider than asked.
            port: 0 for any that is free.
            accept: called with each channel, before the peer is known.

        Returns:
            The URL.

        Raises:
            ArgumentError: no host, or one that others can reach without TLS and without `allow_plaintext`.
            OSError: the address is taken or not of this machine.
            DistributedError: the transport is closed.

        >>> transport = dist.HttpTransport()
        >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
        >>> url.startswith("http://127.0.0.1:")
        True
        >>> await transport.aclose()
        """
        if self._closed:
            raise DistributedError(f"listening on {host}:{port}: the transport is closed")
        if not host or not 0 <= port < 65536:
            raise ArgumentError(f"listening on {host!r}, port {port!r}: expected an address such as '127.0.0.1' and a port from 0 to 65535")
        address = host
        if parse_ip(host) is None:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
            address = str(found[0][4][0])
        if self._ssl is None and not self._allow_plaintext and not is_loopback(address):
            raise ArgumentError(
                f"listening on {host!r} ({address}), which other machines can reach, without TLS; "
                "pass ssl=..., or allow_plaintext=True where the network is your own"
            )
        listener = _bind(address, port, min(self._limits.connections, 1024))
        port = listener.getsockname()[1]
        hosts = HostAllowList(host, port, self._trusted_hosts)

        def upgrade(transport: asyncio.Transport, permit: ConnectionPermit, received: bytes) -> None:
            self._accept(transport, permit, received, accept)

        server = HttpServer(hosts, self._limits, secure=self._ssl is not None, upgrade=upgrade, site=self.site)
        self._servers.append(server)
        self._sockets.append(listener)
        self._start(self._serve(listener, server))
        return f"{'http' if self._ssl is None else 'https'}://{bracket(self._public_host(host))}:{port}"

    def _public_host(self, host: str) -> str:
        address = parse_ip(host)
        if address is None or not address.is_unspecified:
            return host
        return split_host(self._trusted_hosts[0])[0] if self._trusted_hosts else socket.gethostname()

    async def _serve(self, listener: socket.socket, server: HttpServer) -> None:
        while True:
            try:
                connection, source = await accepted(listener)
            except OSError as error:
                # Typically no descriptor is left. Open connections go on; the backlog waits.
                logger.warning("accepting a connection failed: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE)
                continue
            permit = self._admission.admit(source[0])
            if self._ssl is None:
                await self._establish(connection, server, permit)
            else:
                self._start(self._establish(connection, server, permit))

    async def _establish(self, connection: socket.socket, server: HttpServer, permit: ConnectionPermit) -> None:
        """Hand an accepted connection to HTTP, after the TLS handshake where there is one."""
        timeout = None
        try:
            connection.setblocking(False)
            if self._ssl is not None:
                timeout = self._limits.handshake_timeout
                task = asyncio.current_task()
                if task is not None:
                    permit.held_by(task.cancel)
                async with asyncio.timeout(timeout):
                    is_tls = await speaks_tls(connection)
                if not is_tls:
                    connection.recv(MAX_LINE)  # closing with something unread would drop the answer
                    connection.send(TLS_WANTED)
                    raise ConnectionAbortedError("it does not speak TLS")
            protocol = server.protocol(permit)
            try:
                await asyncio.get_running_loop().connect_accepted_socket(
                    lambda: protocol, connection, ssl=self._ssl, ssl_handshake_timeout=timeout
                )
            except BaseException:
                protocol.forget()
                raise
        except OSError as error:  # also of TLS, and timeouts
            logger.debug("a connection was lost before it asked for anything: %s", error)
            permit.release()
            connection.close()
        except BaseException:
            permit.release()
            connection.close()
            raise

    def _accept(self, transport: asyncio.Transport, permit: ConnectionPermit, received: bytes, accept: Callable[[Channel], None]) -> None:
        source = transport.get_extra_info("peername") or ("?", 0)
        channel = self._adopt(transport, received, f"{bracket(source[0])}:{source[1]}", masking=False, permit=permit)
        try:
            accept(channel)
        except Exception as error:  # a fault of ours, which must not become an HTTP answer
            asyncio.get_running_loop().call_exception_handler({"message": "accepting a channel failed", "exception": error})
            channel.close()

    # ---- dialling

    async def connect(self, url: str, timeout: float) -> WebSocketChannel:
        """Open a channel; see `Transport.connect`. Cancelling closes the channel.

        Args:
            url: ``http://host:port`` or ``https://host:port``.
            timeout: seconds for all of it.

        Returns:
            The channel.

        Raises:
            ArgumentError: the URL is no such URL.
            ConnectionRefusedError: no process listens there.
            PermissionError: its name resolves to addresses that are out of bounds.
            HostRefusedError: the worker does not answer to this name. Overloaded: it takes no more connections.
            AddressError: the host does not exist, or the URL says http for https or the other way round. CertificateError: a certificate does
            not satisfy one side.
            OSError: it cannot be reached, or no worker answers.
            TimeoutError: not in time.
            DistributedError: the transport is closed.

        >>> transport = dist.HttpTransport()
        >>> url = await transport.listen("127.0.0.1", 0, lambda channel: None)
        >>> channel = await transport.connect(url, timeout=5.0)
        >>> await transport.aclose()
        """
        peer = parse_url(url)
        if self._closed:
            raise DistributedError(f"connecting to {peer.url}: the transport is closed")
        if self._client is None:
            self._client = HttpClient()
        try:
            async with asyncio.timeout(timeout):
                context = (self._client_ssl or await default_context()) if peer.secure else None
                refused: OSError | None = None
                for address in await resolve(peer):
                    try:
                        transport, received = await self._client.open(peer, address, self.entropy(16), context)
                    except OSError as error:
                        if refused is None or not isinstance(error, ConnectionRefusedError):
                            refused = error
                        continue
                    return self._adopt(transport, received, peer.url, masking=True, permit=None)
        except TimeoutError:
            raise TimeoutError(unanswered_text(peer.url, timeout)) from None
        raise refused or OSError(f"connecting to {peer.url}: the name has no address")

    def _adopt(
        self, transport: asyncio.Transport, received: bytes, remote: str, *, masking: bool, permit: ConnectionPermit | None
    ) -> WebSocketChannel:
        def lost(channel: WebSocketChannel) -> None:
            self._channels.discard(channel)
            if not self._channels and self._all_lost is not None:
                self._all_lost.set()

        names = certified_names(transport) if self._is_mutual else None
        shared = self.shared_memory
        channel = WebSocketChannel(remote, self._limits, masking=masking, certified_names=names, on_lost=lost, permit=permit, shared=shared)
        self._channels.add(channel)
        channel.start(transport, received)
        return channel

    # ---- the end

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Stop listening, close every channel, end requests. Idempotent. Cancelling it leaves connections that close by themselves.

        >>> transport = dist.HttpTransport()
        >>> await transport.aclose()
        """
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for listener in self._sockets:
            listener.close()
        self._sockets.clear()
        servers, self._servers = self._servers, []
        await asyncio.gather(*(server.shutdown(0.1) for server in servers))
        if self._channels:
            self._all_lost = asyncio.Event()
            for channel in tuple(self._channels):
                channel.close()
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._all_lost.wait()
            except TimeoutError:
                logger.warning("%d connections did not close within %s s", len(self._channels), CLOSE_SECONDS)
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _bind(address: str, port: int, backlog: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listener.family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((address, port))
        listener.listen(backlog)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        advice = "; another process listens there: choose another port, or 0 for any free one" if error.errno == errno.EADDRINUSE else ""
        raise OSError(error.errno, f"listening on {bracket(address)}:{port}: {error.strerror}{advice}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _at_least_tls_1_3(context: tls.SSLContext | None, name: str) -> tls.SSLContext | None:
    if context is not None and context.minimum_version < tls.TLSVersion.TLSv1_3:
        raise ArgumentError(f"HttpTransport({name}=...): the context allows TLS below 1.3; set its minimum_version to ssl.TLSVersion.TLSv1_3")
    return context
