"""Hosts of a simulated network, and the transport that code on a host uses.

A name stands for one incarnation at a time: a killed host stays dead, and a restart puts another incarnation under the same name.
"""

from __future__ import annotations

import asyncio
import contextvars
import errno
from collections.abc import Callable
from random import Random
from typing import Protocol

from aiograd.distributed.rpc.transport import Channel
from aiograd.errors import AiogradError, ArgumentError
from aiograd.testing.network.channel import SimulatedChannel
from aiograd.testing.network.link import SimulatedLink
from aiograd.testing.owner import HandleOwner, context_of

SCHEME = "sim://"
#: channels of a transport up to which closed ones are not looked for
FEW = 16


class HostKilledError(AiogradError, RuntimeError):
    """The host on which the code was running has been killed."""


class Net(Protocol):
    """The interface of the network to its hosts."""

    room: int

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the network is used on."""

    def link(self, source: str, target: str) -> SimulatedLink:
        """One direction between two hosts."""

    def find(self, name: str) -> Host | None:
        """The present incarnation."""

    def when_healed(self, callback: Callable[[], None]) -> None:
        """Call back when any link heals."""


class Host:
    """One incarnation of a named host."""

    def __init__(self, net: Net, name: str, incarnation: int, random: Random) -> None:
        self.name = name
        self.incarnation = incarnation
        self.owner: HandleOwner = HandleOwner(name if incarnation == 0 else f"{name}#{incarnation}")
        self.random = random
        #: open channels, as an ordered set
        self.channels: dict[SimulatedChannel, None] = {}
        self.listener: SimulatedTransport | None = None
        #: died without closing its connections, as when the power fails
        self.is_silent: bool = False
        #: when a frozen host goes on
        self.frozen_until: float = 0.0
        #: the futures that `spawn` returned
        self.outcomes: list[asyncio.Future[object]] = []
        self._net = net

    @property
    def is_replaced(self) -> bool:
        """True if another incarnation has taken the name."""
        return self._net.find(self.name) is not self

    def context(self) -> contextvars.Context:
        """A new, empty context in which code belongs to this host."""
        return context_of(self.owner)

    def die(self, silent: bool, now: float) -> None:
        """Drop everything; what runs on the host has been stopped already."""
        self.is_silent = silent
        self.listener = None
        for channel in list(self.channels):
            channel.crash(silent, now)
        outcomes, self.outcomes = self.outcomes, []
        for outcome in outcomes:
            if not outcome.done():
                outcome.set_exception(HostKilledError(f"host {self.name} was killed; what ran on it has no outcome"))
                outcome.exception()  # it may be that nothing awaits it

    def stop(self) -> None:
        """Close the listener and all channels."""
        self.listener = None
        for channel in list(self.channels):
            channel.close()


class SimulatedTransport:
    """The transport of one host, see `aiograd.distributed.rpc.transport.Transport`.

    Args:
        net: the network.
        host: the host that the code runs on.

    >>> network = ag.testing.SimulatedNetwork(seed=1)
    >>> type(network.transport("left")).__name__
    'SimulatedTransport'
    """

    def __init__(self, net: Net, host: Host) -> None:
        self._net = net
        self._host = host
        self._accept: Callable[[Channel], None] | None = None
        self._accept_context = host.context()
        self._channels: list[SimulatedChannel] = []
        #: the number of channels at which closed ones are dropped
        self._most = FEW

    def entropy(self, count: int) -> bytes:
        """Bytes drawn from the seed, other ones for each incarnation of each host.

        Args:
            count: how many bytes.

        Returns:
            The bytes.
        """
        return self._host.random.randbytes(count)

    async def listen(self, host: str, port: int, accept: Callable[[Channel], None]) -> str:
        """Accept connections under the name of the host; `host` and `port` have no effect. Does not wait.

        Args:
            host: no effect.
            port: no effect.
            accept: called with the channel of each connection.

        Returns:
            The URL, ``sim://name``.

        Raises:
            OSError: the host listens already.

        Cancelling it has no effect, for it does not wait.

        >>> network = ag.testing.SimulatedNetwork(seed=1)
        >>> await network.transport("left").listen("", 0, lambda channel: None)
        'sim://left'
        """
        self._net.loop  # noqa: B018 - refuses a second loop
        if self._host.listener not in (None, self):
            raise OSError(errno.EADDRINUSE, f"simulated network: {self._host.name} listens already; a host has one listener")
        if not self._host.owner.is_dead:
            self._host.listener = self
        self._accept = accept
        self._accept_context = context_of(self._host.owner, contextvars.copy_context())
        return SCHEME + self._host.name

    async def connect(self, url: str, timeout: float) -> Channel:
        """Open a channel to the host at `url`. Cancelling it closes the channel if there is one by then.

        Args:
            url: ``sim://name``.
            timeout: seconds.

        Returns:
            The channel.

        Raises:
            ArgumentError: `url` is not of the form ``sim://name``.
            ConnectionRefusedError: the host does not exist, does not listen, or was killed and not restarted.
            ConnectionResetError: a fault.
            TimeoutError: the link is cut, or the host is gone without a word.

        >>> network = ag.testing.SimulatedNetwork(seed=1)
        >>> left, right = network.transport("left"), network.transport("right")
        >>> await left.listen("", 0, lambda channel: print("accepted"))
        'sim://left'
        >>> channel = await right.connect("sim://left", timeout=1.0)
        accepted
        """
        if not url.startswith(SCHEME):
            raise ArgumentError(f"connect({url!r}): a simulated network has URLs like {SCHEME}w0, as `listen` returns them")
        target = url.removeprefix(SCHEME).partition(":")[0].rstrip("/")
        waiter: asyncio.Future[SimulatedChannel] = self._net.loop.create_future()
        self._dial(target, waiter)
        try:
            async with asyncio.timeout(timeout):
                return await waiter
        except TimeoutError as error:
            _discard(waiter)
            raise TimeoutError(f"simulated network: {self._host.name} did not reach {target} within {timeout:g} s") from error
        except asyncio.CancelledError:
            _discard(waiter)
            raise

    async def aclose(self) -> None:
        """Stop listening and close the channels of this transport. Does not wait. Idempotent.

        Cancelling it has no effect, for it does not wait.

        >>> network = ag.testing.SimulatedNetwork(seed=1)
        >>> left, right = network.transport("left"), network.transport("right")
        >>> await left.listen("", 0, lambda channel: print("accepted"))
        'sim://left'
        >>> await left.aclose()
        """
        if self._host.listener is self:
            self._host.listener = None
        channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    # ---- how a connection is made

    def _dial(self, target: str, waiter: asyncio.Future[SimulatedChannel]) -> None:
        """The first packet leaves; it is resent when a cut heals."""
        if waiter.done():
            return
        out, back = self._net.link(self._host.name, target), self._net.link(target, self._host.name)
        if out.is_down or back.is_down:
            out.hit("cut")
            self._net.when_healed(lambda: self._dial(target, waiter))
        else:
            self._later(out, contextvars.Context(), self._arrive, target, waiter)

    def _arrive(self, target: str, waiter: asyncio.Future[SimulatedChannel]) -> None:
        """The first packet is there, and the system of the other host answers it (not its process, which may be frozen)."""
        if waiter.done() or self._host.owner.is_dead:
            return
        net = self._net
        out, back = net.link(self._host.name, target), net.link(target, self._host.name)
        if out.is_down or back.is_down:
            self._dial(target, waiter)
            return
        host = net.find(target)
        listener = None if host is None else host.listener
        answer = self._host.context()
        if host is None or listener is None:
            if host is None or not host.is_silent:
                self._later(back, answer, _fail, waiter, ConnectionRefusedError(errno.ECONNREFUSED, f"no process listens at {target}"))
            return
        if back.faults.reset and back.chance(back.faults.reset):
            back.hit("reset")
            self._later(back, answer, _fail, waiter, ConnectionResetError(f"simulated network: the connection to {target} was reset"))
            return
        mine = SimulatedChannel(net.loop, self._host, SCHEME + target, net.room)
        theirs = SimulatedChannel(net.loop, host, SCHEME + self._host.name, net.room)
        mine.join(theirs, out)
        theirs.join(mine, back)
        self._keep(mine)
        net.loop.call_soon(listener._accepted, theirs, context=listener._accept_context)
        self._later(back, answer, _succeed, waiter, mine)

    def _accepted(self, channel: SimulatedChannel) -> None:
        if self._accept is None or self._host.listener is not self:
            channel.close()
            return
        self._keep(channel)
        self._accept(channel)

    def _keep(self, channel: SimulatedChannel) -> None:
        self._channels.append(channel)
        if len(self._channels) > self._most:
            self._channels = [other for other in self._channels if not other.is_closed]
            self._most = 2 * len(self._channels) + FEW

    def _later(self, link: SimulatedLink, context: contextvars.Context, callback: Callable[..., None], *arguments: object) -> None:
        loop = self._net.loop
        delay = link.delay(0, loop.time())
        if delay:
            loop.call_later(delay, callback, *arguments, context=context)
        else:
            loop.call_soon(callback, *arguments, context=context)


def _discard(waiter: asyncio.Future[SimulatedChannel]) -> None:
    """Close a channel that came when its waiter was cancelled."""
    if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
        waiter.result().close()


def _fail(waiter: asyncio.Future[SimulatedChannel], error: OSError) -> None:
    if not waiter.done():
        waiter.set_exception(error)


def _succeed(waiter: asyncio.Future[SimulatedChannel], channel: SimulatedChannel) -> None:
    if waiter.done():
        channel.close()
    else:
        waiter.set_result(channel)
