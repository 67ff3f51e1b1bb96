"""Worker: a process's (or a test's) place in a distributed computation.

Workers are objects with a lifetime, several may live in one process, and nothing about them is global.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

from aiograd.distributed.asking import serve_waits, why
from aiograd.distributed.autograd.backward import BackwardPasses
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.leases import ContextLeases
from aiograd.distributed.call_names import name_of_class
from aiograd.distributed.calls import Calls
from aiograd.distributed.collectives.group_server import GroupServer
from aiograd.distributed.context_block import ContextBlock
from aiograd.distributed.dashboard_options import DashboardOptions, read_options
from aiograd.distributed.membership import Membership
from aiograd.distributed.messages.library import CreateObject
from aiograd.distributed.monitoring import LazyMonitor
from aiograd.distributed.objects.module import RemoteModule
from aiograd.distributed.objects.object_server import ObjectServer
from aiograd.distributed.objects.optimizer_server import OptimizerServer
from aiograd.distributed.objects.reference_table import ReferenceTable
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.http import HttpTransport
from aiograd.distributed.rpc.http.addresses import parse_url
from aiograd.distributed.rpc.keyring import Keyring
from aiograd.distributed.rpc.keyring_file import keyring_of
from aiograd.distributed.rpc.limits import Limits
from aiograd.distributed.rpc.transport import Transport
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.distributed.service import Service
from aiograd.distributed.statistics import WorkerStatistics, statistics_of
from aiograd.distributed.waits import WaitReport
from aiograd.distributed.watchdog import WATCHDOG, watched
from aiograd.distributed.worker_core import WorkerCore
from aiograd.errors import ArgumentError, ArgumentTypeError, ContextError, DistributedError
from aiograd.running.caller import called
from aiograd.running.modes import no_grad


class Worker:
    """One participant of a distributed computation, which peers address by its name. Use it with ``async with``.

    ::

        async with dist.Worker("driver", peers={"left": "http://10.0.0.2:7000"}) as worker:
            async with worker.context() as ctx:
                y = await worker.call("left", "square", x)
                await ctx.backward(y.sum())
                print(ctx.grads[x])

    Args:
        name: 1 to 128 letters, digits, dots, dashes and underscores.
        service: the functions and classes that peers may use; None: none.
        host, port: address to listen on; port 0 takes a free one. An address that other machines can reach needs `ssl` or `allow_plaintext`.
        peers: URLs of other workers by name; `add_peer` adds more. Only one of two workers needs the other's URL; a worker that cannot be
            dialled is called over the connection that it has opened.
        secret: 32 bytes shared with the peers, in hexadecimal or base64 where it is text, or a Keyring; `read_secret_file` reads one. None takes
            the file named by ``AIOGRAD_SECRET_FILE``, else ``AIOGRAD_SECRET``, else a random secret of this process, whose workers
            then trust only each other. All traffic between workers is authenticated and encrypted with it.
        ssl: an ``ssl.SSLContext`` to serve TLS in addition.
        client_ssl: an ``ssl.SSLContext`` for connections to peers with a URL that begins with ``https``.
        trusted_hosts: further host names, as in peers' URLs, by which peers may dial this worker, besides its own host name and addresses.
        allow_plaintext: allow listening beyond this machine without TLS (messages are encrypted even then).
        limits: limits on requests of peers, and timeouts.
        encoding, gradient_encoding: reduced precision for floating-point values that this worker sends; off by default.
        transport: the transport of frames; None: HTTP.
        watchdog: False: the event loop is not watched, and neither the log nor the peers are told when it is held up.
        dashboard: True, or `DashboardOptions`, to serve a page at `dashboard_url` that shows what this worker and its peers do.

    Raises:
        ArgumentError, ArgumentTypeError: a name, a secret or a limit cannot be used.

    >>> await driver.call("left", "cubed", ag.tensor([1.0, 2.0]))
    tensor([1., 8.])
    """

    def __init__(
        self,
        name: str,
        *,
        service: Service | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        peers: Mapping[str, str] | None = None,
        secret: bytes | str | Keyring | None = None,
        ssl: Any = None,
        client_ssl: Any = None,
        allow_plaintext: bool = False,
        trusted_hosts: Collection[str] = (),
        limits: Limits | None = None,
        encoding: Encoding = Encoding.PLAIN,
        gradient_encoding: Encoding = Encoding.PLAIN,
        transport: Transport | None = None,
        watchdog: bool = True,
        dashboard: bool | DashboardOptions = False,
    ) -> None:
        if service is not None and not isinstance(service, Service):
            raise ArgumentTypeError(f"Worker(service=...): expected a dist.Service, found {type(service).__name__}")
        limits = limits or Limits()
        if transport is None:
            transport = HttpTransport(limits=limits, ssl=ssl, client_ssl=client_ssl, allow_plaintext=allow_plaintext, trusted_hosts=trusted_hosts)
        self._core = core = WorkerCore(
            self,
            name,
            service=service or Service(),
            keyring=keyring_of(secret),
            limits=limits,
            transport=transport,
            encoding=Encoding(encoding),
            gradient_encoding=Encoding(gradient_encoding),
        )
        self._passes = passes = BackwardPasses(core)
        self._contexts = passes.contexts
        self._leases = ContextLeases(core, self._contexts, passes.on_released)
        references = ReferenceTable(core.name, core.endpoint.incarnation, core.entropy, limits.references_per_principal)
        self._calls = Calls(core, self._contexts, self._leases, references)
        self._objects = ObjectServer(core, self._calls)
        OptimizerServer(core, self._calls, self._objects)
        self._groups = GroupServer(core)
        serve_waits(core)
        self._monitor = LazyMonitor(core, self._calls, read_options(dashboard))
        self._membership = Membership(self, core.name, core.principal, self._calls)
        core.on_lost.append(lambda identity, error: self._membership.peer_lost(identity))
        self._watched = watched(watchdog, transport)
        self._host = host
        self._port = port
        self._peers = dict(peers or {})
        for peer, url in self._peers.items():
            self._check_url(peer, url)
        self._url: str | None = None

    # ---------------------------------------------------------------- lifetime

    async def __aenter__(self) -> Self:
        self._url = await self._core.open(self._host, self._port)
        try:
            self._monitor.open()
            WATCHDOG.enter(self._core.endpoint, self._watched)
            for name, url in self._peers.items():
                self.add_peer(name, url)
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Release contexts, cancel requests that are being served, say goodbye to peers and stop listening. Idempotent.

        Cancelling it skips waiting for handlers to stop; everything is closed even then.

        >>> await right.aclose()
        """
        self._core.is_closing = True
        try:
            await self._monitor.aclose()
            await self._leases.aclose()
        finally:
            try:
                await self._core.aclose()
            finally:
                self._objects.clear()
                WATCHDOG.leave(self._core.endpoint)

    @property
    def name(self) -> str:
        """The worker's name."""
        return self._core.name

    @property
    def url(self) -> str:
        """The URL at which peers reach the worker.

        Raises:
            DistributedError: it has not been opened.
        """
        if self._url is None:
            raise DistributedError(f"worker {self.name!r} is not open: use `async with Worker(...) as worker`")
        return self._url

    @property
    def dashboard_url(self) -> str | None:
        """The URL of the worker's dashboard, with the token that opens it; None where it has none, or is not open."""
        return self._monitor.url

    @property
    def limits(self) -> Limits:
        """The limits on requests of peers, and timeouts."""
        return self._core.limits

    @property
    def endpoint(self) -> Endpoint:
        """The worker's endpoint in the network, for uses that `Worker` does not cover."""
        return self._core.endpoint

    @property
    def membership(self) -> Membership:
        """The worker's membership in a cluster, for authors of cluster classes."""
        return self._membership

    @property
    def groups(self) -> GroupServer:
        """The groups of the worker, for `join_group`."""
        return self._groups

    @property
    def profiler(self) -> Any:
        """The recorder of functions and passes that run here for peers: ``worker.profiler = p.recorder`` of a profile `p`, or None."""
        return self._core.profiler

    @profiler.setter
    def profiler(self, recorder: Any) -> None:
        self._core.profiler = recorder

    def __repr__(self) -> str:
        return f"<Worker {self.name} at {self._url or 'no address'}>"

    def add_peer(self, name: str, url: str, *, principal: str | None = None) -> None:
        """Set the URL of another worker, such as ``"http://10.0.0.2:7000"``; replaces an earlier one. Nothing is sent before the first call.

        Args:
            principal: the principal that this URL holds for, if tenants have different workers under one name; None: all principals
                without a URL of their own.
            name: its name.
            url: its URL.

        Raises:
            ArgumentError, ArgumentTypeError: a name or the URL cannot be used, or the name is this worker's own.
        """
        self._check_url(name, url)
        self._core.endpoint.add_peer(name, url, principal)

    def remove_peer(self, name: str) -> None:
        """Remove the URL of another worker, if it is known. A connection to it stays until one side closes it.

        Args:
            name: its name.
        """
        self._core.endpoint.remove_peer(name)

    def _check_url(self, name: str, url: str) -> None:
        if not isinstance(url, str):
            raise ArgumentTypeError(f"peer {name!r}: expected a URL such as 'http://10.0.0.2:7000', found {type(url).__name__}")
        if isinstance(self._core.endpoint.transport, HttpTransport):
            try:
                parse_url(url)
            except ArgumentError as error:
                raise ArgumentError(f"peer {name!r}: {error}") from None
        elif not _is_url(url):  # of another transport, which knows the rest
            raise ArgumentError(f"peer {name!r}: expected a URL with a scheme and a host, such as 'sim://name'")

    # ---------------------------------------------------------------- calls

    def call(self, peer: str, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """Call a function that `peer` exposes; inside a context gradients flow through the call.

        ``await asyncio.gather(worker.call(...), worker.call(...))`` makes several calls concurrently. Cancelling cancels the function on its worker.

        Args:
            peer: name of the worker (this one too).
            function: the name under which it is exposed.
            args, kwargs: None, bool, int (64 bit), float, complex, str, bytes, Tensor, RemoteRef, and lists, tuples and dicts (keys are str) of them.
            timeout: seconds for the whole call; never more than the time left to the request that is being served. `Limits.default_deadline`
                (60 s) by default.

        Returns:
            The result of the function. In a context, and unless grad mode is off here, its Tensors require grad if they did on the peer.

        Raises:
            NoContextError: an argument requires grad, and there is no context. RemoteError: the function raised, or does not take these
            arguments. NotExposedError: `peer` exposes no such function. UnknownPeerError: there is no URL for `peer`. WorkerLostError: it
            crashed, fell silent or cannot be reached. DeadlineError: it did not answer in time. ArgumentTypeError: an argument, named with its
            path, cannot be sent. AuthenticationError: the peer has another secret. HostRefusedError: it does not accept the name in its URL.
            AddressError, CertificateError: its URL or the certificates are wrong. Overloaded, LimitError, ContextReleasedError.
        """
        return called(self._calls.call(peer, function, list(args), kwargs, timeout), "Worker.call")

    async def call_apart(self, peer: str, function: str, /, *args: Any, timeout: float | None = None) -> Any:
        """Call a function as `call` does, but outside of any context: nothing is recorded. Cancelling cancels the function on its worker.

        Args:
            peer: name of the worker.
            function: name of the function.
            *args: its arguments.
            timeout: seconds; None: the worker's default.

        Returns:
            Its result, detached.

        >>> await driver.call_apart("left", "cubed", ag.tensor([1.0, 2.0]))
        tensor([1., 8.])
        """
        with no_grad():
            token = SCOPE.set(None)
            try:
                return await self._calls.call(peer, function, list(args), {}, timeout)
            finally:
                SCOPE.reset(token)

    async def remote(self, peer: str, cls: type[Any] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RemoteRef:
        """Make an instance of a class on `peer`, which exposes the class.

        ::

            ref = await worker.remote("left", "Counter", 3)
            await ref.call("increase")

        If cancelled midway, an instance may have been made; it lives until the peer's process ends.

        Args:
            peer: name of the worker.
            cls: the class or its name; only the name is sent.
            args, kwargs: arguments of the constructor, as for `call`.
            timeout: as for `call`.

        Returns:
            A reference to it. The instance lives until ``await ref.delete()``, or the end of its worker.

        Raises:
            NotExposedError: `peer` exposes no class of that name. ArgumentTypeError: `cls` is neither. Otherwise as `call`.

        >>> ref = await driver.remote("left", "Linear", 2, 1)
        >>> await ref.call("forward", ag.ones(1, 2))
        tensor([[2.]])
        """
        ref: RemoteRef = await self._calls.ask(peer, CreateObject(name_of_class("remote", cls), list(args), kwargs), timeout)
        return ref

    async def remote_module(self, peer: str, cls: type[Any] | str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> RemoteModule:
        """Make a module on `peer` and a `RemoteModule` that calls it: ``model = await worker.remote_module("left", "Model", 64)``.

        Arguments, cancellation and errors are as for `remote`.

        Args:
            peer: name of the worker.
            cls: the class, or its name.
            *args: arguments of the class.
            timeout: seconds; None: the worker's default.
            **kwargs: arguments by name.

        Returns:
            The module.

        >>> await driver.remote_module("left", "Linear", 2, 1)
        RemoteModule(Linear on left)
        """
        return RemoteModule(self, peer, await self.remote(peer, cls, *args, timeout=timeout, **kwargs))

    def refer(self, value: Any) -> RemoteRef:
        """A reference to an object of this worker, to be sent to others; it lives until it is deleted.

        Args:
            value: the object, of a class that the worker's service exposes or a Tensor.

        Returns:
            The reference.
        """
        return self._objects.refer(value)

    # ---------------------------------------------------------------- contexts

    def context(self) -> ContextBlock:
        """A new distributed context for an ``async with`` block; remote calls made in the block are recorded in it.

        Tasks that the block starts, `asyncio.gather` and ``ag.offload`` inherit it. Leaving the block releases it on every worker that knows it;
        calls and passes that still run in it are cancelled there. Contexts do not nest: code that a peer has called is in the context of its caller.

        Returns:
            An asynchronous context manager, which gives the `Context`.
        """
        return ContextBlock(self)

    @contextmanager
    def within(self, context: Context) -> Iterator[None]:
        """Make a context of this worker the current one, in code outside of its ``async with`` block.

        Args:
            context: the context.

        Returns:
            A context manager.

        Raises:
            ContextError: it is another worker's view of a context.
        """
        if context.here != self.name:
            raise ContextError(f"worker.within({context!r}): that is how worker {context.here} sees a context, and this is worker {self.name}")
        outer = SCOPE.get()
        scope = outer if outer is not None and outer.worker is self else Scope(self, None)
        token = SCOPE.set(scope._replace(context=context, principal=context.principal, is_in_pass=scope.is_in_pass and scope.context is context))
        try:
            yield
        finally:
            SCOPE.reset(token)

    async def why(self, peer: str | None = None, *, timeout: float = 1.0, with_known: bool = False) -> WaitReport:
        """Ask workers for their waits: for which work each waits, since when, and where that is a cycle. Also in the midst of a pass or step.

        Every worker is asked once, many of them by way of others; all answer for works of this worker's principal, and change nothing. Call it from
        another task than the one that waits. Cancelling stops the asking.

        Args:
            peer: name of a worker, this one or another: only its waits; None: the waits of this worker and of all that it knows.
            with_known: True: with `peer`, also the waits of all workers that `peer` knows, as it reports them.
            timeout: seconds for all answers; workers without an answer are named in `WaitReport.silent`.

        Returns:
            The report; its text shows cycles first.

        Raises:
            UnknownPeerError: there is no such worker. DistributedError: this worker is not open. ArgumentError, ArgumentTypeError: the timeout is no
            number above 0, or the name no text.

        >>> report = await driver.why("left", timeout=2.0)
        >>> print(str(report).partition(";")[0])
        0 waits, 0 cycles
        """
        return await why(self._core, peer, timeout, with_known=with_known)

    def statistics(self) -> WorkerStatistics:
        """Counts of open objects and running work, and of the work done so far.

        Returns:
            The counts, of this moment.
        """
        return statistics_of(self._core, self._calls, self._passes, len(self._objects.table))


@functools.lru_cache(maxsize=4096)  # in a cluster every worker gets the URLs of all others
def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.netloc)
    except ValueError:
        return False
