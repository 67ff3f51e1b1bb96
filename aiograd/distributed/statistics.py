"""Statistics of a worker, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiograd.distributed.rpc.statistics import EndpointStatistics, PeerStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """Counts of a worker's open objects and of its work so far. Sizes in bytes.

    Attributes:
        name: the worker's name.
        contexts: contexts that are open.
        passes: passes that run.
        calls: calls that are being served in contexts.
        stuck: functions that still run although their calls were abandoned; each occupies a thread.
        references: objects held for remote references.
        in_doubt: passes with an unknown outcome.
        passes_committed: committed passes with a part on this worker, and passes in which it has done its part and had nothing to commit.
        passes_aborted: aborted passes with a part on this worker.
        bytes_held: messages that are being received or served.
        bytes_in: frames from peers that are connected.
        bytes_out: frames to peers that are connected.
        peers: one entry per peer session.
        network: counts of the worker's endpoint.

    >>> statistics = driver.statistics()
    >>> statistics.name, statistics.contexts, len(statistics.peers)
    ('driver', 0, 0)
    """

    name: str
    contexts: int
    passes: int
    calls: int
    stuck: int
    references: int
    in_doubt: int
    passes_committed: int
    passes_aborted: int
    bytes_held: int
    bytes_in: int
    bytes_out: int
    peers: tuple[PeerStatistics, ...] = field(repr=False)  # `network` shows them
    network: EndpointStatistics
