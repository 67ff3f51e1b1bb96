"""Statistics of a worker, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiograd.distributed.autograd.backward import BackwardPasses
from aiograd.distributed.calls import Calls
from aiograd.distributed.rpc.statistics import EndpointStatistics, PeerStatistics
from aiograd.distributed.worker_core import WorkerCore


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


def statistics_of(core: WorkerCore, calls: Calls, passes: BackwardPasses, references: int) -> WorkerStatistics:
    """The statistics of a worker, from its parts.

    Args:
        core, calls, passes: the parts.
        references: the number of objects held for remote references.

    Returns:
        The counts, of this moment.
    """
    network = core.endpoint.statistics()
    contexts = list(passes.contexts)
    return WorkerStatistics(
        name=core.name,
        contexts=len(contexts),
        passes=sum(len(context.participants) for context in contexts),
        calls=sum(len(context.calls) for context in contexts),
        stuck=calls.stuck,
        references=references,
        in_doubt=sum(len(context.in_doubt) for context in contexts),
        passes_committed=passes.committed,
        passes_aborted=passes.aborted,
        bytes_held=network.bytes_held,
        bytes_in=sum(peer.bytes_in for peer in network.peers),
        bytes_out=sum(peer.bytes_out for peer in network.peers),
        peers=network.peers,
        network=network,
    )
