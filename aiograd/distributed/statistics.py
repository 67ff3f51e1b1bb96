"""Statistics of a worker, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiograd.distributed.driver.statistics import EndpointStatistics, PeerStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatistics:
    """What a worker has open and has done. Sizes in bytes."""

    name: str
    #: contexts that are open, passes that run, calls that are being served in contexts
    contexts: int
    passes: int
    calls: int
    #: functions that were given up and have not ended: each holds a thread
    stuck: int
    #: objects held for remote references
    references: int
    #: passes whose outcome could not be learnt
    in_doubt: int
    #: this worker's parts of passes that ended
    passes_committed: int
    passes_aborted: int
    #: bytes of messages on their way in or being worked on
    bytes_held: int
    #: bytes of frames, to and from peers that are connected
    bytes_in: int
    bytes_out: int
    #: one entry per conversation with a peer
    peers: tuple[PeerStatistics, ...] = field(repr=False)  # `network` shows them
    network: EndpointStatistics
