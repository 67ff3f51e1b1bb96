"""Limits: how much a worker takes from its peers, and how long it waits for them.

Every limit is enforced before anything is allocated for what it limits. They hold for what comes from peers; a worker's own local passes
queue and are never refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from aiograd.errors import ArgumentError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one worker. Sizes in bytes, times in seconds.

    Raises:
        ArgumentError: a limit is not positive.
    """

    #: one message (a call, a reply, the gradients of one edge) with all its tensors
    message_bytes: int = 256 * MIB
    #: one frame: a message is cut into frames
    frame_bytes: int = MIB
    #: the part of a message that is not tensor data: names, numbers, strings, descriptions of tensors
    head_bytes: int = MIB
    #: tensors in one message, their dimensions, and how deep arguments may be nested
    tensors: int = 1024
    dimensions: int = 16
    depth: int = 16
    #: bytes of messages that are on their way in, per peer and in total; a sender is held back by `bytes_per_peer` of its own
    bytes_per_peer: int = 256 * MIB
    bytes_total: int = 1024 * MIB
    #: requests of one peer that run at the same time
    requests_per_peer: int = 1024
    #: open contexts
    contexts_per_principal: int = 256
    contexts: int = 4096
    edges_per_context: int = 65536
    #: objects held for remote references
    references_per_principal: int = 65536
    #: jobs that wait for the executor, per thread
    executor_queue: int = 64
    #: deadline of calls and passes that name none, and the longest that a peer may ask for
    default_deadline: float = 60.0
    max_deadline: float = 3600.0
    #: a worker that has sent nothing for this long sends a heartbeat; one that has missed so many is lost
    heartbeat: float = 0.5
    missed_heartbeats: int = 3
    #: a context whose opener is gone lives this long; None: twice `default_deadline`
    lease: float | None = None
    #: connections
    connections: int = 1024
    connections_per_address: int = 64
    handshake_timeout: float = 5.0
    keepalive_timeout: float = 60.0
    #: output that a peer does not read: it is closed when there is this much, or after this time
    unread_bytes: int = 64 * MIB
    unread_seconds: float = 10.0
    #: signed HTTP requests: how far clocks may differ, and how many nonces are remembered
    clock_skew: float = 60.0
    nonces: int = 1_000_000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and not value > 0:
                raise ArgumentError(f"Limits({field.name}={value!r}): expected a number above 0")
        if self.default_deadline > self.max_deadline:
            raise ArgumentError(f"Limits: default_deadline={self.default_deadline} is above max_deadline={self.max_deadline}")

    @property
    def silence(self) -> float:
        """Seconds after which a silent peer is lost."""
        return self.heartbeat * self.missed_heartbeats

    @property
    def lease_seconds(self) -> float:
        """Seconds that a context outlives its opener."""
        return 2 * self.default_deadline if self.lease is None else self.lease
