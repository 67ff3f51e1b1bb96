"""Admission: how many connections are let in, in total and from one address. Counted where they are accepted."""

from __future__ import annotations

import ipaddress
from collections import Counter

from aiograd.distributed.http.addresses import parse_ip


class Admission:
    """Counts the connections that are open.

    Args:
        total: the most that may be open.
        per_address: the most from one address. Who has an IPv6 address has a whole network of them, which therefore counts as one.
    """

    __slots__ = ("_total", "_per_address", "_open")

    def __init__(self, total: int, per_address: int) -> None:
        self._total = total
        self._per_address = per_address
        self._open: Counter[str] = Counter()

    @property
    def open(self) -> int:
        """Connections that hold a ticket."""
        return self._open.total()

    def admit(self, address: str) -> Ticket | None:
        """A ticket for a connection from `address`, None where there are too many."""
        source = _source(address)
        if self._open.total() >= self._total or self._open[source] >= self._per_address:
            return None
        self._open[source] += 1
        return Ticket(self, source)

    def _release(self, source: str) -> None:
        self._open[source] -= 1
        if self._open[source] <= 0:
            del self._open[source]


class Ticket:
    """The right of one connection to be open. `release` may be called more than once."""

    __slots__ = ("_admission", "_source")

    def __init__(self, admission: Admission, source: str) -> None:
        self._admission: Admission | None = admission
        self._source = source

    def release(self) -> None:
        admission, self._admission = self._admission, None
        if admission is not None:
            admission._release(self._source)


def _source(text: str) -> str:
    address = parse_ip(text.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return text
