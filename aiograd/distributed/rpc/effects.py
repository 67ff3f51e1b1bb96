"""Effects: commands of a session to its `PeerSession`. The session appends them to `Session.effects`, which are carried out in order."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Deliver(NamedTuple):
    """Run the handler for a request of the peer; `Session.respond` takes its result."""

    id: int
    #: the kind of the request, a number that sessions do not interpret
    kind: int
    #: the complete message, owned by the receiver; the session charges its bytes to the budget until the request is answered or abandoned
    message: bytearray | memoryview
    #: seconds until the requester stops waiting, less the time that the answer may take to arrive
    timeout: float


class Answered(NamedTuple):
    """A request of this side was answered; `failed` where the answer is an error."""

    id: int
    message: bytearray | memoryview
    failed: bool


class Expired(NamedTuple):
    """The deadline of a request of this side passed without an answer."""

    id: int


class Abandon(NamedTuple):
    """Cancel the handler of a request of the peer, which does not wait for it any more. A later answer is ignored."""

    id: int


class PeerLeft(NamedTuple):
    """The peer said goodbye."""


#: `SessionEnded.first` where a session is not known, or not any more
NOT_KNOWN = 0xFFFF_FFFF_FFFF_FFFF


class SessionEnded(NamedTuple):
    """The peer reports on an earlier session that it has given up: it has run no request from the id `first` on."""

    session: bytes
    first: int


Effect: TypeAlias = Deliver | Answered | Expired | Abandon | PeerLeft | SessionEnded
