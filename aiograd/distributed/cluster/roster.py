"""Roster: the workers of a cluster as its coordinator knows them: their addresses and states, and the announcements that are due.

Every cluster keeps one. The cluster starts processes, or waits for them, and says what happens; the roster introduces workers to each other, over
the same authenticated connections that calls take, wakes the callers that wait for a worker, and calls back.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from aiograd.coordination.message_form import WireMessage, encode
from aiograd.distributed.cluster.announcements import Announcements
from aiograd.distributed.messages.library import Dismiss, SetPeers
from aiograd.distributed.rpc.identity import PeerId
from aiograd.distributed.worker import Worker
from aiograd.errors import DistributedError, UnknownPeerError, WorkerLostError

#: seconds that a worker has to take notice of its peers
TELL_SECONDS = 10.0

LostCallback = Callable[[str, int], None]
ReturnCallback = Callable[[str, str], None]


class Member:
    """One worker of a cluster."""

    __slots__ = ("name", "url", "incarnation", "has_predecessor", "ended", "is_running", "is_returning", "was_lost", "changed")

    def __init__(self, name: str) -> None:
        self.name = name
        #: its URL; empty until it listens
        self.url = ""
        #: of the process that listens there, see `PeerIdentity`
        self.incarnation = b""
        #: True if another process had the name before: only then may others have sessions with one that has ended
        self.has_predecessor = False
        #: True if it listens and has been introduced to the others, as far as is known
        self.is_running = False
        #: the exit status, negative for a signal, of the process that is this worker now
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        #: True if it will be started again
        self.is_returning = True
        #: true from a loss until it has been introduced again, however many attempts that takes
        self.was_lost = False
        #: set, and replaced, with each change
        self.changed = asyncio.Event()


class Roster:
    """The workers of a cluster.

    Args:
        kind: the class of the cluster, for errors.
        driver: the worker that leads it; opened.
        on_lost: called with name and exit status when a worker is lost.
        on_return: called with name and URL when it is back.
        is_local: True if all workers reach the driver at its URL. They are told the URL, so that they can tell it when their loops are held up.
    """

    def __init__(
        self, kind: str, driver: Worker, on_lost: LostCallback | None = None, on_return: ReturnCallback | None = None, *, is_local: bool = False
    ) -> None:
        self.kind = kind
        self.driver = driver
        self._known = {driver.name: driver.url} if is_local else {}
        self._on_lost = on_lost
        self._on_return = on_return
        self._members: dict[str, Member] = {}
        self._announcements = Announcements[Member | None](
            lambda name, news: self._ask(name, _whereabouts(news)), lambda: list(self.urls), lambda: driver.endpoint.context
        )

    # ---------------------------------------------------------------- what there is

    @property
    def names(self) -> tuple[str, ...]:
        """Names, in the order in which they were added."""
        return tuple(self._members)

    @property
    def urls(self) -> dict[str, str]:
        """Where each worker listens that has listened so far."""
        return {member.name: member.url for member in self._members.values() if member.url}

    def peers_of(self, name: str) -> dict[str, str]:
        """The URLs that a worker of this name has to know, as far as they are known."""
        return self._known | {other: url for other, url in self.urls.items() if other != name}

    def member(self, name: str) -> Member:
        """The worker of this name.

        Raises:
            UnknownPeerError: there is none.
        """
        member = self._members.get(name)
        if member is None:
            raise UnknownPeerError(f"{self.kind} has no worker {name!r}; it has {', '.join(self._members) or 'none now'}")
        return member

    def add(self, name: str) -> Member:
        """Room for a worker; it is introduced when it listens."""
        return self._members.setdefault(name, Member(name))

    # ---------------------------------------------------------------- what happens

    async def introduce(self, name: str, url: str, incarnation: bytes) -> None:
        """Introduce a worker that listens, for the first time or again: tell it all addresses, and tell all workers its address.

        When this returns, sessions with an earlier process of its name have ended everywhere: calls that begin then meet this process.
        A worker that is lost meanwhile is passed over: it is told when it is back. Cancelled, some may not have been told.

        Args:
            name: of the worker.
            url: where it listens.
            incarnation: see `PeerIdentity`.

        Raises:
            WorkerLostError: it is `name` itself that is lost.
        """
        member = self.member(name)
        if member.ended.done():
            member.ended = asyncio.get_running_loop().create_future()
        member.has_predecessor = member.has_predecessor or member.incarnation not in (b"", incarnation)
        member.url, member.incarnation = url, incarnation  # from here on, so that two that are introduced at the same time are told of each other
        self.driver.membership.set_peers(_whereabouts({name: member}))
        others = {other.name: other for other in self._members.values() if other.url and other is not member}
        told = self._ask(name, _whereabouts(others, self._known)), self._announcements.announce(name, member)
        for result in await asyncio.gather(*told, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result
        if member.ended.done():
            raise WorkerLostError(f"worker {name} was lost while it was being introduced to the others", worker=name, stage="start")
        is_back, member.was_lost = member.was_lost, False
        member.is_running, member.is_returning = True, False
        self._wake(member)
        if is_back and self._on_return is not None:
            self._on_return(name, url)

    def lost(self, name: str, status: int, *, is_returning: bool, was_asked: bool = False) -> None:
        """A worker has ended; `on_lost` is called unless it `was_asked` to."""
        member = self.member(name)
        member.is_running, member.is_returning, member.was_lost = False, is_returning, True
        if not member.ended.done():
            member.ended.set_result(status)
            if self._on_lost is not None and not was_asked:
                self._on_lost(name, status)
        self._wake(member)

    async def forget(self, name: str) -> None:
        """Remove a worker from the cluster: it is not dialled any more."""
        member = self._members.pop(name)
        member.is_running = member.is_returning = False
        if not member.ended.done():
            member.ended.set_result(0)
        self._wake(member)
        self.driver.remove_peer(name)
        with contextlib.suppress(DistributedError):
            await self._announcements.announce(name, None)

    async def dismiss(self, seconds: float, *names: str) -> None:
        """Tell these workers, or all, that the cluster needs them no more; workers that cannot be reached in time find out by themselves."""
        running = [name for name in names or self._members if self.member(name).is_running]
        await asyncio.gather(*(self._ask(name, Dismiss(), timeout=seconds) for name in running), return_exceptions=True)

    async def ask(self, name: str, message: WireMessage) -> Any:
        """Send a worker a request of its leader, outside of any context of the caller."""
        return await self._ask(self.member(name).name, message)

    def _ask(self, name: str, message: WireMessage, timeout: float = TELL_SECONDS) -> Coroutine[Any, Any, Any]:
        return self.driver.call_apart(name, message.form.name, *encode(message), timeout=timeout)

    def is_connected(self, name: str) -> bool:
        """True if the driver has a connection to a worker, which is heard."""
        core = self.driver._core
        return core.endpoint.is_connected(PeerId(core.principal, self.member(name).name))

    # ---------------------------------------------------------------- waiting

    async def wait_lost(self, name: str) -> int:
        """Wait until this worker, as it now is, has ended; returns its exit status. Cancelling changes nothing."""
        return await asyncio.shield(self.member(name).ended)

    async def wait_running(self, name: str) -> None:
        """Wait until this worker runs. Cancelling changes nothing.

        Raises:
            WorkerLostError: it has ended, and is not started again.
        """
        member = self.member(name)
        while True:
            changed = member.changed
            if member.is_running:
                return
            if not member.is_returning:
                how = describe_status(member.ended.result()) if member.ended.done() else "removed"
                raise WorkerLostError(
                    f"worker {name} has ended ({how}) and nothing restarts it: call restart({name!r}), or give max_restarts",
                    worker=name, stage="restart",
                )  # fmt: skip
            await changed.wait()

    def _wake(self, member: Member) -> None:
        member.changed.set()
        member.changed = asyncio.Event()


def _whereabouts(members: Mapping[str, Member | None], known: Mapping[str, str] | None = None) -> SetPeers:
    urls = {name: None if member is None else member.url for name, member in members.items()}
    incarnations = {name: member.incarnation for name, member in members.items() if member is not None and member.has_predecessor}
    return SetPeers({**(known or {}), **urls}, incarnations or None)


def describe_status(status: int) -> str:
    """An exit status in words."""
    return f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
