"""Admission: how many connections are let in, in total and from one address. Counted where they are accepted.

Note [Strangers and peers]
    A connection begins as a stranger's and becomes a peer's when its handshake is done. They are counted apart, since any computer can open
    connections and leave them idle: strangers are never refused, but if there are too many the oldest is closed, which has been silent for longest.
    Only peers are refused, and told why: a stranger without the key cannot keep out a peer with an address of its own.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Callable

from aiograd.distributed.rpc.http.addresses import parse_ip

#: of the peers that are let in, the part that may be strangers beside them; at least what one address may have
STRANGERS = 4
#: the statuses of HTTP with which a peer is refused: too many from its address, too many in all
TOO_MANY_HERE, TOO_MANY = 429, 503


class Admission:
    """Counts the connections that are open. See Note [Strangers and peers].

    Args:
        total: the most peers.
        per_address: the most peers from one address, and the most strangers. An owner of an IPv6 address has a whole network of them, which therefore
            counts as one.
    """

    __slots__ = ("_total", "_per_address", "_most_strangers", "_peers", "_strangers")

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._most_strangers = max(total // STRANGERS, min(total, per_address))
        self._peers: Counter[str] = Counter()
        #: oldest first
        self._strangers: dict[ConnectionPermit, None] = {}

    @property
    def open(self) -> int:
        """Connections that hold a permit."""
        return self._peers.total() + len(self._strangers)

    def admit(self, address: str) -> ConnectionPermit:
        """A permit for a stranger's connection from `address`. Others may be evicted for it."""
        permit = ConnectionPermit(self, _source(address))
        same = [each for each in self._strangers if each.source == permit.source]
        if len(same) >= self._per_address:
            same[0].evict()
        elif len(self._strangers) >= self._most_strangers:
            next(iter(self._strangers)).evict()
        self._strangers[permit] = None
        return permit

    def refusal(self, source: str) -> int:
        """The status with which one more peer is refused, 0 where there is room."""
        if self._peers[source] >= self._per_address:
            return TOO_MANY_HERE
        return TOO_MANY if self._peers.total() >= self._total else 0

    def _promote(self, permit: ConnectionPermit) -> bool:
        if permit not in self._strangers:
            return True
        if self.refusal(permit.source):
            return False
        del self._strangers[permit]
        self._peers[permit.source] += 1
        return True

    def _release(self, permit: ConnectionPermit) -> None:
        if permit in self._strangers:
            del self._strangers[permit]
            return
        self._peers[permit.source] -= 1
        if self._peers[permit.source] <= 0:
            del self._peers[permit.source]


class ConnectionPermit:
    """The right of one connection to be open. `release` may be called more than once."""

    __slots__ = ("source", "_admission", "_close", "_is_evicted")

    def __init__(self, admission: Admission, source: str) -> None:
        #: where the connection comes from
        self.source = source
        self._admission: Admission | None = admission
        self._close: Callable[[], object] | None = None
        self._is_evicted = False

    def held_by(self, close: Callable[[], object]) -> None:
        """Say what closes the connection, should it be evicted; it is closed now if it has been."""
        self._close = close
        if self._is_evicted:
            close()

    def refusal(self) -> int:
        """The status with which the connection is refused to become a peer's; 0: it is not."""
        return 0 if self._admission is None else self._admission.refusal(self.source)

    def promote(self) -> bool:
        """The connection is a peer's from now on; False where there is no room for one."""
        return self._admission is None or self._admission._promote(self)

    def evict(self) -> None:
        """Close the connection, to make room."""
        self._is_evicted = True
        self.release()
        if self._close is not None:
            self._close()

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if not self._is_evicted:
            self._close = None
        if admission is not None:
            admission._release(self)


def _source(text: str) -> str:
    address = parse_ip(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return text
