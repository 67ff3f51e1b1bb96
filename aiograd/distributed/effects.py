"""Effects: what a session asks its driver to do. They are left in `Session.effects`, in order, and carried out by whoever drives it."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias


class Deliver(NamedTuple):
    """Run the handler for a request of the peer; `Session.respond` takes what it returns."""

    id: int
    #: what is asked for, a number that sessions do not interpret
    kind: int
    #: complete, and the receiver's to keep; the session counts its bytes against the budget until it is answered or abandoned
    message: bytearray | memoryview
    #: seconds until the answer is of no use, less what its way back may take
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
    """Cancel the handler of a request of the peer: nobody waits for it any more. What it still answers is ignored."""

    id: int


class Left(NamedTuple):
    """The peer said goodbye."""


#: `Former.first` where a session is not known, or not any more
NOT_KNOWN = 0xFFFF_FFFF_FFFF_FFFF


class Former(NamedTuple):
    """The peer reports on an earlier session that it has given up: it has run no request from the id `first` on."""

    session: bytes
    first: int


Effect: TypeAlias = Deliver | Answered | Expired | Abandon | Left | Former
