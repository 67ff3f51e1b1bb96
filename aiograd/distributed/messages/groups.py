"""Messages between the members of a group of workers."""

from __future__ import annotations

from typing import Annotated, Any, Final, TypeAlias

from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import WireMessage, message
from aiograd.distributed.rpc.codec import WireTensor

#: bytes of the nonce of a member, and of the key of a group
NONCE: Final = 16
#: the first value of an answer to `GroupJoin` of a worker that has withdrawn
GIVEN_UP: Final = "given up"

Nonce: TypeAlias = Annotated[bytes, Bound(f"{NONCE} bytes", lambda nonce: len(nonce) == NONCE)]


@message(code="collective")
class JoinRefused(WireMessage):
    """The answer of a worker that has withdrawn from forming the group."""

    word: Annotated[str, Bound(repr(GIVEN_UP), GIVEN_UP.__eq__)]
    #: the wire form of its error
    error: Any


@message(kind=9, name="COLLECTIVE", word="join", code="collective", answer=Nonce | list[Nonce] | JoinRefused)
class GroupJoin(WireMessage):
    """The sender joins a group. The answer has the nonce of the receiver; of a large group the nonces of all members, by rank."""

    name: str
    #: of all members, by rank
    names: list[str]
    #: of the sender
    nonce: Nonce


@message(kind=9, name="COLLECTIVE", word="withdraw", code="collective", answer=bool)
class GroupWithdraw(WireMessage):
    """The sender withdraws from forming a group. The answer is True."""

    name: str
    #: with which it has joined
    nonce: Nonce
    #: the wire form of its error
    error: Any


@message(code="collective")
class PieceContent(WireMessage):
    """A piece of the arrays of an operation; see `collectives.exchange`."""

    #: an `OperationForm` as JSON
    operation: bytes
    round: int
    part: int
    piece: int
    arrays: list[WireTensor]


@message(kind=9, name="COLLECTIVE", word="piece", code="collective", answer=PieceContent | None)
class GroupPiece(WireMessage):
    """A piece of an operation of a group. The answer has the piece that the receiver owes the sender next, or None."""

    key: bytes
    name: str
    #: of the operation
    number: int
    content: PieceContent


@message(code="collective")
class Decision(WireMessage):
    """The answer to `Vote`."""

    #: the value of an `Outcome`
    outcome: str
    #: the wire form of the error where the outcome is another than to commit, or None
    error: Any


@message(kind=9, name="COLLECTIVE", word="vote", code="collective", answer=Decision)
class Vote(WireMessage):
    """The sender is prepared, and waits for the decision of the receiver."""

    key: bytes
    name: str
    #: of the agreement
    number: int


@message(kind=9, name="COLLECTIVE", word="outcome", code="collective", answer=str)
class GroupOutcome(WireMessage):
    """Ask for the outcome of an agreement. The answer is the value of an `Outcome`."""

    key: bytes
    #: of the agreement
    number: int


@message(kind=9, name="COLLECTIVE", word="leave", code="collective", answer=bool)
class GroupLeave(WireMessage):
    """The sender leaves the group. The answer is True."""

    key: bytes
    name: str
    #: of its first operation without the sender
    number: int


@message(code="collective")
class Leaver(WireMessage):
    """A member that has left its group."""

    rank: Annotated[int, Bound("a rank from 0", lambda rank: rank >= 0)]
    #: of the first operation without it
    number: int


@message(kind=9, name="COLLECTIVE", word="left", code="collective", answer=bool)
class GroupLeft(WireMessage):
    """Rank 0 passes on which members have left. The answer is True."""

    key: bytes
    name: str
    leavers: list[Leaver]


@message(kind=9, name="COLLECTIVE", word="fail", code="collective", answer=bool)
class GroupFail(WireMessage):
    """The group has failed. The answer is True."""

    key: bytes
    name: str
    #: the wire form of the reason
    error: Any
