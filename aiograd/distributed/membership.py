"""Membership: a worker's membership in a cluster, and the requests that the coordinator of a cluster may send to its workers.

Note [Leader]
    A worker that a cluster starts, or that joins one, has a leader: the cluster's coordinator, by name and principal. Only the leader may tell
    it the URLs of its peers, that the cluster is closed, or to restart. A worker that the user opened himself has no leader and rejects these
    requests. A worker sends one kind of request to a coordinator: to join. The coordinator of a `JoinCluster` serves it; any other worker rejects it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from aiograd.distributed.calls import Calls
from aiograd.distributed.messages.library import Dismiss, JoinRequest, Restart, SetPeers
from aiograd.distributed.rpc.endpoint import Endpoint
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.errors import NotExposedError


class PeerDirectory(Protocol):
    """The interface of a worker to its membership."""

    @property
    def endpoint(self) -> Endpoint:
        """The worker's place in the network."""

    def add_peer(self, name: str, url: str) -> None:
        """Set the URL of a peer."""

    def remove_peer(self, name: str) -> None:
        """Remove a peer."""


class Membership:
    """A worker's membership in a cluster; see Note [Leader].

    Args:
        owner: the worker.
        name, principal: name and principal of the worker.
        calls: the `Calls` that serve the library's own functions.
    """

    def __init__(self, owner: PeerDirectory, name: str, principal: str, calls: Calls) -> None:
        self._owner = owner
        self._name = name
        self._principal = principal
        #: name of the coordinator that this worker belongs to
        self.leader: str | None = None
        #: set when the leader has closed its cluster
        self.dismissed: asyncio.Event = asyncio.Event()
        #: set when the leader wants this worker to restart
        self.restarting: asyncio.Event = asyncio.Event()
        #: set when the leader was lost
        self.leader_lost: asyncio.Event = asyncio.Event()
        #: on a coordinator: admits a worker, given its identity, URL and version
        self.on_join: Callable[[PeerIdentity, str, str], Awaitable[None]] | None = None
        #: on a coordinator: called with the name and the incarnation of a worker that was lost
        self.on_peer_lost: Callable[[str, bytes], None] | None = None
        calls.register({SetPeers: self._peers, Dismiss: self._dismiss, Restart: self._restart, JoinRequest: self._join})

    def _check_leader(self, caller: PeerIdentity) -> None:
        if self.leader is None or caller.name != self.leader or caller.principal != self._principal:
            belongs = "belongs to no cluster" if self.leader is None else f"is led by {self.leader}"
            raise NotExposedError(f"worker {self._name} {belongs}; {caller.name} does not lead it")

    def set_peers(self, message: SetPeers) -> None:
        """Take notice of where peers are. Sessions with earlier incarnations of them are lost: calls from now on meet the present ones."""
        for name, url in message.urls.items():
            if url is None:
                self._owner.remove_peer(name)
            else:
                self._owner.add_peer(name, url)
        for name, incarnation in (message.incarnations or {}).items():
            self._owner.endpoint.seen(PeerIdentity(name, incarnation, self._principal))

    async def _peers(self, caller: PeerIdentity, message: SetPeers) -> bool:
        self._check_leader(caller)
        self.set_peers(message)
        return True

    async def _dismiss(self, caller: PeerIdentity, message: Dismiss) -> bool:
        self._check_leader(caller)
        self.dismissed.set()
        return True

    async def _restart(self, caller: PeerIdentity, message: Restart) -> bool:
        self._check_leader(caller)
        self.restarting.set()
        return True

    def peer_lost(self, peer: PeerIdentity) -> None:
        """Another worker was lost."""
        if peer.principal != self._principal:
            return
        if peer.name == self.leader:
            self.leader_lost.set()
        if self.on_peer_lost is not None:
            self.on_peer_lost(peer.name, peer.incarnation)

    async def _join(self, caller: PeerIdentity, message: JoinRequest) -> bool:
        if self.on_join is None or caller.principal != self._principal:
            raise NotExposedError(f"worker {self._name} takes in no workers: it is not the coordinator of a JoinCluster")
        await self.on_join(caller, message.url, message.version)
        return True
