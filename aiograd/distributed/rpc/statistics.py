"""Statistics: counts of an endpoint and of its peers, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStatistics:
    """One conversation with a peer. Sizes in bytes, times in seconds."""

    name: str
    principal: str
    is_connected: bool
    #: requests of this side that wait for an answer, and requests of the peer that run
    outstanding: int
    running: int
    #: bytes of frames, in the clear
    bytes_in: int
    bytes_out: int
    frames_in: int
    frames_out: int
    #: frames sent again
    resent: int
    #: bytes of messages that are on their way in or being worked on
    bytes_held: int
    #: from request to answer, on average of the quickest of the latest 32: the way there and back, with the least work in between; None
    #: before the first answer
    round_trip: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointStatistics:
    """All of an endpoint."""

    name: str
    peers: tuple[PeerStatistics, ...]
    #: bytes of messages of all peers that are on their way in or being worked on
    bytes_held: int
    #: connections with an unfinished handshake, and handshakes that failed
    handshakes: int
    failed_handshakes: int
    #: conversations that ended without a goodbye
    lost: int
