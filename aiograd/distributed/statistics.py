"""Statistics of a worker, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiograd.distributed.rpc.statistics import EndpointStatistics, PeerStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """Counts of a worker's open objects and of its work so far. Sizes in bytes."""

    name: str
    #: contexts that are open, passes that run, calls that are being served in contexts
    contexts: int
    passes: int
    calls: int
    #: functions that still run although their calls were given up; each occupies a thread
    stuck: int
    #: objects held for remote references
    references: int
    #: passes whose outcome could not be learnt
    in_doubt: int
    #: passes with a part on this worker, by outcome
    passes_committed: int
    passes_aborted: int
    #: bytes of messages that are being received or served
    bytes_held: int
    #: bytes of frames, to and from peers that are connected
    bytes_in: int
    bytes_out: int
    #: one entry per peer session
    peers: tuple[PeerStatistics, ...] = field(repr=False)  # `network` shows them
    network: EndpointStatistics
