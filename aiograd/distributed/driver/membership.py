"""Membership: a worker's part in a cluster, and what the driver of a cluster may ask of its workers.

Note [Leader]
    A worker that a cluster starts, or that joins one, has a leader: the cluster's driver, by name and principal. The leader, and nobody else,
    tells it where its peers are, that the cluster is closed, or to start anew. A worker that the user opened by hand has none and refuses all of it.
    What a worker asks of a driver is one thing: to be taken in. The driver of a `JoinCluster` answers that; any other worker refuses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Protocol

from aiograd.distributed.contexts import Caller
from aiograd.distributed.identity import Identity
from aiograd.errors import ArgumentTypeError, NotExposedError

if TYPE_CHECKING:
    from aiograd.distributed.driver.calls import Builtin

#: asks a worker to know peers: ``{name: url}``; None as a URL makes it forget one
PEERS = "aiograd.cluster.peers"
#: tells a worker that its cluster is closed
DISMISS = "aiograd.cluster.dismiss"
#: asks a worker to start anew, without its state
RESTART = "aiograd.cluster.restart"
#: asks a driver to take a worker in: its URL and the version of the library
JOIN = "aiograd.cluster.join"


class Owner(Protocol):
    """What membership needs of its worker."""

    def add_peer(self, name: str, url: str) -> None:
        """Say where a peer is."""

    def remove_peer(self, name: str) -> None:
        """Forget where a peer is."""


class Membership:
    """A worker's part in a cluster; see Note [Leader].

    Args:
        owner: the worker.
        name, principal: of the worker.
        builtins: where the library's own functions are, by name; this adds its own.
    """

    def __init__(self, owner: Owner, name: str, principal: str, builtins: dict[str, Builtin]) -> None:
        self._owner = owner
        self._name = name
        self._principal = principal
        #: name of the driver that this worker belongs to
        self.leader: str | None = None
        #: set when the leader has closed its cluster
        self.dismissed = asyncio.Event()
        #: set when the leader wants this worker to start anew
        self.restarting = asyncio.Event()
        #: set when the leader was lost
        self.leader_lost = asyncio.Event()
        #: on a driver: takes a worker in, given who asks, its URL and its version
        self.on_join: Callable[[Caller, str, str], Awaitable[None]] | None = None
        #: on a driver: told the name and the incarnation of a worker that was lost
        self.on_peer_lost: Callable[[str, bytes], None] | None = None
        builtins.update({PEERS: self._peers, DISMISS: self._dismiss, RESTART: self._restart, JOIN: self._join})

    def _check_leader(self, caller: Caller) -> None:
        if self.leader is None or caller.name != self.leader or caller.principal != self._principal:
            belongs = "belongs to no cluster" if self.leader is None else f"is led by {self.leader}"
            raise NotExposedError(f"worker {self._name} {belongs}; {caller.name} does not lead it")

    async def _peers(self, caller: Caller, peers: dict[str, str | None]) -> bool:
        self._check_leader(caller)
        if not isinstance(peers, dict):
            raise ArgumentTypeError(f"peers is {type(peers).__name__}; expected a dict of URLs by name")
        for name, url in peers.items():
            if url is None:
                self._owner.remove_peer(name)
            else:
                self._owner.add_peer(name, url)
        return True

    async def _dismiss(self, caller: Caller) -> bool:
        self._check_leader(caller)
        self.dismissed.set()
        return True

    async def _restart(self, caller: Caller) -> bool:
        self._check_leader(caller)
        self.restarting.set()
        return True

    def peer_lost(self, peer: Identity) -> None:
        """Another worker was lost."""
        if peer.principal != self._principal:
            return
        if peer.name == self.leader:
            self.leader_lost.set()
        if self.on_peer_lost is not None:
            self.on_peer_lost(peer.name, peer.incarnation)

    async def _join(self, caller: Caller, url: str, version: str) -> bool:
        if self.on_join is None or caller.principal != self._principal:
            raise NotExposedError(f"worker {self._name} takes in no workers: it is not the driver of a JoinCluster")
        if not isinstance(version, str) or not isinstance(url, str):
            raise ArgumentTypeError("a malformed request to join a cluster")
        await self.on_join(caller, url, version)
        return True
